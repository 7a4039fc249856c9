"""Penalties for long responses, which are subtracted from their rewards (``algorithm.length_penalty``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.groups import Groups, Index
from skyrl_megatron.config.fields import Count, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.errors import ConfigError, Problem

KEY = "trainer.algorithm.length_penalty"


@dataclass
class LengthPenalty(BaseConfig):
    """``overlong``: by absolute length (DAPO, arXiv:2503.14476, equation 13). ``relative``: by length among the
    responses to the same prompt (Kimi k1.5, arXiv:2501.12599, section 2.3.3)."""

    type: Annotated[str, OneOf("overlong", "relative")] = "overlong"
    """Kind of penalty."""
    coef: Positive = 1.0
    """Factor of the penalty."""
    max_length: Count | None = None
    """``overlong``: length in tokens from which the penalty is 1."""
    buffer: Count | None = None
    """``overlong``: the penalty grows linearly over this many tokens before ``max_length``."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LengthPenalty | None:
        """Return the penalty of ``algorithm.length_penalty``, None if that is empty. Raises ConfigError."""
        if not given:
            return None
        try:
            made = cls.from_dict_config(dict(given))
        except ConfigError as error:
            # the keys of the section alone, here as a user writes them
            problems = [Problem(f"{KEY}.{problem.key}", problem.value, problem.fix) for problem in error.problems]
            raise ConfigError(problems) from error
        overlong = made.type == "overlong"
        fix = "overlong needs it: set a number of tokens" if overlong else "only overlong has it: remove it"
        of_overlong = {"max_length": made.max_length, "buffer": made.buffer}
        wrong = [
            Problem(f"{KEY}.{name}", value, fix) for name, value in of_overlong.items() if (value is None) == overlong
        ]
        if made.max_length and made.buffer and made.buffer > made.max_length:
            wrong.append(Problem(f"{KEY}.buffer", made.buffer, f"must be at most max_length={made.max_length}"))
        if wrong:
            raise ConfigError(wrong)
        return made

    def penalties(self, lengths: Tensor, scores: Tensor, index: Index) -> Tensor:
        """Return what is subtracted from the reward of each response, [B] float64; negative values are bonuses.

        ``lengths`` [B]: sampled tokens, ``scores`` [B]: rewards, ``index`` [B]: uid of the prompt.

        ``overlong``: 0 up to max_length − buffer, 1 from max_length on, linear in between. ``relative``: with λ =
        0.5 − (l − shortest) / (longest − shortest) the bonus is λ for a response of positive reward, else min(0, λ),
        and 0 in a group whose responses have the same length. Both times ``coef``.
        """
        lengths = lengths.double()
        if self.type == "overlong":
            assert self.max_length is not None and self.buffer is not None
            return self.coef * ((lengths - (self.max_length - self.buffer)) / self.buffer).clamp(0.0, 1.0)
        groups = Groups(index, len(lengths), lengths.device)
        infinity = torch.full_like(groups.sizes, float("inf"))
        longest = (-infinity).scatter_reduce(0, groups.ids, lengths, "amax")[groups.ids]
        shortest = infinity.scatter_reduce(0, groups.ids, lengths, "amin")[groups.ids]
        # a group of equal lengths would be 0/0; its bonus is replaced below
        share = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1.0)
        bonus = torch.where(scores > 0, share, share.clamp(max=0.0))
        return -self.coef * torch.where(longest > shortest, bonus, 0.0)
