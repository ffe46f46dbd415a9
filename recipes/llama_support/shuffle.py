"""A random order of any number of things that takes no memory: each place is computed by itself."""

from __future__ import annotations

_MASK = 2**64 - 1
_ROUNDS = 6


class Shuffled:
    """A permutation of 0, ..., `count` - 1 that depends on `count` and `seed` alone.

    A Feistel network over the next power of four; a result outside the range is put in again until one falls inside
    (cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    """

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}, and must be at least 1")
        self.count = count
        self._bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._keys = [_mix(_mix(seed) + number) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        """What stands at `place`. Raises IndexError outside the range."""
        if not 0 <= place < self.count:
            raise IndexError(place)
        bits, low = self._bits, (1 << self._bits) - 1
        while True:
            left, right = place >> bits, place & low
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & low)
            place = left << bits | right
            if place < self.count:
                return place


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): 64 bits that look random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
