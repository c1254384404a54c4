"""Helper of test_distillation: one step of a Sorbet in this process's share of a batch, under DDP."""

import sys

import torch
import torch.distributed as dist
from conftest import random_inputs, random_model
from torch.nn.parallel import DistributedDataParallel


def step(rank: int, world: int, folder: str, port: str) -> None:
    model = random_model(seed=2)
    for name, buffer in model.named_buffers():
        if name.endswith("running_nu"):
            buffer.copy_(torch.linspace(-0.05, 0.05, len(buffer)))
    model.train()
    inputs = random_inputs(model, batch=4, length=14)
    labels = torch.tensor([0, 1, 2, 0])
    network = model
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        network = DistributedDataParallel(model)
        inputs = {name: value[rank::world] for name, value in inputs.items()}
        labels = labels[rank::world]
    for _ in range(2):  # the second step sees the ν and ψ that the first one left
        model.zero_grad()
        network(**inputs, labels=labels).loss.backward()
    state = {name: parameter.grad for name, parameter in model.named_parameters()} | dict(model.named_buffers())
    torch.save(state, f"{folder}/{world}-{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    step(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
