"""A first look: sentences through the model that comes with the package, and the proof that its spikes are exact."""

from importlib.resources import files

import numpy as np
from rich.console import Console
from rich.table import Table

from .artifact import Artifact
from .reference import Reference
from .spiking import SpikingSorbet
from .text import TextEncoder

SENTENCES = (
    "the acting is wonderful .",
    "this story was not very funny .",
    "the plot is dull , but the ending was brilliant .",
    "its camera is lovely and its music seems stale .",
)


def shipped_model() -> Artifact:
    return Artifact.from_bytes((files(__package__) / "models" / "tiny.sorbet").read_bytes())


def softmax(logits: np.ndarray) -> np.ndarray:
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return grown / grown.sum(axis=-1, keepdims=True)


def run(out: Console) -> None:
    artifact = shipped_model()
    reference, spiking = Reference(artifact), SpikingSorbet(artifact)
    encoder = TextEncoder(artifact.tokenizer, artifact.shape.max_positions)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("sentence", "label", "probability", "spikes", "rate", "exact"):
        table.add_column(name, justify="left" if name in ("sentence", "label") else "right")
    equal = True
    for sentence in SENTENCES:
        batch = encoder([sentence])
        inputs = (batch.input_ids, batch.attention_mask, batch.token_type_ids)
        record: dict[str, np.ndarray] = {}
        logits, by_spikes = reference(*inputs), spiking(*inputs, record=record)
        same = bool((logits == by_spikes).all())
        equal = equal and same
        best = int(logits[0].argmax())
        spikes = sum(int(np.count_nonzero(train)) for train in record.values())
        slots = sum(train.size for train in record.values())
        table.add_row(
            sentence, artifact.labels[best], f"{softmax(logits)[0, best]:.3f}", f"{spikes:,}", f"{spikes / slots:.3f}",
            "yes" if same else "NO",
        )  # fmt: skip
    out.print(table)
    shape = artifact.shape
    size = len(artifact.to_bytes()) / 1e3
    verdict = "the same numbers, bit for bit" if equal else "DIFFERENT numbers: please report this"
    out.print(
        f"\nA tiny model ({shape.num_layers} layers, hidden {shape.hidden_size}, {size:.0f} kB) trained on made-up\n"
        f"film remarks. Every weight is one bit, every activation a train of up to {shape.num_steps}\n"
        f"spikes; nothing was multiplied.\n"
        f"exact: the simulation of its spikes and the integer reference gave {verdict}.",
        highlight=False,
    )
