"""First values for scales and statistics, from one forward pass; padded positions never count."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import root_mean_square
from .layers import Dyadic, SpikeNeuron, SpikingNorm


def random_batch(config: Any, batch: int = 8, length: int = 32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = min(length, config.max_position_embeddings)
    return {"input_ids": torch.randint(0, config.vocab_size, (batch, length), generator=generator)}


@torch.no_grad()
def calibrate(model: nn.Module, batch: dict[str, Tensor], names: set[str] | None = None) -> None:
    """Set α of every neuron and γ, β, ψ of every BSPN (or of those in `names`) from the inputs they see, in order.

    A neuron starts at BiT's α = c · mean |x| / √hi. A BSPN takes the place of the LayerNorm whose weights it holds:
    gain and bias are the least-squares fit of that LayerNorm's output on its own X ≫ k, channel by channel.
    """
    mask = batch.get("attention_mask")
    valid = torch.ones_like(batch["input_ids"]).bool() if mask is None else mask.bool()
    was_training = model.training
    model.eval()
    with _hooked(model, valid, names):
        device = next(model.parameters()).device
        model(**{name: value.to(device) for name, value in batch.items() if name != "labels"})
    model.train(was_training)


@contextmanager
def _hooked(model: nn.Module, valid: Tensor, names: set[str] | None) -> Iterator[None]:
    def fit_neuron(neuron: SpikeNeuron, args: tuple[Dyadic, ...]) -> None:
        x = _valid_entries(args[0].value, valid)
        mean_abs = float(x.abs().mean())
        silent = mean_abs == 0  # what sees nothing starts as if it had not been calibrated
        neuron.log2_scale.fill_(neuron.default_log2_scale() if silent else math.log2(neuron.initial_scale(mean_abs)))

    def fit_norm(norm: SpikingNorm, args: tuple[Tensor, ...]) -> None:
        x = args[0][valid.to(args[0].device)]  # [tokens, d]
        target = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps).double()
        x_hat = norm.bspn(x)[1].double()
        centred = x_hat - x_hat.mean(dim=0)
        gain = (centred * target).sum(dim=0) / centred.square().sum(dim=0).clamp_min(1e-9)
        norm.running_square.copy_(x_hat.square().mean(dim=0).clamp_min(1e-6))
        norm.bias.copy_(target.mean(dim=0) - gain * x_hat.mean(dim=0))
        norm.weight.copy_(gain * root_mean_square(norm.running_square))

    handles = []
    for name, module in model.named_modules():
        if names is not None and name not in names:
            continue
        if isinstance(module, SpikeNeuron) and module.num_steps is not None:
            handles.append(module.register_forward_pre_hook(fit_neuron))
        elif isinstance(module, SpikingNorm) and module.norm_type != "layernorm":
            handles.append(module.register_forward_pre_hook(fit_norm))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _valid_entries(x: Tensor, valid: Tensor) -> Tensor:
    valid = valid.to(x.device)
    if x.dim() == 4:  # attention probabilities [B, H, L, L]: valid queries and valid keys
        return x[(valid[:, None, :, None] & valid[:, None, None, :]).expand_as(x)]
    return x if x.dim() == 2 else x[valid]
