"""`sorbet distill`: from what a person says to a run, and its results as a table."""

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from .. import madeup
from ..errors import SorbetError
from .recipe import Recipe, Step, load_recipe, parse_recipe
from .run import STAGES, Machine, Run, smoke_recipe
from .tasks import Examples, Task, TaskData, load_files, load_glue


@dataclass(frozen=True)
class Settings:
    out: Path | None
    teacher: str | None
    task: str | None
    data: str
    train: Path | None
    dev: Path | None
    text: tuple[str, ...]
    label: str | None
    regression: bool
    holdout: float | None
    recipe: str | None
    changes: tuple[str, ...]
    stages: tuple[str, ...]
    base: Path | None
    resume: bool
    dry_run: bool
    smoke: bool
    bf16: bool
    compile: bool
    cpu: bool
    accumulation: int
    tensorboard: bool
    quiet: bool


def distill_command(settings: Settings, out: Console) -> list[dict[str, Any]]:
    run = smoke_run(settings) if settings.smoke else plan(settings)
    if settings.dry_run:
        run.check()
        show_plan(run, out)
        return []
    started = time.monotonic()
    results = run.run(settings.resume, verify_examples=16 if settings.smoke else 64)
    if PartialState().is_main_process:
        show_results(run, results, out)
        out.print(f"{run.out}: {time.monotonic() - started:.0f} s", highlight=False)
    return results


def plan(settings: Settings) -> Run:
    """Everything that can be wrong is found here, before any training starts."""
    if settings.teacher is None or settings.out is None:
        raise SorbetError("name a BERT with --teacher and a folder with --out (or try the chain with --smoke)")
    if (settings.task is None) == (settings.train is None):
        raise SorbetError("name either a GLUE task with --task, or your own data with --train")
    if not settings.stages or settings.stages != tuple(s for s in STAGES if s in settings.stages):
        raise SorbetError(f"stages are {','.join(settings.stages)}: they must be some of M1,M2,M3, in this order")
    recipe = load_recipe(settings.recipe or settings.task or "default")
    recipe = changed(recipe, settings.changes)
    if settings.task is not None:
        data = load_glue(settings.task, settings.data, settings.holdout)
    else:
        assert settings.train is not None
        data = load_files(
            settings.train, settings.dev, settings.text, settings.label, settings.regression, settings.holdout
        )  # fmt: skip
    return Run(settings.teacher, data, recipe, settings.out, machine(settings), settings.stages, settings.base)


def machine(settings: Settings) -> Machine:
    return Machine(
        bf16=settings.bf16, compile=settings.compile, cpu=settings.cpu, accumulation=settings.accumulation,
        quiet=settings.quiet, tensorboard=settings.tensorboard,
    )  # fmt: skip


def changed(recipe: Recipe, changes: tuple[str, ...]) -> Recipe:
    """`M3.epochs=4`, `all.batch_size=32`, `student.encoding=offset`, `seed=1` on top of a recipe."""
    raw = asdict(recipe)
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise SorbetError(f"--set {change}: it must read NAME=VALUE, as in M3.epochs=4")
        first, *rest = path.split(".")
        if first in STAGES:
            places, rest = [raw["stages"][first]], rest
        elif first == "all":
            places = list(raw["stages"].values())
        else:
            places, rest = [raw], [first, *rest]
        for place in places:
            for parent in rest[:-1]:
                if not isinstance(place.get(parent), dict):
                    raise SorbetError(f"--set {change}: {parent} is none of teacher, student, all, M1, M2, M3, config")
                place = place[parent]
            try:
                place[rest[-1] if rest else first] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise SorbetError(f"--set {change}: {value!r} is no YAML value") from None
    return parse_recipe(raw, f"--set {' '.join(changes)}" if changes else "recipe")


