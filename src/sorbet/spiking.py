"""The spike simulation of an artefact: neurons that fire over T steps, matrix products that accumulate over spikes.

Time comes first: a spike train is [T, B, L, d] with elements 0 and 1, or −1, 0, 1 where an ON and an OFF neuron share
a channel (signed encoding). Keys and values are levels held in memory, not spikes; in either product of attention the
other operand is a spike train.

Algorithm 3 of the paper (ASG: average, then integrate and fire), for every neuron:

    U(t) = Σ_j w_j s_j(t) + b                 what arrives at step t
    A    = Σ_t U(t) / T                       the average
    V(t) = V(t−1) + A,  s(t) = [V(t) ≥ θ],  V(t) ← V(t) − θ s(t)

T is a power of two, so V has log2 T fraction bits and A is exact: the stored number of A is Σ_t U(t). With V(0) = θ/2
a neuron fires ⌊ΣU/θ + ½⌋ times, the quantiser's count; the input saturates where the count would leave its range.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .artifact import Artifact, Layer, Norm, Projection, Residual, map_arrays
from .bits import Planes, dot, overlap, pack_words, planes
from .reference import (
    Ints,
    as_words,
    bspn,
    check_inputs,
    columns,
    embed,
    heads,
    merge_heads,
    nearest_thresholds,
    ptsoftmax,
)

Neuron = Literal["asg", "if"]
Train = NDArray[Any]  # of int8

# ---------------------------------------------------------------------------------------------------------------------
# Neurons
# ---------------------------------------------------------------------------------------------------------------------


class NeuronState(NamedTuple):
    v: Ints  # membrane potential


def integrate_and_fire(current: Ints, state: NeuronState, v_threshold: Ints | int) -> tuple[Ints, NeuronState]:
    """One step: V ← V + I; fire where V ≥ θ; reset by subtraction."""
    v = state.v + current
    spikes = v >= v_threshold
    return spikes.astype(np.int8), NeuronState(np.where(spikes, v - v_threshold, v))


def spike_train(
    currents: Ints, v_threshold: Ints | int, num_steps: int, initial: Ints | int, neuron: Neuron = "asg"
) -> Train:
    """Run one neuron per element over T steps from V(0) = `initial`.

    `currents` is U(t), [T, …], or the average itself, [1, …]; both with log2 T fraction bits.
    """
    fraction = fraction_bits(num_steps)
    average = currents[0] if len(currents) == 1 else currents.sum(axis=0) >> fraction
    state = NeuronState(np.broadcast_to(np.left_shift(initial, fraction), average.shape))
    threshold = np.left_shift(v_threshold, fraction)
    train = np.empty((num_steps, *average.shape), np.int8)
    for t in range(num_steps):
        current = average if neuron == "asg" or len(currents) == 1 else currents[t]
        train[t], state = integrate_and_fire(current, state, threshold)
    return train


def encode(
    currents: Ints, v_threshold: Ints | int, num_steps: int, encoding: str, neuron: Neuron = "asg"
) -> Train:  # fmt: skip
    """The train of a neuron with the given encoding: Σ_t s(t) = clip(⌊ΣU/θ + ½⌋, lo, hi) for ASG, exactly.

    A tie at −½ rounds up to 0, so the OFF neuron of a signed pair starts just below half its threshold.
    """
    threshold, fraction = np.asarray(v_threshold, np.int64), fraction_bits(num_steps)
    if encoding == "offset":
        currents = currents + (threshold << (fraction - 1))  # T/2 spikes more

    def run(currents: Ints, initial: Ints) -> Train:
        if neuron == "asg" and len(currents) > 1:
            currents = currents.sum(axis=0, keepdims=True) >> fraction
        if len(currents) == 1:  # saturates where T − 1 spikes are reached
            currents = np.minimum(currents, (threshold << fraction) - threshold)
        return spike_train(currents, threshold, num_steps, initial, neuron)

    train = run(currents, threshold >> 1)
    return train - run(-currents, (threshold - 1) >> 1) if encoding == "signed" else train


def fraction_bits(num_steps: int) -> int:
    return num_steps.bit_length() - 1


def spike_count(train: Train, encoding: str) -> Ints:
    """The integer that a train carries."""
    count = train.sum(axis=0, dtype=np.int64)
    return count - len(train) // 2 if encoding == "offset" else count


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


class SpikingSorbet:
    """`SpikingSorbet(artifact)(input_ids, attention_mask, token_type_ids)` gives the logits, as `Reference` does.

    `record`, where given, is filled with the spike train of every site, and `levels` with keys and values.
    `neuron="if"` feeds U(t) to the membrane as it arrives instead of its average: what ASG is worth.
    """

    def __init__(self, artifact: Artifact, neuron: Neuron = "asg"):
        if neuron not in ("asg", "if"):
            raise ValueError(f"neuron is {neuron!r}: it must be 'asg' or 'if'")
        self.artifact, self.shape, self.neuron = artifact, artifact.shape, neuron
        self.parts: Artifact = map_arrays(artifact, as_words)
        self.nearest = nearest_thresholds(self.shape.softmax_rounding)

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        record: dict[str, Train] | None = None,
        levels: dict[str, Ints] | None = None,
    ) -> NDArray[np.float64]:
        ids, mask, types = check_inputs(self.artifact, input_ids, attention_mask, token_type_ids)
        record = {} if record is None else record
        levels = {} if levels is None else levels
        classifier, shape = self.parts.classifier, self.shape

        x = embed(self.parts, ids, types)
        record["embeddings"] = hidden = self.normalize(self.parts.embeddings.norm, x)
        for i, layer in enumerate(self.parts.layers):
            hidden = self.layer(layer, hidden, mask, record, levels, f"layers.{i}")
        record["pooler"] = pooled = self.project(self.parts.pooler, hidden[:, :, 0], encoding=shape.pooler_encoding)
        logits = accumulate_levels(pooled, classifier.weight, -128, 127).sum(axis=0)
        levels["logits"] = logits = logits + self.correction(classifier.weight, shape.pooler_encoding) + classifier.bias
        return np.ldexp(logits.astype(np.float64), classifier.exponent)

    def layer(
        self, layer: Layer, hidden: Train, mask: Ints, record: dict[str, Train], levels: dict[str, Ints], path: str
    ) -> Train:
        attended = self.attend(layer, hidden, mask, record, levels, path)
        record[f"{path}.attention_output"] = hidden = self.residual(layer.attention_output, attended, hidden)
        record[f"{path}.intermediate"] = spikes = self.project(layer.intermediate, hidden, encoding="unsigned")
        record[f"{path}.output"] = hidden = self.residual(layer.output, spikes, hidden, incoming="unsigned")
        return hidden

    def attend(
        self, layer: Layer, hidden: Train, mask: Ints, record: dict[str, Train], levels: dict[str, Ints], path: str
    ) -> Train:
        shape, level = self.shape, self.shape.counts("offset")
        record[f"{path}.query"] = query = self.project(layer.query, hidden)
        key = spike_count(self.project(layer.key, hidden, encoding="offset"), "offset")
        value = spike_count(self.project(layer.value, hidden, encoding="offset"), "offset")
        levels[f"{path}.key"], levels[f"{path}.value"] = key, value

        keys = heads(key, shape)  # [B, H, L, d/H]
        scores = accumulate_levels(heads(query, shape), keys, *level).sum(axis=0)
        scores = scores + self.correction(keys, shape.encoding)[..., None, :]
        exponent, kept = ptsoftmax(scores, mask, layer.score_exponent, shape, self.nearest)
        record[f"{path}.probs"] = probs = self.probability_spikes(exponent, kept, layer.probs_exponent)

        context = merge_heads(accumulate_levels(probs, columns(heads(value, shape)), *level))  # [T, B, L, d]
        current = (context << fraction_bits(shape.num_steps)) + layer.context.offset
        record[f"{path}.context"] = spikes = self.fire(current, layer.context.shift)
        return spikes

    def probability_spikes(self, exponent: Ints, kept: Ints, scale: int) -> Train:
        """P = 2^p into a neuron of threshold α = 2^scale: below α/2 nothing fires, above 2^5 α all saturate."""
        current = np.where(kept & (exponent >= scale - 1), np.left_shift(1, np.clip(exponent - scale, -1, 5) + 1), 0)
        return encode(current[None], 2, self.shape.num_steps, "unsigned", self.neuron)

    def linear(self, words: NDArray[np.uint64], train: Train, encoding: str | None, offset: Ints) -> Ints:
        """U(t) = Σ_j w_j s_j(t) + b/T with log2 T fraction bits, an offset encoding's surplus taken off."""
        fraction = fraction_bits(self.shape.num_steps)
        if (encoding or self.shape.encoding) == "offset":
            row_sum = (np.bitwise_count(words).sum(axis=-1, dtype=np.int64) << 1) - train.shape[-1]
            offset = offset - (row_sum << (fraction - 1))
        return (accumulate(train, words) << fraction) + offset

    def correction(self, levels: Ints, encoding: str) -> Ints:
        """What an offset-encoded train adds too much: T/2 times the sum of the levels that it meets."""
        if encoding != "offset":
            return np.zeros(levels.shape[:-1], np.int64)
        return -(levels.sum(axis=-1, dtype=np.int64) << (fraction_bits(self.shape.num_steps) - 1))

    def project(
        self, part: Projection, train: Train, incoming: str | None = None, encoding: str | None = None
    ) -> Train:  # fmt: skip
        return self.fire(self.linear(part.bits, train, incoming, part.offset), part.shift, encoding)

    def fire(self, current: Ints, shift: int, encoding: str | None = None) -> Train:
        """θ = 2^shift; a grid coarser than α (negative shift) scales the input instead."""
        current, theta = (current, 1 << shift) if shift >= 0 else (current << -shift, 1)
        return encode(current, theta, self.shape.num_steps, encoding or self.shape.encoding, self.neuron)

    def residual(self, part: Residual, train: Train, hidden: Train, incoming: str | None = None) -> Train:
        product = self.linear(part.bits, train, incoming, part.bias).sum(axis=0) >> fraction_bits(self.shape.num_steps)
        same = spike_count(hidden, self.shape.encoding)
        return self.normalize(part.norm, (product << part.shift) + (same << part.residual_shift))

    def normalize(self, norm: Norm, x: Ints) -> Train:
        """BSPN needs the whole window to see S, so its neurons always get the average."""
        current, size = bspn(norm, x, self.shape)
        return encode(current[None], size, self.shape.num_steps, self.shape.encoding)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation over spikes
