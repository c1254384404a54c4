"""Tasks and their data: GLUE from a folder or from the Hugging Face hub, and a user's own files."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact import Artifact
from ..errors import DataError
from ..text import Table, Text, read_table, text_columns


@dataclass(frozen=True)
class Task:
    """What is asked of a text. `labels` are the names in the order of the model's outputs; empty for regression."""

    name: str
    text_columns: tuple[str, ...] = ()
    label_column: str = ""
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)  # the first one chooses the best checkpoint
    folder: str = ""  # in GLUE's layout
    dev: tuple[str, ...] = ("dev",)  # splits by file name; the first one chooses

    @property
    def regression(self) -> bool:
        return not self.labels

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def parse_label(self, raw: str) -> float | int:
        """A label as files write it: by name, by index or, for regression, a number."""
        if self.regression:
            value = float(raw)
            if value != value or value in (float("inf"), float("-inf")):
                raise ValueError(raw)
            return value
        raw = canonical(raw)
        if raw in self.labels:
            return self.labels.index(raw)
        if not self.folder or not raw.isascii() or not raw.isdigit():  # GLUE's files may also count its labels
            raise ValueError(raw)
        return range(len(self.labels))[int(raw)]


def canonical(label: str) -> str:
    """A label without the spaces around it; 1.0 is 1."""
    label = label.strip()
    return re.sub(r"^(-?\d+)\.0+$", r"\1", label)


NLI = ("entailment", "neutral", "contradiction")  # the hub's order; the TSV files spell the names
PAIR, QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
GLUE: dict[str, Task] = {
    task.name: task
    for task in (
        Task("cola", ("sentence",), "label", ("unacceptable", "acceptable"), ("matthews", "accuracy"), "CoLA"),
        Task("sst2", ("sentence",), "label", ("negative", "positive"), ("accuracy",), "SST-2"),
        Task("mrpc", PAIR, "label", ("not_equivalent", "equivalent"), ("accuracy", "f1"), "MRPC"),
        Task("stsb", PAIR, "score", (), ("spearman", "pearson"), "STS-B"),
        Task("qqp", QUESTIONS, "is_duplicate", ("not_duplicate", "duplicate"), ("accuracy", "f1"), "QQP"),
        Task("mnli", PAIR, "gold_label", NLI, ("accuracy",), "MNLI", ("dev_matched", "dev_mismatched")),
        Task("qnli", ("question", "sentence"), "label", ("entailment", "not_entailment"), ("accuracy",), "QNLI"),
        Task("rte", PAIR, "label", ("entailment", "not_entailment"), ("accuracy",), "RTE"),
    )
}  # fmt: skip

# How the official files call what we call otherwise.
_RENAMED = {"mrpc": {"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"}}
_COLA_COLUMNS = ("source", "label", "mark", "sentence")  # the official CoLA files have no header


