"""Integer arithmetic on bit planes: what a matrix product becomes when nothing may be multiplied.

An integer matrix is held as planes of bits, 64 bits of one row to a word. A product of two such matrices is then

    Σ_k a_k b_k = Σ_i Σ_j ± popcount(a_i AND b_j) << (i + j)        (a_i, b_j: planes of weight 2^i, 2^j)

With spikes on one side (one plane) and 1-bit weights on the other (one plane) nothing of it is left but the counting
of the weights that spikes select: an accumulation over spikes.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]  # of integers


class Planes(NamedTuple):
    """x [..., rows, K] as words [planes, ..., rows, ⌈K/64⌉]; if `signed`, the last plane is negative."""

    words: NDArray[np.uint64]
    signed: bool


def pack_words(bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """0/1 [..., K] to words [..., ⌈K/64⌉], filled up with zeros."""
    return bytes_to_words(np.packbits(bits, axis=-1, bitorder="little"))


def bytes_to_words(packed: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Bits packed eight to a byte (as in the file) to words of 64."""
    missing = -packed.shape[-1] % 8
    if missing:
        packed = np.concatenate([packed, np.zeros((*packed.shape[:-1], missing), np.uint8)], axis=-1)
    return np.ascontiguousarray(packed).view(np.uint64)


def unpack(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    return np.unpackbits(packed, axis=-1, bitorder="little", count=count)


def planes(x: Ints, low: int, high: int) -> Planes:
    """The planes that integers in low … high need."""
    signed = low < 0
    number = max(int(high).bit_length(), int(-low - 1).bit_length() if signed else 0) + signed
    return Planes(np.stack([pack_words(((x >> i) & 1).astype(np.uint8)) for i in range(max(number, 1))]), signed)


def dot(a: Planes, b: Planes) -> Ints:
    """[..., M, K] and [..., N, K] to the integers [..., M, N] of a · bᵀ."""
    result = None
    for i, a_words in enumerate(a.words):
        for j, b_words in enumerate(b.words):
            term = overlap(a_words, b_words) << (i + j)
            if (a.signed and i == len(a.words) - 1) != (b.signed and j == len(b.words) - 1):
                term = -term
            result = term if result is None else result + term
    assert result is not None
    return result


BLOCK = 1 << 15  # elements of a product worked on at a time: they stay in the cache


def overlap(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> Ints:
    """Σ_k a_k b_k for bits: words [..., M, W] and [..., N, W] to [..., M, N]."""
    if b.ndim == 2:  # one matrix for all rows of a
        rows, b = a.reshape(-1, 1, a.shape[-1]), b[None]
        product = _in_blocks(rows, b, max(BLOCK // b.shape[1], 1))
        return product.reshape(*a.shape[:-1], b.shape[1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
    product = _in_blocks(a, b, max(BLOCK // (a.shape[1] * b.shape[1]), 1))
    return product.reshape(*batch, *product.shape[-2:])


def _in_blocks(a: NDArray[np.uint64], b: NDArray[np.uint64], step: int) -> Ints:
    """[P, M, W] and [P or 1, N, W] to [P, M, N], `step` matrices at a time."""
    blocks = [_overlap(a[i : i + step], b[i : i + step] if len(b) > 1 else b) for i in range(0, len(a), step)]
    return np.concatenate(blocks)


def _overlap(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> Ints:
    total = np.bitwise_count(a[:, :, None, 0] & b[:, None, :, 0]).astype(np.int32)
    for w in range(1, a.shape[-1]):
        total = total + np.bitwise_count(a[:, :, None, w] & b[:, None, :, w])
    return total.astype(np.int64)


def bit_length(x: Ints) -> Ints:
    """⌊log2 x⌋ + 1, and 0 for x = 0: a priority encoder, read off the exponent of a float64 (exact below 2^53)."""
    return np.frexp(x.astype(np.float64))[1]


def ceil_log2_ratio(x: Ints, n: int) -> Ints:
    """⌈log2(x / n)⌉ for x ≥ 1 without dividing: align the leading bits of x and n, then compare."""
    exponent = bit_length(x) - int(n).bit_length()
    aligned_x, aligned_n = x << np.maximum(-exponent, 0), np.left_shift(n, np.maximum(exponent, 0))
    return exponent + (aligned_x > aligned_n)


def shift_right(x: Ints, amount: Ints | int, rounding: str = "floor") -> Ints:
    """⌊x · 2^-amount⌋ (or the nearest integer, ties up); a negative amount shifts left."""
    right = np.maximum(amount, 0)
    if rounding == "nearest":
        x = x + ((np.left_shift(1, right)) >> 1)
    return (x >> right) << np.maximum(np.negative(amount), 0)
