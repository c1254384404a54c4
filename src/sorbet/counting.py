"""Counting operations on the arrays themselves: an ndarray that books every ufunc that touches it.

A `Counter` watches arrays; everything computed from a watched array is watched too, so a stray `*` or `@` shows up
wherever it stands. Functions that are no ufuncs are refused unless they only move data.
"""

from collections import Counter as Tally
from typing import Any

import numpy as np

KINDS = {
    "add": "add", "subtract": "add", "negative": "add", "absolute": "add",
    "left_shift": "shift", "right_shift": "shift",
    "greater": "compare", "greater_equal": "compare", "less": "compare", "less_equal": "compare",
    "equal": "compare", "not_equal": "compare", "maximum": "compare", "minimum": "compare",
    "bitwise_and": "bit", "bitwise_or": "bit", "bitwise_xor": "bit", "invert": "bit",
    "bitwise_count": "popcount",
    "frexp": "priority_encode",
    "ldexp": "shift",
}  # fmt: skip
MOVES = {
    "concatenate", "stack", "packbits", "unpackbits", "swapaxes", "reshape", "ascontiguousarray", "full_like",
    "zeros_like", "ones_like", "shape", "ndim", "copyto", "broadcast_to", "squeeze", "expand_dims", "moveaxis",
    "empty_like", "atleast_2d", "transpose",
}  # fmt: skip


class Counter:
    """`counts` by kind of operation: add, shift, compare, bit, popcount, priority_encode, look_up, select, …

    Anything else is booked under its own name, `multiply` and `matmul` among it.
    """

    def __init__(self) -> None:
        self.counts: Tally[str] = Tally()

    def watch(self, array: Any) -> "WatchedArray":
        watched = np.asarray(array).view(WatchedArray)
        watched.counter = self
        return watched

    def book(self, kind: str, number: int) -> None:
        self.counts[kind] += int(number)


class WatchedArray(np.ndarray):
    counter: Counter | None = None

    def __array_finalize__(self, origin: Any) -> None:
        if origin is not None:
            self.counter = getattr(origin, "counter", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        counter = next((c for x in inputs if isinstance(x, WatchedArray) and (c := x.counter)), None)
        out = kwargs.get("out", ())
        if out:
            kwargs["out"] = tuple(_plain(x) for x in out)
        result = getattr(ufunc, method)(*(_plain(x) for x in inputs), **kwargs)
        if counter is None:
            return result
        touched = max(_size(x) for x in inputs) if method in ("reduce", "accumulate", "reduceat") else None
        first = result[0] if isinstance(result, tuple) else result
        if ufunc.__name__ == "matmul":
            touched = _size(first) * inputs[0].shape[-1]
        counter.book(KINDS.get(ufunc.__name__, ufunc.__name__), _size(first) if touched is None else touched)
        if isinstance(result, tuple):
            return tuple(counter.watch(x) for x in result)
        return counter.watch(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        counter = self.counter
        name = function.__name__
        if name not in MOVES and name != "where":
            raise TypeError(f"np.{name} on watched arrays: it hides its operations; write it out in ufuncs")
        result = function(*_plain_tree(args), **_plain_tree(kwargs))
        if counter is None or not isinstance(result, np.ndarray):
            return result
        if name == "where":
            counter.book("select", result.size)
        return counter.watch(result)

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(_plain_tree(key))
        if self.counter is not None and not isinstance(result, np.ndarray):
            return self.counter.watch(result)  # a single element is watched on
        keys = key if isinstance(key, tuple) else (key,)
        if self.counter is not None and any(isinstance(k, np.ndarray) for k in keys):
            self.counter.book("look_up", _size(result))
        return result

    def dot(self, *_: Any, **__: Any) -> Any:
        raise TypeError("dot on watched arrays: it hides its operations; write it out in ufuncs")


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, WatchedArray) else x


def _plain_tree(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)(_plain_tree(y) for y in x)
    if isinstance(x, dict):
        return {k: _plain_tree(v) for k, v in x.items()}
    return _plain(x)


def _size(x: Any) -> int:
    return np.size(_plain(x))
