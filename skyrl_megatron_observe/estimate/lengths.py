"""Lengths of prompts and responses of a step that has not been sampled: drawn from what is known of them."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

SPREAD = 0.7
"""Standard deviation of the logarithm of a response's tokens, before the limit cuts them off."""


def log_normal(mean: float, limit: int, rows: int, spread: float = SPREAD) -> np.ndarray:
    """Return ``rows`` tokens, [rows] int64 of 1 … ``limit``, whose logarithms are normal with deviation ``spread`` and
    whose mean is ``mean``; what exceeds the limit is cut off. The same arguments give the same lengths, in a random
    order."""
    ranks = (np.arange(rows) + 0.5) / rows
    normal = np.array([NormalDist().inv_cdf(rank) for rank in ranks.tolist()])
    low, high = 0.0, np.log(limit) + 8 * spread
    for _ in range(50):  # the logarithm of the median with which the mean is right
        middle = (low + high) / 2
        if np.clip(np.exp(middle + spread * normal), 1, limit).mean() < mean:
            low = middle
        else:
            high = middle
    lengths = np.clip(np.exp(low + spread * normal), 1, limit).round().astype(np.int64)
    shuffled: np.ndarray = np.random.default_rng(0).permutation(lengths)
    return shuffled
