"""Trainer and engines score the same tokens: what a checksum cannot see (wrong names, layouts, kernels) shows here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_megatron.errors import WeightSyncError

PROBE_TOKENS = 64
QUANTISED = "float8_e4m3fn"
"""The dtype of engines that hold matrices in 8 bits."""
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, QUANTISED: 2.0**-4}
"""Half a unit in the last place, relative."""
LIMITS = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.05, QUANTISED: 0.3}
"""How far log-probs may be apart on average, nats, whatever the model (float16: not measured) …"""
ROUNDINGS = 3.0
"""… and how many times as far as rounding moves the trainer's own (``runtime/forward_step.py``), where that is more.

Only the mean tells: a router's near-ties fall either way in half precision and move single log-probs far, and in fp32
single tokens of two correct implementations are 3e-4 apart. How much of it is rounding depends on the model. Measured
by ``benchmarks/probe_limits.py``: with equal weights at most 0.12 or 1.8 times rounding in bfloat16 and 4e-5 in fp32;
with a stale output layer at least 0.77 and 4.5 times in bfloat16 and 0.7 in fp32, with two experts swapped at least
0.06 in fp32 where any token asks for them. In 8 bits (``benchmarks/probe_of_8_bits.py``, weights
alone) equal ones are at most 0.13 or 1.2 times rounding apart; engines that round activations add about as much."""


@dataclass(frozen=True, slots=True)
class LogprobDiff:
    """|log-prob of the trainer − that of the engine| over the tokens of a probe, nats."""

    largest: float
    mean: float

    def within(self, limit: float) -> bool:
        """Return whether the weights may be equal. NaN is never within a limit."""
        return self.mean <= limit


def probe_tokens(vocab_size: int, seed: int | str = 0) -> list[int]:
    """Draw the tokens to score: [PROBE_TOKENS] ids, the same for the same arguments.

    ``seed``: of a sync its version, so that a resumed run measures what an undisturbed one does.
    """
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]


def logprob_diff(trainer: Sequence[float], engine: Sequence[float]) -> LogprobDiff:
    """Compare log-probs of the same tokens. Raises WeightSyncError when the two scored different numbers of tokens."""
    if len(trainer) != len(engine) or not trainer:
        raise WeightSyncError(f"probe: the trainer scored {len(trainer)} tokens, the engine {len(engine)}")
    apart = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    largest = max(apart) if all(a == a for a in apart) else float("nan")
    return LogprobDiff(largest, sum(apart) / len(apart))


def limit_of(dtype: str, rounding: LogprobDiff) -> float:
    """Return how far log-probs may be apart on average, nats, for an engine's dtype (``"float32"``).

    ``rounding``: how far the trainer's own scores move when half a unit (``EPSILON``) is added to embeddings or taken.
    """
    return max(LIMITS[dtype], ROUNDINGS * rounding.mean)


def is_due(syncs_before: int, interval: int) -> bool:
    """Return whether to probe: at the first sync and every ``interval``-th after it; 0: at the first alone."""
    return syncs_before == 0 or (interval > 0 and syncs_before % interval == 0)
