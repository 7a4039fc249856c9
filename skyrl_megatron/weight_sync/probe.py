"""Trainer and engines score the same tokens: what a checksum cannot see (wrong names, layouts, kernels) shows here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_megatron.errors import WeightSyncError

PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Limit:
    """How far two log-probs of a token may be apart, nats; ``mean`` over all tokens of the probe."""

    largest: float
    mean: float


LIMITS = {"float32": Limit(1e-4, 1e-4), "bfloat16": Limit(2.0, 0.15), "float16": Limit(1.0, 0.05)}
"""In fp32 trainer and engine agree to rounding. In half precision a router's near-ties fall either way and move single
log-probs far: their mean is what tells. Measured for bfloat16 by ``benchmarks/probe_limits.py``: small models
with equal weights up to 1.1 and 0.12, a stale output layer from 2.0 and 0.73 on. A wide random one with 32 experts is
above the limits with equal weights."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|trainer − engine| over the tokens of a probe, nats."""

    largest: float
    mean: float

    def within(self, limit: Limit) -> bool:
        """True unless weights differ. NaN is never within."""
        return self.largest <= limit.largest and self.mean <= limit.mean


def probe_tokens(vocab_size: int, seed: int = 0) -> list[int]:
    """The tokens to score: [PROBE_TOKENS] ids, the same for the same arguments."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]


def gap(trainer: Sequence[float], engine: Sequence[float]) -> Gap:
    """Raises WeightSyncError when the two scored different numbers of tokens."""
    if len(trainer) != len(engine) or not trainer:
        raise WeightSyncError(f"probe: the trainer scored {len(trainer)} tokens, the engine {len(engine)}")
    apart = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    largest = max(apart) if all(a == a for a in apart) else float("nan")
    return Gap(largest, sum(apart) / len(apart))


def limit_of(dtype: str) -> Limit:
    """The limit for an engine's dtype (``"float32"``)."""
    return LIMITS[dtype]


def is_due(syncs_before: int, interval: int) -> bool:
    """True for the first sync and every ``interval``-th after it; 0: for the first alone."""
    return syncs_before == 0 or (interval > 0 and syncs_before % interval == 0)
