"""The integer meaning of a Sorbet in plain NumPy: the oracle of every other backend.

Nothing on the way from tokens to logits is multiplied: additions, shifts, comparisons, look-ups and the counting of
bits are all there is. Give `Reference` a `Counter` and it counts them, on the arrays themselves.

Shapes: B examples, L tokens, d features, H heads, h norm groups, T steps.
"""

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifact import Artifact, BinaryTable, ByteTable, Layer, Norm, Projection, Residual, Shape, map_arrays
from .bits import Planes, bit_length, bytes_to_words, ceil_log2_ratio, dot, planes, shift_right, unpack
from .counting import Counter
from .errors import SorbetError

Ints = NDArray[Any]  # of integers
Trace = dict[str, Ints]
MASKED = -(1 << 40)


class Reference:
    """`Reference(artifact)(input_ids, attention_mask, token_type_ids)` gives the logits, [B, labels] of float64.

    `trace`, where given, is filled with what every neuron hands on: the counts by site name, [B, L, d] each
    (attention probabilities [B, H, L, L]).
    """

    def __init__(self, artifact: Artifact, counter: Counter | None = None):
        self.artifact, self.shape, self.counter = artifact, artifact.shape, counter
        self.parts: Artifact = map_arrays(artifact, lambda name, array: self.watch(as_words(name, array)))
        self.nearest = self.watch(nearest_thresholds(self.shape.softmax_rounding))

    def watch(self, array: Any) -> Any:
        return array if self.counter is None else self.counter.watch(array)

    def __call__(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, trace: Trace | None = None
    ) -> NDArray[np.float64]:
        inputs = check_inputs(self.artifact, input_ids, attention_mask, token_type_ids)
        ids, mask, types = (self.watch(array) for array in inputs)
        trace = {} if trace is None else trace
        embeddings, classifier = self.parts.embeddings, self.parts.classifier

        x = embed(self.parts, ids, types)
        trace["embeddings"] = hidden = self.normalize(embeddings.norm, x)
        for i, layer in enumerate(self.parts.layers):
            hidden = self.layer(layer, hidden, mask, trace, f"layers.{i}")
        pooler, encoding = self.parts.pooler, self.shape.pooler_encoding
        trace["pooler"] = pooled = self.project(pooler, hidden[:, 0], encoding=encoding)
        total = dot(planes(pooled, *self.shape.counts(encoding)), planes(classifier.weight, -128, 127))
        trace["logits"] = total = total + classifier.bias
        return np.ldexp(np.asarray(total, np.float64), classifier.exponent)

    def layer(self, layer: Layer, hidden: Ints, mask: Ints, trace: Trace, path: str) -> Ints:
        attended = self.attend(layer, hidden, mask, trace, path)
        trace[f"{path}.attention_output"] = hidden = self.residual(layer.attention_output, attended, hidden)
        trace[f"{path}.intermediate"] = counts = self.project(layer.intermediate, hidden, encoding="unsigned")
        trace[f"{path}.output"] = hidden = self.residual(layer.output, counts, hidden, incoming="unsigned")
        return hidden

    def attend(self, layer: Layer, hidden: Ints, mask: Ints, trace: Trace, path: str) -> Ints:
        """SN(SN(PTsoftmax(SN(Q) Kᵀ)) V)"""
        shape, level = self.shape, self.shape.counts("offset")
        trace[f"{path}.query"] = query = self.project(layer.query, hidden)
        trace[f"{path}.key"] = key = self.project(layer.key, hidden, encoding="offset")
        trace[f"{path}.value"] = value = self.project(layer.value, hidden, encoding="offset")

        query, key = heads(query, shape), heads(key, shape)  # [B, H, L, d/H]
        scores = dot(planes(query, *shape.counts()), planes(key, *level))  # [B, H, L, L]
        exponent, kept = ptsoftmax(scores, mask, layer.score_exponent, shape, self.nearest)
        trace[f"{path}.probs"] = probs = probability_count(exponent, kept, layer.probs_exponent, shape)

        context = dot(planes(probs, *shape.counts("unsigned")), planes(columns(heads(value, shape)), *level))
        context = merge_heads(context) + layer.context.offset
        trace[f"{path}.context"] = counts = self.clip(half_up(context, layer.context.shift))
        return counts

    # -- layers ----------------------------------------------------------------------------------------------------

    def linear(self, words: NDArray[np.uint64], counts: Ints, encoding: str | None) -> Ints:
        """B c with B = ±1: twice what the +1s select, less the sum of all counts."""
        selected = dot(planes(counts, *self.shape.counts(encoding)), Planes(words[None], False))
        return (selected << 1) - counts.sum(axis=-1, dtype=np.int64)[..., None]

    def project(self, part: Projection, counts: Ints, incoming: str | None = None, encoding: str | None = None) -> Ints:
        x = self.linear(part.bits, counts, incoming) + part.offset
        return self.clip(half_up(x, part.shift), encoding)

    def residual(self, part: Residual, counts: Ints, hidden: Ints, incoming: str | None = None) -> Ints:
        product = self.linear(part.bits, counts, incoming) + part.bias
        return self.normalize(part.norm, (product << part.shift) + (hidden << part.residual_shift))

    def normalize(self, norm: Norm, x: Ints) -> Ints:
        """BSPN and its neuron: how often |θ| fits into ±X̂ + b + |θ|/2."""
        current, size = bspn(norm, x, self.shape)
        return count_thresholds(current + (size >> 1), size, *self.shape.counts())

    def clip(self, x: Ints, encoding: str | None = None) -> Ints:
        lo, hi = self.shape.counts(encoding)
        return np.minimum(np.maximum(x, lo), hi)


