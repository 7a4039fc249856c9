"""Groups: the responses to the same prompt, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError

type Index = Sequence[object] | np.ndarray | Tensor
"""[B] uid of each row's prompt."""


class Groups:
    """The groups of B sequences that have the same prompt, by their uids.

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
        """Return range and number, [G] each, of the scores of each group that ``considered`` [B] bool selects."""
        infinity = torch.full_like(self.sizes, float("inf"))
        ids, values = self.ids[considered], scores.double()[considered]
        largest = (-infinity).scatter_reduce(0, ids, values, "amax")
        smallest = infinity.scatter_reduce(0, ids, values, "amin")
        return largest - smallest, torch.bincount(ids, minlength=len(self.sizes))
