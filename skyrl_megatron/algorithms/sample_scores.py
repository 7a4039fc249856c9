"""Scores of several responses to a prompt: pass@k and majority@k, as exact means over all choices of k responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` responses passes, drawn without replacement from ``samples``
    responses of which ``passed`` do: 1 − C(n−c, k) / C(n, k).

    It is the unbiased estimator of arXiv:2107.03374, section 2.1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    _require(samples, k)
    # integers of any size: a product of ratios would round, and overflow for thousands of samples
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], credits: Sequence[float], k: int) -> float:
    """Return the expected credit of the most frequent answer among ``k`` responses drawn without replacement.

    ``answers`` [n] and ``credits`` [n] belong to the responses. The credit of an answer is the mean over the responses
    that gave it. Answers that tie share the vote: each wins with the same probability. With k = n this is the vote of
    all responses (self-consistency, arXiv:2203.11171). Raises ValueError unless 1 ≤ k ≤ n.
    """
    _require(len(answers), k)
    counts = Counter(answers)
    sums: dict[Hashable, float] = dict.fromkeys(counts, 0.0)
    for answer, credit in zip(answers, credits, strict=True):
        sums[answer] += credit
    total = 0.0
    for answer, count in counts.items():
        # what earns nothing adds nothing, and counting its wins is the expensive part
        if sums[answer]:
            others = [number for other, number in counts.items() if other != answer]
            total += sums[answer] / count * _wins(count, others, k)
    return total / comb(len(answers), k)


def _wins(count: int, others: Sequence[int], k: int) -> float:
    """Return the number of choices of k responses that an answer with ``count`` responses wins; a tie of m answers
    counts 1/m. ``others``: numbers of responses of the other answers."""
    wins = 0.0
    for votes in range(1, min(count, k) + 1):
        # ways[chosen, tied]: choices of that many of the others' responses in which that many answers have `votes`
        # of them, and no answer has more.
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for number in others:
            more: Counter[tuple[int, int]] = Counter()
            for (chosen, tied), amount in ways.items():
                for taken in range(min(number, votes, k - votes - chosen) + 1):
                    more[chosen + taken, tied + (taken == votes)] += amount * comb(number, taken)
            ways = more
        decided = sum(amount / (tied + 1) for (chosen, tied), amount in ways.items() if chosen == k - votes)
        wins += comb(count, votes) * decided
    return wins


def _require(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be between 1 and the number of responses, {samples}")
