"""How good an artefact is on labelled text, and how often its neurons fire. No torch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .artifact import Artifact, Shape
from .energy import energy
from .errors import DataError, SorbetError
from .text import TextEncoder, pad
from .verify import batches, integer_backends, site_encoding

if TYPE_CHECKING:
    from .distillation.tasks import Examples, Task


@dataclass
class Spikes:
    """Spikes and slots (neurons × T) by site, over valid tokens only."""

    fired: dict[str, int]
    slots: dict[str, int]

    @property
    def rate(self) -> float:
        return sum(self.fired.values()) / max(sum(self.slots.values()), 1)

    def add(self, other: "Spikes") -> None:
        for mine, theirs in ((self.fired, other.fired), (self.slots, other.slots)):
            for name, number in theirs.items():
                mine[name] = mine.get(name, 0) + number


@dataclass(frozen=True)
class Evaluation:
    scores: dict[str, float]
    spike_rate: float
    millijoules: float  # per text, by the paper's formula
    bert_millijoules: float
    examples: int
    logits: NDArray[np.float64]

    def to_json(self) -> dict[str, Any]:
        return {
            "examples": self.examples, "scores": self.scores, "spike_rate": self.spike_rate,
            "millijoules": self.millijoules, "bert_millijoules": self.bert_millijoules,
        }  # fmt: skip


def evaluate(
    artifact: Artifact,
    task: "Task",
    examples: "Examples",
    progress: Callable[[int], None] = lambda done: None,
    backend: str = "reference",
) -> Evaluation:
    """The task's metrics of the artefact on `examples`, its spike rate and its energy by the paper's formula."""
    from .distillation.metrics import evaluate as score

    expected = 1 if task.regression else len(task.labels)
    if artifact.shape.num_labels != expected:
        raise SorbetError(f"the model has {artifact.shape.num_labels} outputs, task {task.name} {expected}")
    if not task.regression and set(artifact.labels) == set(task.labels) and artifact.labels != task.labels:
        raise SorbetError(f"the model's labels come in the order {', '.join(artifact.labels)}, not the task's")
    logits, spikes, lengths = run(artifact, examples.texts, progress, backend)
    try:
        scores = score(task.metrics, logits, np.asarray(examples.labels))
    except ImportError as error:
        raise DataError(f"{', '.join(task.metrics)} need {error.name}: pip install 'sorbet-snn[train]'") from None
    used = [energy(artifact.shape, length, spikes.rate) for length in lengths]
    return Evaluation(
        scores=scores,
        spike_rate=spikes.rate,
        millijoules=1e3 * float(np.mean([e.sorbet for e in used])),
        bert_millijoules=1e3 * float(np.mean([e.bert for e in used])),
        examples=len(examples),
        logits=logits,
    )


def run(
    artifact: Artifact,
    texts: Any,
    progress: Callable[[int], None] = lambda done: None,
    backend: str = "reference",
    threads: int = 2,
) -> tuple[NDArray[np.float64], Spikes, list[int]]:
    """Logits [N, labels] in the order of the texts, all spikes, and the length of each text in tokens."""
    encoder = TextEncoder(artifact.tokenizer, artifact.shape.max_positions)
    rows = [encoder.ids(text) for text in texts]
    backends = integer_backends(artifact)
    if backend not in backends:
        raise SorbetError(f"backend is {backend!r}: it must be one of {', '.join(backends)}")
    compute, exponent = backends[backend], artifact.classifier.exponent
    logits = np.empty((len(rows), artifact.shape.num_labels))
    total = Spikes({}, {})

    def one(indices: list[int]) -> tuple[list[int], NDArray[np.float64], Spikes]:
        batch = pad([rows[i] for i in indices])
        trace = compute(batch)
        out = np.ldexp(np.asarray(trace["logits"], np.float64), exponent)
        return indices, out, count_spikes(trace, batch.attention_mask.astype(bool), artifact.shape)

    with ThreadPoolExecutor(threads) as pool:
        for indices, out, spikes in pool.map(one, list(batches([len(ids) for ids, _ in rows]))):
            logits[indices] = out
            total.add(spikes)
            progress(len(indices))
    return logits, total, [len(ids) for ids, _ in rows]


def count_spikes(trace: dict[str, NDArray[Any]], mask: NDArray[np.bool_], shape: Shape) -> Spikes:
    """Spikes of every site of a reference trace: |c| of a count, or c + T/2 in offset encoding."""
    spikes = Spikes({}, {})
    for name, count in trace.items():
        if name == "logits" or name.endswith((".key", ".value")):
            continue  # levels held in memory
        if site_encoding(name, shape) == "offset":
            count = count + shape.num_steps // 2
        if name.endswith(".probs"):
            valid = (mask[:, None, :, None] & mask[:, None, None, :]).repeat(shape.num_heads, axis=1)
        else:
            valid = np.broadcast_to(np.ones((), bool) if name == "pooler" else mask[..., None], count.shape)
        spikes.fired[name] = int(np.abs(count[valid]).sum())
        spikes.slots[name] = int(valid.sum()) * shape.num_steps
    return spikes