# ---------------------------------------------------------------------------------------------------------------------
# Operations, shared with the spike simulation
# ---------------------------------------------------------------------------------------------------------------------


def as_words(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Weight bits as words of 64; the word table stays in bytes, of which few rows are read."""
    return bytes_to_words(array) if name.endswith(".bits") and "word" not in name else array


def embed(parts: Artifact, ids: Ints, types: Ints) -> Ints:
    """[B, L, d]: binary word row + 8-bit position and token-type rows, on one grid."""
    e = parts.embeddings
    return (
        word_rows(e.word, ids, parts.shape)
        + byte_rows(e.position, slice(ids.shape[1]))
        + byte_rows(e.token_type, types)
    )


def word_rows(table: BinaryTable, ids: Ints, shape: Shape) -> Ints:
    one = np.left_shift(1, table.shift[ids].astype(np.int64))[..., None]
    return np.where(unpack(table.bits[ids], shape.hidden_size) == 1, one, -one)


def byte_rows(table: ByteTable, index: Any) -> Ints:
    return table.values[index].astype(np.int64) << table.shift[index].astype(np.int64)[..., None]


def heads(x: Ints, shape: Shape) -> Ints:  # [..., L, d] -> [..., H, L, d/H]
    return np.swapaxes(x.reshape(*x.shape[:-1], shape.num_heads, shape.head_dim), -2, -3)


def merge_heads(x: Ints) -> Ints:  # [..., H, L, d/H] -> [..., L, d]
    x = np.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def columns(x: Ints) -> Ints:
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))


def half_up(x: Ints, shift: int) -> Ints:
    """⌊x · 2^-shift + ½⌋: the neuron's initial potential is half its threshold."""
    return shift_right(x, shift, "nearest")


def bspn(norm: Norm, x: Ints, shape: Shape) -> tuple[Ints, Ints]:
    """±X̂ + b and |θ|, X̂ = X ≫ k with k = ⌈log2 S⌉ per group, kept with F fraction bits."""
    n = shape.hidden_size // shape.norm_groups
    grouped = x.reshape(*x.shape[:-1], shape.norm_groups, n)
    total = np.abs(grouped).sum(axis=-1, keepdims=True)  # n S
    k = ceil_log2_ratio(np.maximum(total, 1), n)
    x_hat = shift_right(grouped, k - shape.norm_fraction_bits, shape.shift_rounding).reshape(x.shape)
    return np.where(norm.threshold < 0, -x_hat, x_hat) + norm.offset, np.abs(norm.threshold)


def count_thresholds(membrane: Ints, threshold: Ints, lo: int, hi: int) -> Ints:
    """clip(⌊membrane / threshold⌋, lo, hi) by comparing with j · threshold, which grows by addition."""
    level = threshold
    for _ in range(-lo):
        level = level - threshold  # ends at (lo + 1) · threshold
    count = np.full_like(membrane, lo)
    for _ in range(hi - lo):
        count = count + (membrane >= level)
        level = level + threshold
    return count


def ptsoftmax(
    scores: Ints, mask: Ints, score_exponent: int, shape: Shape, nearest: NDArray[np.int64]
) -> tuple[Ints, Ints]:
    """P = 2^p with p = s' − k, s' = ⌈z⌉ − max⌈z⌉, k = ⟦log2 Σ 2^s'⟧: p, and where P is not 0."""
    fraction = shape.softmax_fraction_bits
    ceiled = np.where(mask[..., None, None, :], -shift_right(-scores, -score_exponent), MASKED)
    s = ceiled - ceiled.max(axis=-1, keepdims=True)
    kept = s >= -fraction
    total = np.where(kept, np.left_shift(1, np.maximum(s + fraction, 0)), 0).sum(axis=-1, keepdims=True)
    leading = bit_length(total) - 1
    k = leading - fraction + (total >= nearest[leading])
    return s - k, kept


def probability_count(exponent: Ints, kept: Ints, scale: int, shape: Shape) -> Ints:
    """clip(⌊2^p / 2^scale + ½⌋, 0, hi): a power of two, as long as it lies below T."""
    exponent, hi = exponent - scale, shape.num_steps - 1
    spikes = np.minimum(np.left_shift(1, np.minimum(np.maximum(exponent, 0), 5)), hi)
    return np.where(kept & (exponent >= -1), spikes, 0)  # ½ rounds up to one spike


def nearest_thresholds(rounding: str) -> NDArray[np.int64]:
    """Entry m: the least Z in [2^m, 2^(m+1)) that is nearer to 2^(m+1): ⌈2^(m+½)⌉, or 1.5 · 2^m in value."""
    if rounding == "value":
        return np.array([2] + [3 << (m - 1) for m in range(1, 48)])
    return np.array([isqrt(1 << (2 * m + 1)) + 1 for m in range(31)])


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def check_inputs(
    artifact: Artifact, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None
) -> tuple[Ints, NDArray[np.bool_], Ints]:
    """Ids, mask and token types as [B, L] arrays of what the artefact can take, or an error that says what is wrong."""
    shape = artifact.shape
    ids = _integers("input_ids", input_ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise SorbetError(f"input_ids has shape {ids.shape}: it must be [batch, length], neither of them 0")
    if ids.shape[1] > shape.max_positions:
        raise SorbetError(
            f"the input has {ids.shape[1]} tokens, the model {shape.max_positions} positions: truncate it"
        )
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
