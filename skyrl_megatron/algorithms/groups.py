"""Trajectories: the rows of one sample. Groups: the samples of the same prompt, their statistics, and their scores
together: pass@k and majority@k, as exact means over all choices of k of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError

type Index = Sequence[object] | np.ndarray | Tensor
"""[B] uid of each row's prompt."""


class Trajectories:
    """The rows of N trajectories: adjacent, and the last row of each has ``is_last_step`` [B] (None: a row each).

    Step-wise a trajectory has a row for each turn, that of an agent may have one for each path. It is one sample: it
    has one reward, the sum over its rows, one length, and one advantage, which all its rows get.

    ``ids`` [B] int64 numbers the trajectories in order; ``last`` [N] int64 are their last rows. Raises AlgorithmError
    if ``is_last_step`` has another length, or does not end with a last row.
    """

    __slots__ = ("ids", "last", "several")

    def __init__(self, is_last_step: Tensor | None, rows: int, device: torch.device | None = None) -> None:
        self.several = is_last_step is not None
        """Whether a trajectory may have several rows."""
        if is_last_step is None:
            self.ids = self.last = torch.arange(rows, device=device)
            return
        ends = is_last_step.to(device, torch.bool)
        # [-1:] and not [-1]: an empty batch is valid
        if ends.shape != (rows,) or not bool(ends[-1:].all()):
            raise AlgorithmError(
                f"is_last_step must be [B] = [{rows}] and end with a last step, got shape {tuple(ends.shape)}"
            )
        # the last row still belongs to its trajectory: the number grows after it
        self.ids = ends.cumsum(0) - ends.long()
        self.last = ends.nonzero().flatten()

    def __len__(self) -> int:
        return len(self.last)

    def sum(self, of_rows: Tensor) -> Tensor:
        """Return the sums of ``of_rows`` [B] over the rows of each trajectory, [N]."""
        return of_rows.new_zeros(len(self)).index_add_(0, self.ids, of_rows) if self.several else of_rows

    def rewards(self, token_rewards: Tensor) -> Tensor:
        """Return the reward of each trajectory [N], the sum of ``token_rewards`` [B, T] over all its rows."""
        return self.sum(token_rewards.sum(dim=1))

    def largest(self, of_rows: Tensor) -> Tensor:
        """Return the largest of ``of_rows`` [B] in each trajectory, [N]."""
        # without the zeros of the target, or negative values would never be the largest
        return of_rows.new_zeros(len(self)).scatter_reduce(0, self.ids, of_rows, "amax", include_self=False)

    def any(self, of_rows: Tensor) -> Tensor:
        """Return [N] bool: whether ``of_rows`` [B] bool holds for a row of each trajectory."""
        return self.sum(of_rows.long()) > 0

    def trained(self, loss_mask: Tensor) -> Tensor:
        """Return [N] bool: whether ``loss_mask`` [B, T] has a token of each trajectory."""
        return self.any((loss_mask > 0).any(dim=1))

    def of_last[T](self, of_rows: Sequence[T]) -> list[T]:
        """Return the entries of ``of_rows`` [B] at the last rows, [N]."""
        return [of_rows[row] for row in self.last.tolist()]


class Groups:
    """The groups of B sequences that have the same prompt, by their uids.

    ``ids`` [B] int64 numbers the groups 0…G-1 in order of first appearance; ``sizes`` [G] float64.
    """

    __slots__ = ("ids", "sizes")

    def __init__(self, index: Index, rows: int, device: torch.device) -> None:
        # as Python values: elements of a tensor hash by identity, so equal ids would be different groups
        uids = index if isinstance(index, list | tuple) else index.tolist()  # type: ignore[union-attr]
        if len(uids) != rows:
            raise AlgorithmError(f"index names {len(uids)} sequences, the rewards hold {rows}")
        numbers = dict.fromkeys(uids)
        numbers = dict(zip(numbers, range(len(numbers)), strict=True))
        self.ids = torch.from_numpy(np.fromiter(map(numbers.__getitem__, uids), np.int64, rows)).to(device)
        self.sizes = torch.bincount(self.ids, minlength=len(numbers)).double()

    def mean(self, scores: Tensor) -> Tensor:
        """Return the mean of ``scores`` [B] in each group, [G] float64."""
        return torch.bincount(self.ids, weights=scores.double(), minlength=len(self.sizes)) / self.sizes

    def std(self, deviations: Tensor) -> Tensor:
        """Return each group's unbiased standard deviation [G] float64, given the deviations [B] from its mean."""
        # from deviations, not as Σx² − n·mean²: for rewards with a large common part that difference cancels
        squares = torch.bincount(self.ids, weights=deviations.double() ** 2, minlength=len(self.sizes))
        # a group of one has a deviation of 0, not of 0/0
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def spread(self, scores: Tensor, considered: Tensor) -> tuple[Tensor, Tensor]:
        """Return range and number, [G] each, of the scores of each group that ``considered`` [B] bool selects."""
        infinity = torch.full_like(self.sizes, float("inf"))
        ids, values = self.ids[considered], scores.double()[considered]
        largest = (-infinity).scatter_reduce(0, ids, values, "amax")
        smallest = infinity.scatter_reduce(0, ids, values, "amin")
        return largest - smallest, torch.bincount(ids, minlength=len(self.sizes))


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
