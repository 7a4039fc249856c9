"""A fixed curriculum: an order of prompts by difficulty, from easy to hard, made once before a run.

The rules are those of MLPerf Training 6.1, ``llm_post_training``: difficulty is ranked by 75 % inverse pass rate and
25 % size, the prompts are divided into 25 % easy, 50 % medium and 25 % hard, and batches mix them by phase. The run
takes the order from a file (``data.sampler=list``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

PASS_RATE_SHARE = 0.75
LARGEST_SIZE = 20.0
"""Sizes above this count as this."""
BUCKETS = (0.25, 0.5, 0.25)
"""Shares of easy, medium and hard prompts."""
PHASES = ((0.55, 0.4, 0.05), (0.25, 0.5, 0.25), (0.05, 0.4, 0.55))
"""Shares of the buckets in the batches of warm-up, core and hardening, as far as prompts are left. The benchmark's own
shares are not published with its rules."""


def difficulty(pass_rates: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return the difficulty of each prompt, between 0 and 1: 0.75 · (1 − pass rate) + 0.25 · size / 20."""
    return [
        PASS_RATE_SHARE * (1.0 - rate) + (1.0 - PASS_RATE_SHARE) * min(size, LARGEST_SIZE) / LARGEST_SIZE
        for rate, size in zip(pass_rates, sizes, strict=True)
    ]


def curriculum(difficulties: Sequence[float], batch: int, seed: int, cycles: int = 2) -> list[int]:
    """Return the positions of all prompts, each once, in the order of training.

    Each of ``cycles`` takes an equal part of each bucket, in batches of ``batch`` prompts whose mixture follows
    :data:`PHASES`, and of which the easy ones are first. Prompts of the same difficulty are ordered by ``seed``.
    """
    draw = random.Random(seed)
    ranked = sorted(range(len(difficulties)), key=lambda row: (difficulties[row], draw.random()))
    bounds = [round(sum(BUCKETS[:part]) * len(ranked)) for part in range(len(BUCKETS) + 1)]
    buckets = [ranked[low:high] for low, high in pairwise(bounds)]
    for bucket in buckets:
        draw.shuffle(bucket)
    order: list[int] = []
    for cycle in range(cycles):
        parts = [bucket[cycle::cycles] for bucket in buckets]
        batches = -(-sum(map(len, parts)) // batch)
        for number in range(batches):
            phase = PHASES[number * len(PHASES) // batches]
            for part, count in zip(parts, _counts(phase, [len(part) for part in parts], batch), strict=True):
                order += part[:count]
                del part[:count]
    return order


def _counts(shares: Sequence[float], left: Sequence[int], batch: int) -> list[int]:
    """Return how many prompts of each bucket a batch takes: by their shares, and then of those that have most left."""
    counts = [min(int(share * batch), available) for share, available in zip(shares, left, strict=True)]
    while sum(counts) < min(batch, sum(left)):
        place = max(range(len(left)), key=lambda each: left[each] - counts[each])
        counts[place] += 1
    return counts