@dataclass(frozen=True)
class Examples:
    """Texts (or pairs) with their labels: class indices, or numbers for regression."""

    texts: list[Text]
    labels: list[float | int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TaskData:
    task: Task
    train: Examples
    dev: dict[str, Examples]  # by split; the first one chooses the best checkpoint
    source: str


# ---------------------------------------------------------------------------------------------------------------------
# GLUE
# ---------------------------------------------------------------------------------------------------------------------


def load_glue(name: str, data: str | Path = "nyu-mll/glue", holdout: float | None = None, seed: int = 0) -> TaskData:
    """A GLUE task from a folder (GLUE's TSV layout, gzip or not) or from a dataset of the hub.

    `holdout` sets aside that share of the training rows as dev set, for files that come without one.
    """
    if name not in GLUE:
        raise DataError(f"task is {name!r}: it must be one of {', '.join(GLUE)} (or give --train and --dev files)")
    task = GLUE[name]
    folder = Path(data)
    if not folder.is_dir():
        if folder.exists() or str(data).startswith((".", "/")):
            raise DataError(f"{data}: no such folder; name one that holds {task.folder}/train.tsv")
        return _from_hub(task, str(data), holdout, seed)
    folder = folder / task.folder if (folder / task.folder).is_dir() else folder
    train = _glue_examples(task, _find(folder, ("train", "train_subset")))
    if holdout is not None:
        train, dev = split(train, holdout, seed)
        return TaskData(task, train, {"holdout": dev}, f"{folder.name}, {holdout:g} of train held out (seed {seed})")
    dev_sets = {part: _glue_examples(task, _find(folder, (part,))) for part in task.dev}
    return TaskData(task, train, dev_sets, folder.name)


def load_split(name: str, path: str | Path, part: str | None = None) -> Examples:
    """One labelled file of a GLUE task, or that split of its folder."""
    task, path = GLUE[name], Path(path)
    if path.is_dir():
        path = path / task.folder if (path / task.folder).is_dir() else path
        path = _find(path, (part or task.dev[0],))
    return _glue_examples(task, path)


def _find(folder: Path, stems: Sequence[str]) -> Path:
    for stem in stems:
        for suffix in (".tsv", ".tsv.gz", ".csv", ".csv.gz"):
            if (folder / (stem + suffix)).is_file():
                return folder / (stem + suffix)
    raise DataError(
        f"{folder}: no {stems[0]}.tsv (or .tsv.gz) there; "
        + ("--holdout 0.1 sets aside a tenth of the training rows" if "dev" in stems[0] else "is it the task's folder?")
    )


def _glue_examples(task: Task, path: Path) -> Examples:
    table = read_table(path, columns=_COLA_COLUMNS if task.name == "cola" else None, drop_malformed=True)
    renamed = _RENAMED.get(task.name, {})
    table = replace(table, columns=tuple(renamed.get(name, name) for name in table.columns))
    return read_examples(task, table)


def _from_hub(task: Task, repository: str, holdout: float | None, seed: int) -> TaskData:
    try:
        from datasets import load_dataset

        raw = load_dataset(repository, task.name)
    except ImportError:
        raise DataError(
            "data from the hub needs the package datasets (pip install datasets); or name a folder with --data"
        ) from None
    except Exception as error:  # the library raises many kinds, all of which mean that it is not there
        raise DataError(
            f"{repository} ({task.name}): not to be had from the hub ({str(error).splitlines()[0][:120]}); "
            "name a folder with --data"
        ) from None
    columns = {"sst2": ("sentence",), "cola": ("sentence",), "mnli": ("premise", "hypothesis")}
    names = columns.get(task.name, task.text_columns)

    def examples(part: str) -> Examples:
        rows = raw[part]
        texts = list(rows[names[0]]) if len(names) == 1 else list(zip(rows[names[0]], rows[names[1]], strict=True))
        return Examples(texts, list(rows["label"]))

    train = examples("train")
    if holdout is not None:
        train, dev = split(train, holdout, seed)
        return TaskData(task, train, {"holdout": dev}, f"{repository}, {holdout:g} of train held out (seed {seed})")
    dev_sets = {part: examples(part.replace("dev", "validation")) for part in task.dev}
    return TaskData(task, train, dev_sets, repository)


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """The examples without a random share of them, and that share."""
    import random

    if not 0 < share < 1:
        raise DataError(f"holdout is {share:g}: it must be a share between 0 and 1")
    order = random.Random(seed).sample(range(len(examples)), len(examples))
    cut = max(int(len(order) * share), 1)

    def pick(indices: list[int]) -> Examples:
        return Examples([examples.texts[i] for i in indices], [examples.labels[i] for i in indices])

    return pick(sorted(order[cut:])), pick(sorted(order[:cut]))


# ---------------------------------------------------------------------------------------------------------------------
# A user's own files
# ---------------------------------------------------------------------------------------------------------------------

LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "gold_label", "score", "is_duplicate", "Quality")


