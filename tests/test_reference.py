"""The reference multiplies nothing, and says what is wrong with its inputs."""

import ast
from pathlib import Path

import numpy as np
import pytest
from conftest import arrays, random_inputs, random_model

from sorbet import SorbetError, bits, reference
from sorbet.bits import bit_length, ceil_log2_ratio, shift_right
from sorbet.conversion import convert
from sorbet.counting import Counter, WatchedArray
from sorbet.reference import Reference, nearest_thresholds

ALLOWED = {"add", "shift", "compare", "bit", "popcount", "priority_encode", "look_up", "select"}


@pytest.mark.parametrize("encoding", ["signed", "unsigned", "offset"])
def test_nothing_is_multiplied_from_tokens_to_logits(encoding):
    model = random_model(seed=2, encoding=encoding)
    artifact, inputs = convert(model), arrays(random_inputs(model))
    counter, trace = Counter(), {}
    logits = Reference(artifact, counter)(**inputs, trace=trace)
    assert np.array_equal(logits, Reference(artifact)(**inputs))
    assert set(counter.counts) == ALLOWED
    assert all(number > 0 for number in counter.counts.values())
    # Nothing left the arrays that count: every stage's result is still watched.
    assert all(isinstance(value, WatchedArray) and value.counter is counter for value in trace.values())


@pytest.mark.parametrize(
    ("stray", "kind"),
    [
        (lambda x: x * 2, "multiply"),
        (lambda x: 3 * x, "multiply"),
        (lambda x: x @ np.ones((x.shape[-1], 2), np.int64), "matmul"),
        (lambda x: np.ones((2, x.shape[-2]), np.int64) @ x, "matmul"),
        (lambda x: x // 3, "floor_divide"),
        (lambda x: x / 2, "divide"),
        (lambda x: x % 5, "remainder"),
        (lambda x: x**3, "power"),
        (lambda x: np.square(x), "square"),
        (lambda x: np.exp2(x), "exp2"),
        (lambda x: np.multiply.reduce(x), "multiply"),
    ],
)
def test_a_stray_operation_is_counted(stray, kind):
    counter = Counter()
    stray(counter.watch(np.arange(6).reshape(2, 3)) + 1)
    assert counter.counts[kind] > 0


@pytest.mark.parametrize("name", ["dot", "einsum", "tensordot", "inner", "prod", "convolve", "mean", "outer"])
def test_functions_that_hide_operations_are_refused(name):
    x = Counter().watch(np.arange(4))
    with pytest.raises(TypeError, match="hides its operations"):
        getattr(np, name)(*(("i,i", x, x) if name == "einsum" else (x,) if name in ("prod", "mean") else (x, x)))


def test_no_way_around_the_counter():
    """Methods that hide a product are refused, single elements are watched on, and no module on the way unwraps."""
    x = Counter().watch(np.arange(6).reshape(2, 3))
    with pytest.raises(TypeError, match="hides its operations"):
        x.dot(np.ones(3))
    _ = x[0, 1] * 2
    assert x.counter.counts["multiply"] == 1
    for module in (reference, bits):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name not in ("__call__", "_integers", "check_inputs"):
                source = ast.unparse(node)
                for way in ("np.asarray", "np.ndarray)", ".item(", ".tolist(", ".tobytes("):
                    assert way not in source, f"{module.__name__}.{node.name} uses {way}"


def test_a_multiplication_inside_the_reference_would_fail(monkeypatch):
    """The test above is real: plant one `*` in the middle of the forward pass and the counter sees it."""
    honest = reference.bspn
    monkeypatch.setattr(reference, "bspn", lambda norm, x, shape: honest(norm, x * 1, shape))
    model = random_model(seed=2)
    counter = Counter()
    Reference(convert(model), counter)(**arrays(random_inputs(model)))
    assert counter.counts["multiply"] > 0


def test_counts_of_a_small_case_by_hand():
    counter = Counter()
    x = counter.watch(np.arange(6))
    _ = (x + x) << 1
    _ = x.sum()
    _ = np.where(x > 2, x, -x)
    _ = x[np.array([0, 1])]
    assert dict(counter.counts) == {"add": 6 + 6 + 6, "shift": 6, "compare": 6, "select": 6, "look_up": 2}


# -- integer helpers --------------------------------------------------------------------------------------------------


def test_nearest_thresholds():
    for m in range(1, 31):
        least = int(nearest_thresholds("log")[m])
        assert least**2 >= 2 ** (2 * m + 1) > (least - 1) ** 2
        assert 2 * int(nearest_thresholds("value")[m]) == 3 * 2**m


def test_bit_length_and_shifts():
    x = np.array([0, 1, 2, 3, 4, 7, 8, 2**31 - 1, 2**31, 2**52])
    assert bit_length(x).tolist() == [int(v).bit_length() for v in x]
    y = np.arange(-20, 21)
    for amount in range(-3, 5):
        assert shift_right(y, amount).tolist() == [int(np.floor(v * 2.0**-amount)) for v in y]
        assert shift_right(y, amount, "nearest").tolist() == [int(np.floor(v * 2.0**-amount + 0.5)) for v in y]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 32, 48, 384])
def test_ceil_log2_ratio(n):
    x = np.arange(1, 5000)
    found = ceil_log2_ratio(x, n)
    for value, k in zip(x.tolist(), found.tolist(), strict=True):
        assert value * 2 ** max(-k, 0) <= n * 2 ** max(k, 0)
        assert value * 2 ** max(1 - k, 0) > n * 2 ** max(k - 1, 0)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [[1, 160]]}, r"input_ids\[0, 1\] is 160: it must lie in 0 … 159"),
        ({"input_ids": [[-1, 3]]}, r"input_ids\[0, 0\] is -1"),
        ({"input_ids": [[1.5, 3]]}, "it must hold integers"),
        ({"input_ids": [1, 2]}, r"must be \[batch, length\]"),
        ({"input_ids": [[1, 2], [3]]}, "rows of different lengths"),
        ({"input_ids": np.zeros((0, 4), int)}, "neither of them 0"),
        ({"input_ids": np.zeros((1, 41), int)}, "41 tokens, the model 40 positions"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask has shape"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 1]]}, "pad on the right"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, r"attention_mask\[0, 1\] is 2"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 2]]}, r"token_type_ids\[0, 1\] is 2: it must lie in 0 … 1"),
    ],
)
def test_input_errors(inputs, message):
    reference = Reference(convert(random_model()))
    with pytest.raises(SorbetError, match=message):
        reference(**inputs)
