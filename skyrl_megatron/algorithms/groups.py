"""Trajectories: the rows of one sample. Groups: the samples of the same prompt, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence

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

    def largest(self, of_rows: Tensor) -> Tensor:
        """Return the largest of ``of_rows`` [B] in each trajectory, [N]."""
        # without the zeros of the target, or negative values would never be the largest
        return of_rows.new_zeros(len(self)).scatter_reduce(0, self.ids, of_rows, "amax", include_self=False)

    def any(self, of_rows: Tensor) -> Tensor:
        """Return [N] bool: whether ``of_rows`` [B] bool holds for a row of each trajectory."""
        return self.sum(of_rows.long()) > 0

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
