"""Worst-case widths: how many bits every accumulator of an artefact can ever need, from its actual weights.

Two limits make the whole chain exact. What PyTorch holds in float32 must be an integer (on its grid) of at most 24
bits; what integer engines hold must fit a signed 32-bit word. A model within both computes the same numbers
everywhere; any other is refused, at conversion and again when a file is loaded.
"""

from dataclasses import dataclass

import numpy as np

from .artifact import Artifact, BinaryTable, ByteTable, Norm, Residual
from .errors import SorbetError

FLOAT32 = 24  # bits of magnitude that a float32 holds exactly
INT32 = 31
SIMULATION = 62  # the spike simulation computes in 64 bits
THRESHOLD = 22  # BSPN's neuron adds halves and quarters to its input


@dataclass(frozen=True)
class Width:
    """A place where sums are held, the range they can take, and the bits of magnitude that are allowed there."""

    name: str
    low: int
    high: int
    limit: int

    @property
    def magnitude(self) -> int:
        return max(abs(self.low), abs(self.high)).bit_length()

    @property
    def bits(self) -> int:
        """Two's complement bits: what a register needs."""
        return max((~self.low if self.low < 0 else self.low).bit_length(), self.high.bit_length()) + 1

    @property
    def fits(self) -> bool:
        return self.magnitude <= self.limit


def require_exact(artifact: Artifact, error: type[SorbetError] = SorbetError) -> list[Width]:
    widths = accumulator_widths(artifact)
    for width in widths:
        if not width.fits:
            raise error(
                f"{width.name}: sums can reach {max(-width.low, width.high):,} = {width.magnitude} bits, "
                f"more than the {width.limit} that stay exact. The scales on both sides of this layer lie too far "
                "apart: train on with a smaller learning rate for the scales, or with fewer fraction bits"
            )
    return widths


def accumulator_widths(artifact: Artifact) -> list[Width]:
    shape = artifact.shape
    hidden, steps = shape.counts(), shape.num_steps
    positive, level = shape.counts("unsigned"), shape.counts("offset")
    emb = artifact.embeddings
    widths = []

    largest = sum(_largest(table) for table in (emb.word, emb.position, emb.token_type))
    widths += [Width("embeddings.sum", -largest, largest, FLOAT32)]
    widths += _norm("embeddings.norm", artifact, emb.norm, largest)

    for i, layer in enumerate(artifact.layers):
        path = f"layers.{i}"
        for name in ("query", "key", "value"):
            part = getattr(layer, name)
            widths += _neuron(
                f"{path}.{name}", _linear(part.bits, shape.hidden_size, hidden), part.offset, part.shift, steps
            )
        products = [a * b for a in hidden for b in level]
        score = (shape.head_dim * min(*products, 0), shape.head_dim * max(*products, 0))
        widths += [Width(f"{path}.scores", *score, FLOAT32)]
        shift = max(layer.score_exponent, 0)  # a negative exponent shifts right
        widths += [Width(f"{path}.scores.ceiled", score[0] << shift, score[1] << shift, INT32)]
        total = shape.max_positions << shape.softmax_fraction_bits
        widths += [Width(f"{path}.softmax.sum", 0, total, INT32)]
        reach = shape.max_positions * positive[1]
        context = np.array([reach * level[0]]), np.array([reach * level[1]])
        widths += _neuron(f"{path}.context", context, layer.context.offset, layer.context.shift, steps)
        widths += _residual(f"{path}.attention_output", artifact, layer.attention_output, shape.hidden_size, hidden)
        part = layer.intermediate
        acc = _linear(part.bits, shape.hidden_size, hidden)
        widths += _neuron(f"{path}.intermediate", acc, part.offset, part.shift, steps)
        widths += _residual(f"{path}.output", artifact, layer.output, shape.intermediate_size, positive)

    pooler = artifact.pooler
    acc = _linear(pooler.bits, shape.hidden_size, hidden)
    widths += _neuron("pooler", acc, pooler.offset, pooler.shift, steps)
    weight, bias = artifact.classifier.weight.astype(np.int64), artifact.classifier.bias.astype(np.int64)
    lo, hi = shape.counts(shape.pooler_encoding)
    low = (np.minimum(weight * lo, weight * hi)).sum(axis=1) + np.minimum(bias, 0)
    high = (np.maximum(weight * lo, weight * hi)).sum(axis=1) + np.maximum(bias, 0)
    return [*widths, Width("classifier", int(low.min()), int(high.max()), FLOAT32)]


def _largest(table: BinaryTable | ByteTable) -> int:
    if isinstance(table, BinaryTable):
        return 1 << int(table.shift.max())
    largest = np.abs(table.values.astype(np.int64)).max(axis=1) << table.shift.astype(np.int64)
    return int(largest.max())


def _linear(bits: np.ndarray, inputs: int, counts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The range of B c per row: a row of p ones and n minus ones reaches from lo·p − hi·n to hi·p − lo·n."""
    plus = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    minus, (lo, hi) = inputs - plus, counts
    return lo * plus - hi * minus, hi * plus - lo * minus


def _neuron(
    name: str, acc: tuple[np.ndarray, np.ndarray], offset: np.ndarray, shift: int, num_steps: int
) -> list[Width]:
    low, high = acc[0] + np.minimum(offset, 0), acc[1] + np.maximum(offset, 0)
    widths = [Width(name, int(low.min()), int(high.max()), FLOAT32)]
    if shift > 0:
        half = 1 << (shift - 1)
        widths += [Width(f"{name}.membrane", int(low.min()) + half, int(high.max()) + half, INT32)]
    elif shift < 0:
        widths += [Width(f"{name}.membrane", int(low.min()) << -shift, int(high.max()) << -shift, INT32)]
    return [*widths, _spiking(name, widths[-1], num_steps)]


def _spiking(name: str, membrane: Width, num_steps: int) -> Width:
    """An ASG neuron's membrane has log2 T fraction bits; it sinks as far as T times the average, and no further."""
    fraction = num_steps.bit_length() - 1
    return Width(f"{name}.asg", membrane.low << fraction, membrane.high << fraction, SIMULATION)


def _norm(name: str, artifact: Artifact, norm: Norm, largest: int) -> list[Width]:
    shape = artifact.shape
    n = shape.hidden_size // shape.norm_groups
    scaled = (n << shape.norm_fraction_bits) + 1  # |X̂| ≤ n, as Σ|X| ≤ n 2^k
    reach = scaled + int(np.abs(norm.offset.astype(np.int64)).max()) + int(np.abs(norm.threshold).max())
    membrane = Width(f"{name}.membrane", -reach, reach, THRESHOLD)
    return [Width(f"{name}.sum", 0, n * largest, INT32), membrane, _spiking(name, membrane, shape.num_steps)]


def _residual(
    name: str, artifact: Artifact, part: Residual, inputs: int, counts: tuple[int, int]
) -> list[Width]:  # fmt: skip
    low, high = _linear(part.bits, inputs, counts)
    low, high = low + np.minimum(part.bias, 0), high + np.maximum(part.bias, 0)
    lo, hi = artifact.shape.counts()
    total_low = (int(low.min()) << part.shift) + (lo << part.residual_shift)
    total_high = (int(high.max()) << part.shift) + (hi << part.residual_shift)
    return [
        Width(name, int(low.min()), int(high.max()), FLOAT32),
        Width(f"{name}.residual", total_low, total_high, FLOAT32),
        *_norm(f"{name}.norm", artifact, part.norm, max(-total_low, total_high)),
    ]