def load_files(
    train: str | Path,
    dev: str | Path | None = None,
    text: Sequence[str] = (),
    label: str | None = None,
    regression: bool = False,
    holdout: float | None = None,
    seed: int = 0,
) -> TaskData:
    """A task made of files (CSV, TSV or JSONL): one or two text columns, labels as strings or numbers."""
    table = read_table(train)
    texts = tuple(text) or text_columns(table)
    if holdout is not None and dev is not None:
        raise DataError("both --dev and --holdout: name a dev set, or a share of the training rows to hold out")
    if len(texts) > 2:
        raise DataError(f"{len(texts)} text columns ({', '.join(texts)}): a model reads one or two")
    column = label or next((name for name in LABEL_COLUMNS if name in table.columns), None)
    if column is None:
        raise DataError(f"{train}: no label column among {', '.join(table.columns)}; name it with --label")
    if column in texts:
        raise DataError(f"{train}: column {column!r} is both text and label; name them with --text and --label")
    names = [canonical(raw) for raw in table.column(column)]
    labels: tuple[str, ...] = () if regression else _label_names(table, names)
    metrics = ("spearman", "pearson") if regression else ("accuracy", "f1")
    task = Task(Path(train).name.split(".")[0], texts, column, labels, metrics)
    examples = read_examples(task, table)
    if dev is None:
        share = 0.1 if holdout is None else holdout
        examples, held_out = split(examples, share, seed)
        source = f"{Path(train).name}, {share:g} of it held out (seed {seed})"
        return TaskData(task, examples, {"holdout": held_out}, source)
    return TaskData(
        task, examples, {"dev": read_examples(task, read_table(dev))}, f"{Path(train).name}, {Path(dev).name}"
    )


def labelled(
    artifact: Artifact,
    data: str | Path,
    task: str | None,
    text: Sequence[str] = (),
    label: str | None = None,
    part: str | None = None,
    holdout: float | None = None,
) -> tuple[Task, Examples]:
    """The examples to evaluate an artefact on: a GLUE task's dev set, or a file with the artefact's own labels."""
    if task is not None:
        if task not in GLUE:
            raise DataError(f"task is {task!r}: it must be one of {', '.join(GLUE)}")
        if holdout is not None:  # the same rows that a run with this share held out
            return GLUE[task], load_glue(task, data, holdout).dev["holdout"]
        return GLUE[task], load_split(task, data, part)
    table = read_table(data)
    column = label or next((name for name in LABEL_COLUMNS if name in table.columns), None)
    if column is None:
        raise DataError(f"{data}: no label column among {', '.join(table.columns)}; name it with --label")
    regression = artifact.problem_type == "regression"
    question = Task(
        Path(data).name, tuple(text) or text_columns(table), column, () if regression else artifact.labels,
        ("spearman", "pearson") if regression else ("accuracy", "f1"),
    )  # fmt: skip
    return question, read_examples(question, table)


def _label_names(table: Table, raw: list[str]) -> tuple[str, ...]:
    found = sorted(set(raw))
    for line, name in zip(table.lines, raw, strict=True):
        if not name or name.casefold() in ("nan", "none", "null"):
            raise DataError(f"{table.path}, line {line}: label {name!r}; leave rows without a label out")
    if len(found) == 1:
        raise DataError(f"{table.path}: every row is labelled {found[0]!r}; a classifier needs at least two classes")
    if len(found) > max(100, len(raw) // 10):
        raise DataError(
            f"{table.path}: {len(found)} different labels in {len(raw)} rows; "
            "if they are numbers to predict, say --regression; else check the label column"
        )
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)


def read_examples(task: Task, table: Table) -> Examples:
    for name in (*task.text_columns, task.label_column):
        table.column(name)  # says which are there, if this one is not
    columns = [table.column(name) for name in task.text_columns]
    texts: list[Any] = list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))
    labels = []
    for raw, line in zip(table.column(task.label_column), table.lines, strict=True):
        try:
            labels.append(task.parse_label(raw))
        except (ValueError, IndexError):
            wanted = "a number" if task.regression else f"one of {', '.join(task.labels)}"
            raise DataError(f"{table.path}, line {line}: label {raw!r}; it must be {wanted}") from None
    empty = sum(not "".join(text).strip() for text in texts)
    if empty:
        warnings.warn(f"{table.path}: {empty} rows have no text at all", stacklevel=2)
    return Examples(texts, labels)
