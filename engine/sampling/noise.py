"""Random numbers that depend only on a row's seed, choice and position."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

_MASK = (1 << 64) - 1


def uniform(keys: Seq[tuple[int, int, int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return a random number in [0, 1) for each (seed, choice, position); equal keys give equal numbers."""
    seeds, choices, positions = (np.array([k[i] & _MASK for k in keys], dtype=np.uint64) for i in range(3))
    return uniform_of(seeds, choices, positions)


def uniform_of(
    seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return what `uniform` returns for the keys of these uint64 arrays.

    The numbers have 52 random bits, not 53, so that the product with a total stays below the total after rounding. The
    method is two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014).
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds + (choices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x + (positions + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return (x >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