# ---------------------------------------------------------------------------------------------------------------------


def on_off(train: Train) -> list[tuple[NDArray[np.uint64], int]]:
    """The binary trains inside a train, packed along the features, with the sign of their spikes."""
    parts = [(pack_words((train > 0).astype(np.uint8)), 1)]
    if (train < 0).any():
        parts.append((pack_words((train < 0).astype(np.uint8)), -1))
    return parts


def accumulate(train: Train, words: NDArray[np.uint64]) -> Ints:
    """Σ_j w_j s_j(t) with w = ±1 for every t: the +1s that spikes select, less the −1s that they select."""
    total: Any = 0
    for spikes, sign in on_off(train):
        selected = (overlap(spikes, words) << 1) - np.bitwise_count(spikes).sum(axis=-1, dtype=np.int64)[..., None]
        total = total + selected if sign > 0 else total - selected
    return total


def accumulate_levels(train: Train, levels: Ints, low: int, high: int) -> Ints:
    """Σ_j x_j s_j(t) for integer levels x held in memory, each added where there is a spike."""
    held = planes(levels, low, high)
    total: Any = 0
    for spikes, sign in on_off(train):
        added = dot(Planes(spikes[None], False), held)
        total = total + added if sign > 0 else total - added
    return total


def firing_rate(train: Train) -> float:
    """Spikes per slot; a signed train has an ON and an OFF slot per step and fires in one of them at most."""
    return float(np.count_nonzero(train) / train.size)