def smoke_run(settings: Settings) -> Run:
    """A BERT of two layers made on the spot, and made-up film remarks."""
    state = PartialState(cpu=settings.cpu)
    if settings.out is None and state.num_processes > 1:
        raise SorbetError("several processes need a folder that all of them know: name one with --out")
    kept = settings.out is not None and not settings.dry_run
    home = settings.out.parent if settings.out and kept else Path(mkdtemp(prefix="sorbet-smoke-"))
    out = settings.out or home / "run"
    bert = home / f"{out.name}-bert"
    tokenizer = madeup.tokenizer()
    if state.is_main_process and not bert.is_dir():
        part = bert.with_name(f"{bert.name}.part")  # a kill in between leaves no half-made BERT behind
        shutil.rmtree(part, ignore_errors=True)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(part)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]", model_max_length=64,
        )  # fmt: skip
        fast.save_pretrained(part)
        part.rename(bert)
    state.wait_for_everyone()
    task = Task("madeup", ("text",), "label", madeup.LABELS)

    def examples(number: int, seed: int) -> Examples:
        made = madeup.remarks(number, seed)
        return Examples([remark.text for remark in made], [remark.label for remark in made])

    data = TaskData(task, examples(3200, 1), {"dev": examples(320, 2)}, "made-up film remarks")
    recipe = changed(smoke_recipe(Recipe(task="madeup")), settings.changes)
    return Run(str(bert), data, recipe, out, machine(settings), settings.stages, settings.base)


# ---------------------------------------------------------------------------------------------------------------------
# What a person sees
# ---------------------------------------------------------------------------------------------------------------------


def show_plan(run: Run, out: Console) -> None:
    data, task = run.data, run.data.task
    sets = ", ".join(f"{part} {len(examples):,}" for part, examples in data.dev.items())
    kind = "regression" if task.regression else f"{len(task.labels)} labels ({', '.join(task.labels[:6])})"
    out.print(
        f"task {task.name}: {kind}, best by {task.metric}\n"
        f"data {data.source}: train {len(data.train):,}, {sets}\nteacher {run.teacher}"
        + (" (has a head for the task)" if run.is_task_model() else " (will be fine-tuned)")
        + f"\nrun {run.out}",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "epochs", "steps", "batch", "learning rate", "taught by", "about"):
        table.add_column(name, justify="left" if name in ("step", "taught by") else "right")
    seconds = run.seconds_per_example()
    total = 0.0
    for name in ("teacher", *run.stages):
        step: Step = run.recipe.step(name)
        number = 0 if name == "teacher" and run.is_task_model() else run.num_steps(step)
        took = number * seconds * step.batch_size
        total += took
        taught = "labels" if name == "teacher" else step.teacher
        table.add_row(
            name,
            f"{step.epochs:g}",
            f"{number:,}",
            str(step.batch_size),
            f"{step.learning_rate:g}",
            taught,
            clock(took),
        )
    out.print(table)
    out.print(
        f"about {clock(total)} in all on {run.device()}, without evaluation (measured over two steps of M3)",
        highlight=False,
    )


def clock(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds > 5400
        else f"{seconds / 60:.1f} min"
        if seconds > 90
        else f"{seconds:.0f} s"
    )


def show_results(run: Run, results: list[dict[str, Any]], out: Console) -> None:
    parts, metrics = list(run.data.dev), run.data.task.metrics
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step")
    names = [f"{part} {metric}" if len(parts) > 1 else metric for part in parts for metric in metrics]
    for name in (*names, "spike rate", "size", "energy a text"):
        table.add_column(name, justify="right")
    for result in results:
        row = [f"{100 * result['scores'][part][metric]:.2f}" for part in parts for metric in metrics]
        if "spike_rate" in result:
            row += [f"{result['spike_rate']:.3f}", f"{result['bytes'] / 1e6:.2f} MB", f"{result['millijoules']:.3g} mJ"]
        elif result["step"] == "teacher" and "bert_millijoules" in results[-1]:
            row += ["", "", f"{results[-1]['bert_millijoules']:.3g} mJ"]
        table.add_row(result["step"], *row)
    out.print(table)
    if "verified" in results[-1]:
        out.print(f"verified: {results[-1]['verified']} (reference, spikes, pytorch)", highlight=False)
