"""Statistics over groups of responses to the same prompt, without a loop over sequences or groups.

GRPO, RLOO and MaxRL are functions of scores first, one number a sequence ([B] → [B]), which is all they need to know.
Their registered forms sum the token rewards, and :func:`over_response` spreads the result over the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError

type Index = Sequence[object] | np.ndarray | Tensor
"""[B] uid of the prompt of each row."""

EPSILON = 1e-6


class Groups:
    """Which of B sequences belong to the same prompt, from their uids.

    ``ids`` [B] int64 numbers the groups 0…G-1 in order of first appearance; ``sizes`` [G] float64.
    """

    __slots__ = ("ids", "sizes")

    def __init__(self, index: Index, rows: int, device: torch.device) -> None:
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
        squares = torch.bincount(self.ids, weights=deviations.double() ** 2, minlength=len(self.sizes))
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def spread(self, scores: Tensor, considered: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range [G] of the ``considered`` [B] bool scores of each group, and how many there are [G]."""
        infinity = torch.full_like(self.sizes, float("inf"))
        ids, values = self.ids[considered], scores.double()[considered]
        largest = (-infinity).scatter_reduce(0, ids, values, "amax")
        smallest = infinity.scatter_reduce(0, ids, values, "amin")
        return largest - smallest, torch.bincount(ids, minlength=len(self.sizes))


def varied_rows(
    scores: Tensor,
    index: Index,
    loss_mask: Tensor | None = None,
    tolerance: float = 1e-6,
) -> Tensor:
    """Return [B] bool: the sequences whose group has a learning signal (``algorithm.zero_variance_filter``).

    A group is dropped when at least two of its responses are trained on (``loss_mask`` [B, T] not all 0) and their
    ``scores`` [B] lie within ``tolerance``: group-relative advantages are then 0. Masked responses do not count as
    variety; a group with fewer than two trained responses stays.
    """
    groups = Groups(index, len(scores), scores.device)
    trained = torch.ones_like(scores, dtype=torch.bool) if loss_mask is None else (loss_mask > 0).any(dim=1)
    spread, count = groups.spread(scores, trained)
    return ~((count > 1) & (spread <= tolerance))[groups.ids]


def over_response(scores: Callable[..., Tensor], rewards: Tensor, mask: Tensor, *args: Any, **options: Any) -> Tensor:
    """Spread the scores of the summed rewards over the tokens of the response: [B, T] of the rewards' dtype."""
    advantages = scores(rewards.sum(dim=1), *args, **options)
    return advantages[:, None] * (mask if mask.dtype == rewards.dtype else mask.to(rewards.dtype))
