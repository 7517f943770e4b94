"""Random numbers that are a pure function of a seed and a token's index.

Called by ``SamplingBatch`` once a step. The same seed and index give the same number in any batch, after a pause and
after a restart. Keeps no state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014); uint64 in and out."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """One uint64 key a seed; seeds count modulo 2**64. Neighbouring seeds give unrelated streams."""
    return _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GAMMA)


def uniforms(keys: NDArray[np.uint64], indices: Sequence[int]) -> NDArray[np.float64]:
    """Number ``indices[i]`` of the stream of ``keys[i]``: float64 in [0, 1)."""
    counters = np.array(indices, dtype=np.uint64) + np.uint64(1)
    return (_mix(keys + counters * _GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53
