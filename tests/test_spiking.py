"""Neurons: what an ASG neuron fires is what the quantiser counts, for every input that it can meet."""

import numpy as np
import pytest
from conftest import arrays, random_inputs, random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from sorbet.bits import bytes_to_words, dot, planes
from sorbet.conversion import convert
from sorbet.encoding import count_range
from sorbet.reference import Reference
from sorbet.spiking import (
    NeuronState,
    SpikingSorbet,
    accumulate,
    accumulate_levels,
    encode,
    firing_rate,
    integrate_and_fire,
    spike_count,
)
from sorbet.verify import site_encoding

ENCODINGS = ("signed", "unsigned", "offset")
STEPS = (2, 4, 8, 16)


def quantise(total, threshold, lo, hi):
    """clip(⌊U/θ + ½⌋, lo, hi) in exact integers."""
    return np.clip((2 * total + threshold) // (2 * threshold), lo, hi)


def split(total: np.ndarray, num_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Currents [T, …] that add up to `total`, with log2 T fraction bits, arriving at random."""
    parts = rng.integers(-50, 50, (num_steps, *total.shape))
    parts[-1] += total - parts.sum(axis=0)
    return parts * num_steps


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 7, 8, 13, 64])
def test_asg_count_equals_the_quantiser_for_every_input(encoding, num_steps, threshold):
    lo, hi = count_range(num_steps, encoding)
    total = np.arange((lo - 3) * threshold - 2, (hi + 3) * threshold + 3)
    expected = quantise(total, threshold, lo, hi)
    for currents in (total[None], split(total, num_steps, np.random.default_rng(0))):
        train = encode(currents, threshold, num_steps, encoding)
        assert train.shape == (num_steps, len(total))
        assert set(np.unique(train)) <= ({-1, 0, 1} if encoding == "signed" else {0, 1})
        assert np.array_equal(spike_count(train, encoding), expected)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-(2**24), 2**24), st.integers(1, 2**14), st.sampled_from(STEPS), st.sampled_from(ENCODINGS),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_asg_count_equals_the_quantiser(total, threshold, num_steps, encoding, seed):
    currents = split(np.array([total]), num_steps, np.random.default_rng(seed))
    train = encode(currents, threshold, num_steps, encoding)
    assert spike_count(train, encoding)[0] == quantise(total, threshold, *count_range(num_steps, encoding))


def test_integrate_and_fire_by_hand():
    """Algorithm 3, lines 7 to 9: θ = 5, A = 3 from V(0) = 0."""
    state, spikes, potentials = NeuronState(np.array([0])), [], []
    for _ in range(5):
        s, state = integrate_and_fire(np.array([3]), state, 5)
        spikes.append(int(s[0]))
        potentials.append(int(state.v[0]))
    assert spikes == [0, 1, 0, 1, 1]
    assert potentials == [3, 1, 4, 2, 0]


def test_a_plain_if_neuron_depends_on_when_its_input_comes():
    """What ASG is worth: the same total, late, or first excitation and then inhibition, is miscounted by plain IF."""
    late = np.array([[0], [0], [0], [12 * 4]])  # U = 12, θ = 4: three spikes, but one step to fire them in
    early = np.array([[8 * 4], [8 * 4], [-8 * 4], [-8 * 4]])  # U = 0: no spike, but the first steps fire
    for currents, count, plain in ((late, 3, 1), (early, 0, 2)):
        assert spike_count(encode(currents, 4, 4, "unsigned"), "unsigned")[0] == count
        assert spike_count(encode(currents, 4, 4, "unsigned", neuron="if"), "unsigned")[0] == plain


def test_accumulation_is_adding_rows_where_spikes_are():
    rng = np.random.default_rng(0)
    train = rng.integers(-1, 2, (4, 3, 70)).astype(np.int8)
    bits = rng.integers(0, 2, (9, 70)).astype(np.uint8)
    levels = rng.integers(-8, 8, (9, 70))
    by_hand, of_levels = np.zeros((4, 3, 9), np.int64), np.zeros((4, 3, 9), np.int64)
    for t, m, j in np.argwhere(train):
        by_hand[t, m] += train[t, m, j] * (2 * bits[:, j].astype(np.int64) - 1)
        of_levels[t, m] += train[t, m, j] * levels[:, j]
    words = bytes_to_words(np.packbits(bits, axis=-1, bitorder="little"))
    assert np.array_equal(accumulate(train, words), by_hand)
    assert np.array_equal(accumulate_levels(train, levels, -8, 7), of_levels)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 150), st.sampled_from([(0, 15), (-15, 15), (-8, 7), (-1, 0)]),
    st.sampled_from([(0, 1), (-8, 7), (-128, 127)]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_dot_by_bit_planes_is_a_matrix_product(m, n, k, a_range, b_range, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(a_range[0], a_range[1] + 1, (2, m, k)), rng.integers(b_range[0], b_range[1] + 1, (2, n, k))
    assert np.array_equal(dot(planes(a, *a_range), planes(b, *b_range)), a @ np.swapaxes(b, -1, -2))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_records(encoding):
    model = random_model(seed=4, encoding=encoding)
    artifact, inputs = convert(model), random_inputs(model)
    record, trace = {}, {}
    SpikingSorbet(artifact)(**arrays(inputs), record=record)
    Reference(artifact)(**arrays(inputs), trace=trace)
    steps = artifact.shape.num_steps
    assert record["layers.1.query"].shape == (steps, 4, 17, 48)
    assert record["layers.0.probs"].shape == (steps, 4, 4, 17, 17)
    assert set(trace) - set(record) == {"logits", *(f"layers.{i}.{x}" for i in range(2) for x in ("key", "value"))}
    for name, train in record.items():
        of_site = site_encoding(name, artifact.shape)
        assert np.array_equal(spike_count(train, of_site), trace[name]), name
        assert 0 <= firing_rate(train) <= 1
        if of_site != "offset":  # a spike for each unit of the count
            assert np.count_nonzero(train) == np.abs(trace[name]).sum(), name


def test_if_without_averaging_is_not_exact():
    model = random_model(seed=4)
    artifact, inputs = convert(model), arrays(random_inputs(model))
    assert np.array_equal(SpikingSorbet(artifact, "asg")(**inputs), Reference(artifact)(**inputs))
    assert not np.array_equal(SpikingSorbet(artifact, "if")(**inputs), Reference(artifact)(**inputs))
    with pytest.raises(ValueError, match="neuron is 'lif': it must be 'asg' or 'if'"):
        SpikingSorbet(artifact, "lif")  # type: ignore[arg-type]
