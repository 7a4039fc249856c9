"""The rows of a pass on paper, and what of them is computed once for several rows (``trainer.share_prefixes``).

The samples of a prompt share it. What calls of an agent share besides is not known before a run, so that their saving
is at least the one given here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.rules.megatron_rules import UNMEASURED, unshared_prefixes
from skyrl_megatron.data.prefixes import SHORT, WORTH, SharedPrefixes

if TYPE_CHECKING:
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel

ONE_SAMPLE = "no prompt has several samples"


@dataclass(frozen=True)
class PassRows:
    """B rows of a pass."""

    lengths: np.ndarray
    """[B] tokens."""
    before: np.ndarray
    """[B] first tokens of each, which are computed with another row."""

    @classmethod
    def separate(cls, lengths: np.ndarray) -> PassRows:
        """Return rows that are computed each by itself."""
        return cls(lengths, np.zeros_like(lengths))

    def flops(self, of: ModelFlops) -> np.ndarray:
        """Return the FLOPs of a forward pass of each row, [B]."""
        flops: np.ndarray = of.forward(self.lengths) - of.forward(self.before)
        return flops

    @property
    def computed(self) -> np.ndarray:
        """Tokens of each row that are computed with it, [B]."""
        tokens: np.ndarray = self.lengths - self.before
        return tokens

    @property
    def tokens(self) -> float:
        """Number of computed tokens."""
        return float(self.computed.sum())

    @property
    def saved(self) -> float:
        """Share of the rows' tokens that is not computed again."""
        return float(self.before.sum()) / float(self.lengths.sum())


def why_unshared(model: RoleModel) -> str:
    """Return why a role computes each row by itself; empty if it does not."""
    cfg, reasons = model.cfg, unshared_prefixes(model.cfg, model.role)
    if supervised(cfg) is not None or cfg.generator.n_samples_per_prompt < 2:
        return ONE_SAMPLE
    if cfg.trainer.share_prefixes == "never":
        return "trainer.share_prefixes=never"
    if not model.kernels.on_cpu and cfg.trainer.share_prefixes == "auto":
        reasons.append(UNMEASURED)
    return next(iter(reasons), "")


def pass_rows(model: RoleModel, flops: ModelFlops, prompts: np.ndarray, lengths: np.ndarray, micro: int) -> PassRows:
    """Return the rows of a pass over samples of ``prompts`` [B] tokens, those of a prompt next to each other.

    ``lengths``: [B] tokens with their prompts. ``micro``: rows of a micro-batch without ``max_tokens_per_microbatch``.
    """
    cfg, p = model.cfg, model.parallel
    most = cfg.trainer.max_tokens_per_microbatch
    rows = PassRows.separate(lengths)
    if why_unshared(model) or (most <= 0 and micro == 1):
        return rows
    numbers = np.arange(len(lengths))
    shared = np.where((numbers % cfg.generator.n_samples_per_prompt > 0) & (prompts >= SHORT), prompts, 0)
    of_all = SharedPrefixes(numbers, shared)
    if cfg.trainer.share_prefixes == "auto" and of_all.saved(lengths) < WORTH:
        return rows
    families, _ = of_all.families(numbers, lengths, flops.forward, p.dp)
    for family in families:
        shared[family[0]] = 0
    for part in SharedPrefixes(numbers, shared).parts(lengths, p.alignment, most, micro):
        shared[part[0]] = 0
    return PassRows(lengths, shared)
