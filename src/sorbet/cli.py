"""The command `sorbet`. Everything heavy is imported by the command that needs it."""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import __version__
from .errors import SorbetError

app = typer.Typer(
    help="Sorbet: spiking BERTs with 1-bit weights, exact from training to hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.sorbet", help="A .sorbet file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main() -> None:
    """What is wrong with a file or a model is said in one line, with exit status 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except SorbetError as error:
        err.print("[bold red]error:[/]", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print("[yellow]warning:[/]", end=" ")
    err.print(str(message), markup=False, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def info(
    model: ModelPath,
    widths: Annotated[bool, typer.Option("--widths", help="Bits that each accumulator needs, worst case.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shape, encoding, sizes, accumulator widths and provenance of a model."""
    from .artifact import Artifact
    from .info import describe, show

    artifact = Artifact.load(model)
    facts = describe(artifact, model.stat().st_size, widths)
    if as_json:
        _print_json(facts)
    else:
        show(facts, out)


@app.command()
def verify(
    model: ModelPath,
    data: Annotated[Path, typer.Option(help="GLUE TSV, CSV or plain lines, gzip or not.", show_default=False)],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The PyTorch checkpoint it was converted from; compared as well.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N examples.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare all backends on every example, neuron by neuron: exit status 0 if all agree, 1 if not."""
    from .artifact import Artifact
    from .text import read_table
    from .verify import verify as run

    artifact = Artifact.load(model)
    texts = read_table(data).texts()[:limit]
    with _progress("verifying", len(texts), hidden=as_json) as advance:
        report = run(artifact, texts, checkpoint, advance)
    if as_json:
        _print_json(report.to_json())
    else:
        out.print(f"{report}  ({', '.join(report.backends)})", highlight=False)
        if report.first is not None:
            out.print(f"first difference: {report.first}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if report.differing else 0)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A Sorbet checkpoint folder (stage M3) with its tokenizer.")],
    target: Annotated[Path, typer.Argument(metavar="MODEL.sorbet", help="The file to write.")],
) -> None:
    """Write the artefact of a trained Sorbet. Exact, or refused with the reason."""
    try:
        from transformers.utils import logging as transformers_logging

        from .conversion import convert as run
        from .modeling_sorbet import load_sorbet, load_tokenizer
    except ImportError as error:
        raise _needs_train("converting", error) from None
    transformers_logging.disable_progress_bar()
    model = load_sorbet(checkpoint)
    artifact = run(model.float(), load_tokenizer(checkpoint))
    try:
        artifact.save(target)
    except OSError as error:
        raise SorbetError(f"{target}: cannot be written ({error.strerror})") from None
    out.print(f"{target}: {target.stat().st_size / 1e6:.2f} MB, exact", highlight=False)


@app.command()
def distill(
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="A BERT: folder or hub id; fine-tuned first if it has no head.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte.")] = None,
    data: Annotated[str, typer.Option(help="Folder of GLUE files, or a dataset of the hub.")] = "nyu-mll/glue",
    train: Annotated[Path | None, typer.Option(help="Your own data instead: CSV, TSV or JSONL.")] = None,
    dev: Annotated[Path | None, typer.Option(help="Its dev set; without one a tenth of the rows is held out.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    regression: Annotated[bool, typer.Option("--regression", help="Labels are numbers to predict.")] = False,
    holdout: Annotated[float | None, typer.Option(help="Share of the training rows to hold out as dev set.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A YAML file, or the name of a shipped recipe.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change the recipe: M3.epochs=4, seed=1, …")
    ] = None,
    stages: Annotated[str, typer.Option(help="The stages, in order; straight to M3 with 'M3'.")] = "M1,M2,M3",
    base: Annotated[
        Path | None, typer.Option("--from", help="A run whose finished steps are the same: not done again.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run and how long, and stop.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The whole chain on made-up data, in a minute or two.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Mixed precision in training.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile, with one length for all batches.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave a GPU alone.")] = False,
    accumulate: Annotated[int, typer.Option(min=1, help="Split each batch into that many.")] = 1,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard logs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    as_json: AsJson = False,
) -> None:
    """BERT to Sorbet: fine-tune, M1, M2, M3, convert, verify, evaluate (Algorithm 4)."""
    try:
        from .distillation.command import Settings, distill_command
    except ImportError as error:
        raise _needs_train("distilling", error) from None
    chosen = Settings(
        out=out_folder, teacher=teacher, task=task, data=data, train=train, dev=dev, text=tuple(text or ()),
        label=label, regression=regression, holdout=holdout, recipe=recipe, changes=tuple(settings or ()),
        stages=tuple(stages.split(",")), base=base, resume=resume, dry_run=dry_run, smoke=smoke, bf16=bf16,
        compile=compiled, cpu=cpu, accumulation=accumulate, tensorboard=tensorboard, quiet=quiet or as_json,
    )  # fmt: skip
    results = distill_command(chosen, err if as_json else out)
    if as_json:
        _print_json(results)


@app.command()
def evaluate(
    model: ModelPath,
    data: Annotated[Path, typer.Option(help="Folder of GLUE files, or a labelled file.", show_default=False)],
    task: Annotated[
        str | None, typer.Option(help="A GLUE task; without one the file's labels are the model's.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    part: Annotated[str | None, typer.Option(help="Which dev set, as in dev_mismatched.")] = None,
    holdout: Annotated[float | None, typer.Option(help="The share of train that the run held out.")] = None,
    backend: Annotated[str, typer.Option(help="reference (integers) or spikes: the same numbers.")] = "reference",
    as_json: AsJson = False,
) -> None:
    """Scores, spike rate and energy of a model on labelled text."""
    from .artifact import Artifact
    from .distillation.tasks import labelled
    from .evaluation import evaluate as run

    artifact = Artifact.load(model)
    question, examples = labelled(artifact, data, task, tuple(text or ()), label, part, holdout)
    with _progress("evaluating", len(examples), hidden=as_json) as advance:
        found = run(artifact, question, examples, advance, backend)
    if as_json:
        _print_json(found.to_json())
        return
    scores = ", ".join(f"{name} {value:.4f}" for name, value in found.scores.items())
    out.print(
        f"{scores} on {found.examples} examples\nspike rate {found.spike_rate:.4f}, "
        f"{found.millijoules:.3g} mJ a text by the paper's formula (the same BERT: {found.bert_millijoules:.3g} mJ)",
        highlight=False,
    )


@app.command()
def push(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)
    ],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make it a private repository.")] = False,
    gather_into: Annotated[
        Path | None, typer.Option("--gather", help="Only collect what would be uploaded in this folder.")
    ] = None,
) -> None:
    """Upload checkpoint, artefact and model card of a run to the Hugging Face hub."""
    from .hub import gather
    from .hub import push as run

    if gather_into is not None:
        out.print("\n".join(gather(run_folder, gather_into)), markup=False, highlight=False)
        return
    out.print(run(run_folder, repository, private), markup=False, highlight=False)


def _needs_train(what: str, error: ImportError) -> SorbetError:
    return SorbetError(f"{what} needs PyTorch, and {error.name} is not installed: pip install 'sorbet-snn[train]'")


@app.command()
def quickstart() -> None:
    """Classify a few sentences with the model that comes with the package, and prove the chain on them."""
    from .quickstart import run

    run(out)


class _progress:
    """A progress bar on stderr; yields the function that advances it."""

    def __init__(self, what: str, total: int, hidden: bool = False):
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=err, transient=True, disable=hidden or not err.is_terminal)
        self.total = total

    def __enter__(self) -> Any:
        self.bar.__enter__()
        task = self.bar.add_task("", total=self.total)
        return lambda done: self.bar.advance(task, done)

    def __exit__(self, *exc: Any) -> None:
        self.bar.__exit__(*exc)


if __name__ == "__main__":
    main()
