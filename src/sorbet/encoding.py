"""How T time steps carry an integer: the three encodings of a spike neuron's count.

| encoding | counts           | spike trains                                        | a zero costs |
| -------- | ---------------- | --------------------------------------------------- | ------------ |
| unsigned | 0 … T−1          | one                                                 | no spike     |
| signed   | −(T−1) … T−1     | an ON and an OFF train, never both at once          | no spike     |
| offset   | −T/2 … T/2−1     | one, of count + T/2 spikes (what the published code does) | T/2 spikes |
"""

from typing import Literal

Encoding = Literal["signed", "unsigned", "offset"]


def count_range(num_steps: int, encoding: str) -> tuple[int, int]:
    """The least and the largest count (lo, hi) that an encoding carries in T steps."""
    if encoding == "unsigned":
        return 0, num_steps - 1
    if encoding == "signed":
        return -(num_steps - 1), num_steps - 1
    if encoding == "offset":
        return -(num_steps // 2), num_steps // 2 - 1
    raise ValueError(f"encoding is {encoding!r}: it must be 'unsigned', 'signed' or 'offset'")
