"""Does every backend compute the same numbers? Every neuron of every layer on every example, compared with `==`."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifact import Artifact
from .errors import ConversionError, SorbetError
from .reference import Reference
from .spiking import SpikingSorbet, spike_count
from .text import Batch, Text, TextEncoder, pad

Trace = dict[str, NDArray[Any]]
Backend = Callable[[Batch], Trace]
TOKENS_PER_BATCH = 256


@dataclass(frozen=True)
class Difference:
    """The first place where two backends part."""

    example: int
    layer: str
    head: int | None  # of attention probabilities, whose channel is the token attended to
    token: int | None
    channel: int | None
    values: dict[str, float]

    def __str__(self) -> str:
        place = f"example {self.example}, {self.layer}"
        if self.head is not None:
            place += f", head {self.head}"
        if self.token is not None:
            place += f", token {self.token}"
        if self.channel is not None:
            place += f", channel {self.channel}"
        return f"{place}: " + ", ".join(f"{name} has {value:g}" for name, value in self.values.items())


@dataclass
class Report:
    examples: int
    backends: list[str]
    differing: list[int] = field(default_factory=list)  # examples
    first: Difference | None = None

    def __str__(self) -> str:
        return f"{len(self.differing)} difference{'s' * (len(self.differing) != 1)} in {self.examples} examples"

    def to_json(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "backends": self.backends,
            "differences": len(self.differing),
            "first": None if self.first is None else asdict(self.first),
        }


def verify(
    artifact: Artifact,
    texts: Sequence[Text],
    checkpoint: str | Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
    threads: int = 2,
) -> Report:
    """Compare the reference with every other backend; with `checkpoint`, with the PyTorch model as well."""
    encoder = TextEncoder(artifact.tokenizer, artifact.shape.max_positions)
    rows = [encoder.ids(text) for text in texts]
    backends = integer_backends(artifact)
    if checkpoint is not None:
        backends["pytorch"] = pytorch_backend(artifact, checkpoint)
    report = Report(len(rows), list(backends))

    def run(indices: list[int]) -> tuple[list[int], dict[str, Trace], Batch]:
        batch = pad([rows[i] for i in indices])
        return indices, {name: backend(batch) for name, backend in backends.items()}, batch

    with ThreadPoolExecutor(threads) as pool:
        for indices, traces, batch in pool.map(run, list(batches([len(ids) for ids, _ in rows]))):
            for row, example in enumerate(indices):
                found = first_difference(traces, row, int(batch.attention_mask[row].sum()), example)
                if found is not None:
                    report.differing.append(example)
                    if report.first is None or example < report.first.example:
                        report.first = found
            progress(len(indices))
    report.differing.sort()
    return report


def batches(lengths: Sequence[int], tokens: int = TOKENS_PER_BATCH) -> Iterator[list[int]]:
    """Indices in batches of at most `tokens` padded tokens, short texts first: padding is exercised, not dominant."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def integer_backends(artifact: Artifact) -> dict[str, Backend]:
    reference, spiking = Reference(artifact), SpikingSorbet(artifact)
    shape = artifact.shape

    def by_reference(batch: Batch) -> Trace:
        trace: Trace = {}
        reference(batch.input_ids, batch.attention_mask, batch.token_type_ids, trace)
        return trace

    def by_spikes(batch: Batch) -> Trace:
        record: Trace = {}
        trace: Trace = {}
        spiking(batch.input_ids, batch.attention_mask, batch.token_type_ids, record, trace)
        for name, train in record.items():
            trace[name] = spike_count(train, site_encoding(name, shape))
        return trace

    return {"reference": by_reference, "spikes": by_spikes}


def site_encoding(name: str, shape: Any) -> str:
    if name.endswith((".probs", ".intermediate")):
        return "unsigned"
    return shape.pooler_encoding if name == "pooler" else shape.encoding


def pytorch_backend(artifact: Artifact, checkpoint: str | Path) -> Backend:
    try:
        import torch
        from transformers.utils import logging as transformers_logging

        from .conversion import convert
        from .modeling_sorbet import load_sorbet
        from .tracing import trace_model
    except ImportError as error:
        raise SorbetError(
            f"--checkpoint needs PyTorch, and {error.name} is not installed: pip install 'sorbet-snn[train]'"
        ) from None
    transformers_logging.disable_progress_bar()
    model = load_sorbet(checkpoint).float()
    try:
        theirs = asdict(convert(model).shape)
    except ConversionError as error:
        raise SorbetError(f"{checkpoint}: {error}") from None
    for name, ours in asdict(artifact.shape).items():
        shorter = name == "max_positions" and theirs[name] >= ours  # positions that were never trained were left out
        if theirs[name] != ours and not shorter:
            raise SorbetError(f"{checkpoint}: its {name} is {theirs[name]}, the artefact's {ours}: not the same model")
    torch.set_num_threads(1)
    lock = Lock()  # the hooks that record a trace sit on the one model

    def by_pytorch(batch: Batch) -> Trace:
        with lock:
            return trace_model(model, batch, artifact.classifier.exponent)

    return by_pytorch


def first_difference(traces: dict[str, Trace], row: int, length: int, example: int) -> Difference | None:
    """The first site, in the order of the forward pass, where some backend differs from the first one."""
    (base, expected), *others = traces.items()
    for layer, value in expected.items():
        ours = _visible(layer, value[row], length)
        for name, trace in others:
            if layer not in trace:
                raise SorbetError(f"backend {name} gives no {layer}")
            theirs = _visible(layer, trace[layer][row], length)
            if np.array_equal(ours, theirs):
                continue
            where = tuple(int(i) for i in np.argwhere(ours != theirs)[0])
            head, token, channel = (None, None, None, *where)[-3:]
            values = {base: float(ours[where]), name: float(theirs[where])}
            return Difference(example, layer, head, token, channel, values)
    return None


def _visible(layer: str, value: NDArray[Any], length: int) -> NDArray[Any]:
    """What is computed on padding is nobody's business."""
    if layer.endswith(".probs"):
        return value[:, :length, :length]
    return value if value.ndim == 1 else value[:length]
