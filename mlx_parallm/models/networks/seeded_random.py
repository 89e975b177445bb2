"""Random numbers that depend on a seed and a row's number alone: the same row gets the same numbers in any batch.

SplitMix64 as a function of a counter, for all rows at once.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # the odd step of SplitMix64's counter
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(seeds: Words, rows: Words, width: int) -> Floats:
    """(rows, width) numbers above 0 and below 1, from a seed and a number of each row."""
    streams = _mixed(_mixed(seeds + GAMMA) ^ _mixed(rows * GAMMA + GAMMA))
    counters = streams[:, None] + np.arange(1, width + 1, dtype=np.uint64) * GAMMA
    bits = _mixed(counters) >> np.uint64(11)
    found: Floats = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return found


def normals(seeds: Words, rows: Words, width: int) -> Floats:
    """(rows, width) of a standard normal distribution, by Box and Muller."""
    given = uniforms(seeds, rows, 2 * width)
    found: Floats = np.sqrt(-2 * np.log(given[:, :width])) * np.cos(2 * np.pi * given[:, width:])
    return found


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * FACTORS[0]
    words = (words ^ (words >> np.uint64(27))) * FACTORS[1]
    return words ^ (words >> np.uint64(31))
