"""transformers' Trainer with a teacher: losses, parameter groups and schedule of a distillation step."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import Trainer

from ..modeling_sorbet import SorbetPreTrainedModel
from ..text import Text
from .losses import attention_loss, logits_loss, representation_loss
from .recipe import Step
from .tasks import Examples


class EncodedExamples(Dataset):
    """Examples as token ids: short, in memory, tokenised once."""

    def __init__(self, examples: Examples, tokenizer: Any, max_length: int):
        first, second = columns(examples.texts)
        # Token types are what the artefact's tokenizer gives, asked for or not: training has to see the same.
        encoded = tokenizer(first, second, truncation=True, max_length=max_length, return_token_type_ids=True)
        self.rows = [
            {"input_ids": ids, "token_type_ids": kinds, "labels": label}
            for ids, kinds, label in zip(encoded["input_ids"], encoded["token_type_ids"], examples.labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def columns(texts: list[Text]) -> tuple[list[str], list[str] | None]:
    if not texts or isinstance(texts[0], str):
        return list(texts), None  # type: ignore[arg-type]
    return [text[0] for text in texts], [text[1] for text in texts]


class Collator:
    """Pads a batch to its longest row, or to one length for all batches (what compiled code likes best)."""

    def __init__(self, pad_token_id: int, fixed_length: int | None = None):
        self.pad_token_id, self.fixed_length = pad_token_id, fixed_length

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = self.fixed_length or max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), length), self.pad_token_id)
        types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for i, row in enumerate(rows):
            end = len(row["input_ids"])
            ids[i, :end] = torch.tensor(row["input_ids"])
            types[i, :end] = torch.tensor(row["token_type_ids"])
            mask[i, :end] = 1
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


class DistillationTrainer(Trainer):
    """Trains a student on what its teacher says; without a teacher, on the labels (how the teacher itself is made)."""

    def __init__(self, *args: Any, teacher: nn.Module | None, step: Step, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # every loss here is a mean over its batch: accumulation divides it
        self.step = step
        self.teacher = None if teacher is None else prepare_teacher(teacher, self)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        extra = {"output_hidden_states": True, "output_attentions": self.step.attention > 0}
        student = model(**inputs, **extra)
        with torch.no_grad(), self.compute_loss_context_manager():
            teacher = self.teacher(**inputs, **extra)
        loss = distillation_loss(student, teacher, inputs["attention_mask"], self.step)
        return (loss, student) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Compiled code wants batches of one size; evaluation must see every example."""
        whole = self.args.per_device_train_batch_size * self.args.world_size
        dataset: Any = self.train_dataset
        self.args.dataloader_drop_last = self.args.torch_compile and len(dataset) >= whole
        try:
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model
            groups = parameter_groups(trained, self.step)
            self.optimizer = AdamW(groups, lr=self.step.learning_rate, betas=(0.9, 0.999), eps=1e-8)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            lambdas = [
                schedule(num_training_steps, self.step.warmup, self.step.frozen_scales if group["scales"] else 0.0)
                for group in optimizer.param_groups
            ]
            self.lr_scheduler = LambdaLR(optimizer, lambdas)
            self._created_lr_scheduler = True
        return self.lr_scheduler


def distillation_loss(student: Any, teacher: Any, mask: Tensor, step: Step) -> Tensor:
    """L = w₁ L_logits + w₂ L_reps (+ w₃ L_attention) on the outputs of two models with as many blocks."""
    regression = student.logits.shape[-1] == 1
    loss = step.logits * logits_loss(student.logits, teacher.logits, step.temperature, regression)
    if step.reps:
        ours, theirs = student.hidden_states[1:], teacher.hidden_states[1:]
        loss = loss + step.reps * representation_loss(ours, theirs, mask)
    if step.attention:
        loss = loss + step.attention * attention_loss(student.attentions, teacher.attentions, mask)
    return loss


def prepare_teacher(teacher: nn.Module, trainer: Trainer) -> nn.Module:
    """In evaluation mode (no dropout), without gradients, on the trainer's device; compiled if the student is."""
    teacher.eval().requires_grad_(False)
    if isinstance(teacher, SorbetPreTrainedModel):
        teacher.exact_evaluation = False  # what it says may be rounded to bfloat16, as the student's training is
    nn.Module.to(teacher, trainer.args.device)
    return torch.compile(teacher) if trainer.args.torch_compile else teacher  # type: ignore[return-value]


def parameter_groups(model: nn.Module, step: Step) -> list[dict[str, Any]]:
    """Weights decay; biases, norms and shifts do not; log2 of the scales neither, at a learning rate of their own."""
    groups: dict[str, list[Tensor]] = {"weights": [], "vectors": [], "scales": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "scales" if name.endswith("log2_scale") else "weights" if parameter.dim() > 1 else "vectors"
        groups[kind].append(parameter)
    scale_lr = step.learning_rate if step.scale_learning_rate is None else step.scale_learning_rate
    made = [
        {"params": groups["weights"], "weight_decay": step.weight_decay, "lr": step.learning_rate, "scales": False},
        {"params": groups["vectors"], "weight_decay": 0.0, "lr": step.learning_rate, "scales": False},
        {"params": groups["scales"], "weight_decay": 0.0, "lr": scale_lr, "scales": True},
    ]
    return [group for group in made if group["params"]]


def schedule(steps: int, warmup: float, frozen: float) -> Callable[[int], float]:
    """Linear up over the first share, linear down to 0; held at 0 over the last share `frozen`."""
    up, end = max(int(steps * warmup), 1), steps * (1 - frozen)

    def factor(step: int) -> float:
        if step >= end:
            return 0.0
        return min((step + 1) / up, (steps - step) / max(steps - up, 1), 1.0)

    return factor


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    best: Path | None  # the checkpoint of the best evaluation so far
    finished: bool  # nothing is left to train

    @property
    def step(self) -> int:
        return int(self.path.name.rsplit("-", 1)[1])


def last_checkpoint(folder: Path, max_steps: int) -> Checkpoint | None:
    """The newest checkpoint that was written to its end; a half-written one is removed.

    The Trainer writes trainer_state.json last, so a checkpoint without it was cut short.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    for path in reversed(found):
        file = path / "trainer_state.json"
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            best = state.get("best_global_step")
            control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
        except (OSError, ValueError, AttributeError):
            shutil.rmtree(path)
            continue
        best_path = folder / f"checkpoint-{best}" if best else None
        if best_path is not None and state.get("best_model_checkpoint") != str(best_path):  # the run has moved
            write_json(file, state | {"best_model_checkpoint": str(best_path)})
        finished = state.get("global_step", 0) >= max_steps or bool(control.get("should_training_stop"))
        return Checkpoint(path, best_path, finished)
    return None


def write_json(path: Path, value: Any) -> None:
    """All of it or nothing: a file that is there is whole."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(beside, path)


def logits_of(trainer: Trainer, dataset: EncodedExamples) -> np.ndarray:
    predictions = trainer.predict(dataset).predictions
    logits = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)
    assert len(logits) == len(dataset), f"{len(logits)} predictions for {len(dataset)} examples"
    return logits
