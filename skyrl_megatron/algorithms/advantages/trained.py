"""Leaving out tokens that are not trained: tool outputs, user turns, masked responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_to_skip_by(loss_mask: Tensor | None, config: Any) -> Tensor | None:
    """Return ``loss_mask`` [B, T] where an estimator that carries reward through time passes over what is outside it
    (``algorithm.skip_untrained_tokens``), else None."""
    return loss_mask if getattr(config, "skip_untrained_tokens", True) else None


class TrainedTokens:
    """The trained tokens of each row, moved to its right end in their order, as if there were no others.

    ``mask`` [B, T]: 1 for those. ``moved``: the mask of the moved tokens.
    """

    __slots__ = ("_place", "_trained", "moved")

    def __init__(self, mask: Tensor) -> None:
        self._trained = mask > 0
        following = self._trained.flip(1).cumsum(1).flip(1)  # [B, T] trained tokens from here on
        # Where a trained token moves to; of any other token, where the trained one before it does.
        self._place = mask.shape[1] - following - (~self._trained).long()
        self.moved = self.move(mask)

    @classmethod
    def unless_at_the_end(cls, mask: Tensor) -> TrainedTokens | None:
        """Return the trained tokens; None where all of a row's are at its right end already, in every row."""
        return None if bool((mask[:, 1:] >= mask[:, :-1]).all()) else cls(mask)

    def move(self, x: Tensor) -> Tensor:
        """Move what belongs to trained tokens; all else is 0."""
        return self.credit(torch.where(self._trained, x, 0.0))

    def credit(self, rewards: Tensor) -> Tensor:
        """Move rewards; one at a token that is not trained is added to the trained token before it, the action that
        earned it."""
        return torch.zeros_like(rewards).scatter_add_(1, self._place, rewards)

    def back(self, x: Tensor) -> Tensor:
        """Put moved values at their tokens, and 0 at the others."""
        return torch.where(self._trained, x.gather(1, self._place), 0.0)
