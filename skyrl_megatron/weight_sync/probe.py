"""The probe of a weight sync: trainer and engines score the same tokens. It finds errors that checksums cannot find,
such as wrong names, layouts or kernels."""

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
"""Maximum mean |difference| of log-probs, nats, for any model (float16 is not measured); see :func:`limit_of`."""
ROUNDINGS = 3.0
"""The limit is this many times the effect of rounding on the trainer's own scores (``runtime/forward_step.py``) if
that is more than ``LIMITS``.

Only the mean is compared: in half precision a router's near-ties go either way and move single log-probs far, and in
fp32 single tokens of two correct implementations differ by 3e-4. The effect of rounding depends on the model.
Measured with equal weights: at most 0.12 or 1.8 times rounding in bfloat16 and 4e-5 in
fp32; with a stale output layer, at least 0.77 and 4.5 times in bfloat16 and 0.7 in fp32; with two experts swapped, at
least 0.06 in fp32 if any token is routed to them. In 8 bits (weights only) equal
weights differ by at most 0.13 or 1.2 times rounding; engines that round activations add about as much."""


@dataclass(frozen=True, slots=True)
class LogprobDiff:
    """|log-prob of the trainer − that of the engine| over the tokens of a probe, nats."""

    largest: float
    mean: float

    def within(self, limit: float) -> bool:
        """Return whether the mean is within ``limit``, nats. NaN never is."""
        return self.mean <= limit


def probe_tokens(vocab_size: int, seed: int | str = 0) -> list[int]:
    """Draw the tokens to score: [PROBE_TOKENS] ids, the same for the same arguments.

    ``seed``: the version of the sync, so that a resumed run draws the same tokens as an uninterrupted run.
    """
    # Random(str) hashes the text itself, so the draw is the same in every process; hash() would be salted
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]


def logprob_diff(trainer: Sequence[float], engine: Sequence[float]) -> LogprobDiff:
    """Compare log-probs of the same tokens. Raises WeightSyncError if the numbers of tokens differ."""
    if len(trainer) != len(engine) or not trainer:
        raise WeightSyncError(f"probe: the trainer scored {len(trainer)} tokens, the engine {len(engine)}")
    apart = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    # max() of numbers with a NaN depends on their order: a NaN must not pass as a small difference
    largest = max(apart) if all(a == a for a in apart) else float("nan")
    return LogprobDiff(largest, sum(apart) / len(apart))


def limit_of(dtype: str, rounding: LogprobDiff) -> float:
    """Return the maximum mean difference of log-probs, nats, for an engine's dtype (``"float32"``).

    ``rounding``: how far the trainer's own scores move if ± half a unit (``EPSILON``) is added to embeddings.
    """
    return max(LIMITS[dtype], ROUNDINGS * rounding.mean)


def is_due(syncs_before: int, interval: int) -> bool:
    """Return whether to probe: at the first sync and every ``interval``-th after it; 0: only at the first."""
    return syncs_before == 0 or (interval > 0 and syncs_before % interval == 0)
