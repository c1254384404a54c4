"""The integer meaning of a Sorbet in plain NumPy: the oracle of every other backend.

Nothing on the way from tokens to logits is multiplied: additions, shifts, comparisons, look-ups and the counting of
bits are all there is. Give `Reference` a `Counter` and it counts them, on the arrays themselves.

Shapes: B examples, L tokens, d features, H heads, h norm groups, T steps.
"""

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifact import Artifact, BinaryTable, ByteTable, Layer, Neuron, Norm, Pooler, Projection, Residual
from .bits import (
    Planes,
    bit_length,
    bytes_to_words,
    ceil_log2_ratio,
    dot,
    planes,
    shift_right,
    unpack,
)
from .counting import Counter
from .errors import SorbetError

Ints = NDArray[np.integer]
Trace = dict[str, Ints]
MASKED = -(1 << 40)


class Reference:
    """`Reference(artifact)(input_ids, attention_mask, token_type_ids)` gives the logits, [B, labels] of float64.

    `trace`, where given, is filled with what every neuron hands on: the counts by site name, [B, L, d] each
    (attention probabilities [B, H, L, L]).
    """

    def __init__(self, artifact: Artifact, counter: Counter | None = None):
        self.artifact, self.shape = artifact, artifact.shape
        self._watch = counter.watch if counter is not None else lambda array: array
        self._words: dict[int, NDArray[np.uint64]] = {}

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        trace: Trace | None = None,
    ) -> NDArray[np.float64]:
        ids, mask, types = check_inputs(self.artifact, input_ids, attention_mask, token_type_ids)
        trace = {} if trace is None else trace
        trace["embeddings"] = hidden = self.embed(self._watch(ids), self._watch(types))
        for i, layer in enumerate(self.artifact.layers):
            hidden = self.layer(layer, hidden, self._watch(mask), trace, f"layers.{i}")
        trace["pooler"] = pooled = self.pool(self.artifact.pooler, hidden)
        trace["logits"] = total = self.classify(pooled)
        return np.ldexp(np.asarray(total, np.float64), self.artifact.classifier.exponent)

    # -- the model, top to bottom ----------------------------------------------------------------------------------

    def embed(self, ids: Ints, types: Ints) -> Ints:
        e = self.artifact.embeddings
        position = _rows(e.position, self._watch(np.arange(ids.shape[1])))
        x = self.word_rows(e.word, ids) + position[None] + _rows(e.token_type, types)
        return self.normalize(e.norm, x)

    def layer(self, layer: Layer, hidden: Ints, mask: Ints, trace: Trace, path: str) -> Ints:
        attended = self.attend(layer, hidden, mask, trace, path)
        trace[f"{path}.attention_output"] = hidden = self.residual(layer.attention_output, attended, hidden)
        counts = self.project(layer.intermediate, hidden, "unsigned")
        trace[f"{path}.intermediate"] = counts
        trace[f"{path}.output"] = hidden = self.residual(layer.output, counts, hidden, "unsigned")
        return hidden

    def attend(self, layer: Layer, hidden: Ints, mask: Ints, trace: Trace, path: str) -> Ints:
        """SN(SN(PTsoftmax(SN(Q) Kᵀ)) V)"""
        trace[f"{path}.query"] = query = self.project(layer.query, hidden)
        trace[f"{path}.key"] = key = self.project(layer.key, hidden, "offset")
        trace[f"{path}.value"] = value = self.project(layer.value, hidden, "offset")
        level = self.shape.counts("offset")
        query, key, value = (self.heads(x) for x in (query, key, value))  # [B, H, L, d/H]
        scores = dot(planes(query, *self.shape.counts()), planes(key, *level))  # [B, H, L, L]
        probs = self.ptsoftmax(scores, layer, mask)
        trace[f"{path}.probs"] = probs
        columns = np.ascontiguousarray(np.swapaxes(value, -1, -2))
        context = dot(planes(probs, *self.shape.counts("unsigned")), planes(columns, *level))
        context = np.swapaxes(context, 1, 2).reshape(hidden.shape)
        trace[f"{path}.context"] = counts = self.fire(layer.context, context)
        return counts

    def pool(self, pooler: Pooler, hidden: Ints) -> Ints:
        first = hidden[:, 0]
        x = self.linear(pooler.bits, first, self.shape.encoding) + self._watch(pooler.offset)
        return self.clip(round_shift(x, pooler.shift), self.shape.pooler_encoding)

    def classify(self, pooled: Ints) -> Ints:
        c = self.artifact.classifier
        weight = planes(self._watch(c.weight), -128, 127)
        return dot(planes(pooled, *self.shape.counts(self.shape.pooler_encoding)), weight) + self._watch(c.bias)

    # -- operations ------------------------------------------------------------------------------------------------

    def heads(self, x: Ints) -> Ints:  # [B, L, d] -> [B, H, L, d/H]
        batch, length, _ = x.shape
        return np.swapaxes(x.reshape(batch, length, self.shape.num_heads, self.shape.head_dim), 1, 2)

    def word_rows(self, table: BinaryTable, ids: Ints) -> Ints:
        one = np.left_shift(1, self._watch(table.shift)[ids].astype(np.int64))[..., None]
        return np.where(unpack(self._watch(table.bits)[ids], self.shape.hidden_size) == 1, one, -one)

    def linear(self, bits: NDArray[np.uint8], counts: Ints, encoding: str) -> Ints:
        """B c with B = ±1: twice what the +1s select, less the sum of all counts."""
        selected = dot(planes(counts, *self.shape.counts(encoding)), Planes(self.words(bits)[None], False))
        return (selected << 1) - counts.sum(axis=-1, dtype=np.int64)[..., None]

    def words(self, bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
        if id(bits) not in self._words:
            self._words[id(bits)] = self._watch(bytes_to_words(bits))
        return self._words[id(bits)]

    def project(self, part: Projection, counts: Ints, encoding: str | None = None) -> Ints:
        x = self.linear(part.bits, counts, self.shape.encoding) + self._watch(part.offset)
        return self.clip(round_shift(x, part.shift), encoding)

    def fire(self, part: Neuron, x: Ints) -> Ints:
        return self.clip(round_shift(x + self._watch(part.offset), part.shift), None)

    def residual(self, part: Residual, counts: Ints, hidden: Ints, encoding: str | None = None) -> Ints:
        product = self.linear(part.bits, counts, encoding or self.shape.encoding) + self._watch(part.bias)
        return self.normalize(part.norm, (product << part.shift) + (hidden << part.residual_shift))

    def normalize(self, norm: Norm, x: Ints) -> Ints:
        """BSPN and its neuron: X̂ = X ≫ ⌈log2 S⌉ per group, then how often |θ| fits into ±X̂ + b + |θ|/2."""
        shape = self.shape
        n = shape.hidden_size // shape.norm_groups
        grouped = x.reshape(*x.shape[:-1], shape.norm_groups, n)
        total = np.abs(grouped).sum(axis=-1, keepdims=True)  # n S
        k = ceil_log2_ratio(np.maximum(total, 1), n)
        x_hat = shift_right(grouped, k - shape.norm_fraction_bits, shape.shift_rounding).reshape(x.shape)
        threshold = self._watch(norm.threshold)
        size = np.abs(threshold)
        membrane = np.where(threshold < 0, -x_hat, x_hat) + self._watch(norm.offset) + (size >> 1)
        return self.count_thresholds(membrane, size)

    def count_thresholds(self, membrane: Ints, threshold: Ints) -> Ints:
        """clip(⌊membrane / threshold⌋, lo, hi) by comparing with j · threshold, which grows by addition."""
        lo, hi = self.shape.counts()
        level = threshold
        for _ in range(-lo):
            level = level - threshold  # ends at (lo + 1) · threshold
        count = np.full_like(membrane, lo)
        for _ in range(hi - lo):
            count = count + (membrane >= level)
            level = level + threshold
        return count

    def ptsoftmax(self, scores: Ints, layer: Layer, mask: Ints) -> Ints:
        """Counts of SN(P): P = 2^(s' − k), s' = ⌈z⌉ − max⌈z⌉, k = ⟦log2 Σ 2^s'⟧."""
        fraction = self.shape.softmax_fraction_bits
        ceiled = np.where(mask[:, None, None, :], -shift_right(-scores, -layer.score_exponent), MASKED)
        s = ceiled - ceiled.max(axis=-1, keepdims=True)
        kept = s >= -fraction
        total = np.where(kept, np.left_shift(1, np.maximum(s + fraction, 0)), 0).sum(axis=-1, keepdims=True)
        leading = bit_length(total) - 1
        k = leading - fraction + (total >= self._watch(nearest_thresholds(self.shape.softmax_rounding))[leading])
        exponent = s - k - layer.probs_exponent  # P/α = 2^exponent; ½ rounds up to one spike
        hi = self.shape.num_steps - 1
        spikes = np.minimum(np.left_shift(1, np.minimum(np.maximum(exponent, 0), 5)), hi)
        return np.where(kept & (exponent >= -1), spikes, 0)

    def clip(self, x: Ints, encoding: str | None) -> Ints:
        lo, hi = self.shape.counts(encoding)
        return np.minimum(np.maximum(x, lo), hi)


def round_shift(x: Ints, shift: int) -> Ints:
    """⌊x · 2^-shift + ½⌋: the neuron's initial potential is half its threshold."""
    return shift_right(x, shift, "nearest")


def nearest_thresholds(rounding: str) -> NDArray[np.int64]:
    """Entry m: the least Z in [2^m, 2^(m+1)) that is nearer to 2^(m+1): ⌈2^(m+½)⌉, or 1.5 · 2^m in value."""
    if rounding == "value":
        return np.array([2] + [3 << (m - 1) for m in range(1, 48)])
    return np.array([isqrt(1 << (2 * m + 1)) + 1 for m in range(48)])


def _rows(table: ByteTable, index: Ints) -> Ints:
    return table.values[index].astype(np.int64) << table.shift[index].astype(np.int64)[..., None]


def check_inputs(
    artifact: Artifact, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None
) -> tuple[Ints, NDArray[np.bool_], Ints]:
    """Ids, mask and token types as [B, L] arrays of what the artefact can take, or an error that says what is wrong."""
    shape = artifact.shape
    ids = _integers("input_ids", input_ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise SorbetError(f"input_ids has shape {ids.shape}: it must be [batch, length], neither of them 0")
    if ids.shape[1] > shape.max_positions:
        raise SorbetError(f"the input has {ids.shape[1]} tokens, the model {shape.max_positions} positions: truncate it")
    mask = np.ones_like(ids) if attention_mask is None else _integers("attention_mask", attention_mask)
    types = np.zeros_like(ids) if token_type_ids is None else _integers("token_type_ids", token_type_ids)
    for name, array, limit in (("attention_mask", mask, 2), ("token_type_ids", types, shape.type_vocab_size)):
        if array.shape != ids.shape:
            raise SorbetError(f"{name} has shape {array.shape}, input_ids {ids.shape}: they must agree")
        _in_range(name, array, limit)
    _in_range("input_ids", ids, shape.vocab_size)
    if not mask[:, 0].all():
        raise SorbetError("attention_mask hides the first token of an example: pad on the right, never on the left")
    return ids, mask.astype(bool), types


def _integers(name: str, value: Any) -> Ints:
    try:
        array = np.asarray(value)
    except ValueError:
        raise SorbetError(f"{name} has rows of different lengths: pad them and pass attention_mask") from None
    if array.dtype.kind not in "iub":
        raise SorbetError(f"{name} holds {array.dtype}: it must hold integers")
    return array.astype(np.int64)


def _in_range(name: str, array: Ints, limit: int) -> None:
    bad = (array < 0) | (array >= limit)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise SorbetError(f"{name}[{where[0]}, {where[1]}] is {array[where]}: it must lie in 0 … {limit - 1}")
