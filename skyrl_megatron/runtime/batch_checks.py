"""Checks of a mini-batch before a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.types import OWN_LOGPROBS

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.types import TrainingBatch

POLICY_READS: tuple[str, ...] = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
CRITIC_READS: tuple[str, ...] = ("values", "returns")


def too_long(batch: TrainingBatch, max_positions: int | None) -> Exception | None:
    """Return the error of a sequence that exceeds the model's positions."""
    longest = int(batch.lengths.max(initial=0))
    if max_positions and longest > max_positions:
        return ValueError(f"a sequence of {longest} tokens exceeds the model's {max_positions} positions")
    return None


def find_problem(batch: TrainingBatch, objective: Objective) -> Exception | None:
    """Return the error of rows that cannot be trained on: what ``objective`` reads is missing, or not finite."""
    read = CRITIC_READS
    if isinstance(objective, PolicyObjective):
        read = POLICY_READS
        if batch.advantages is None:
            return ValueError("the batch has no advantages: compute them before the training step")
        if objective.needs_old_log_probs and batch.old_logprobs is None and not batch.metadata.get(OWN_LOGPROBS):
            return ValueError(f"the policy loss {objective.name!r} reads old log-probs: the batch has none")
    elif batch.values is None or batch.returns is None:
        missing = "values" if batch.values is None else "returns"
        return ValueError(f"the batch has no {missing}: the critic's step reads values before the update and returns")
    for name in read:
        values = getattr(batch, name)
        if values is not None:
            bad = ~torch.isfinite(values) & (batch.loss_mask > 0)
            if bad.any():
                row, token = (int(i) for i in bad.nonzero()[0])
                uid = f" (uid {batch.uids[row]})" if batch.uids else ""
                return ValueError(f"{name} is {values[row, token]} at row {row}{uid}, response token {token}")
    return None
