"""Checks of a mini-batch before a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.types import OWN_LOGPROBS

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.types import TrainingBatch

POLICY_READS: tuple[str, ...] = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
CRITIC_READS: tuple[str, ...] = ("values", "returns")
CHECKED_ROUTES = 1 << 20
"""Tokens × layers of a mini-batch whose routes are looked at: all of a small one, evenly spread ones of a large."""


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


def find_route_problem(batch: TrainingBatch, model: ModelChunks, missing: str) -> Exception | None:
    """Return the error of routes that ``model`` cannot take, or of none where ``missing`` is ``"error"``."""
    shape, config = model.hf.plan.shape, model.config
    layers = [layer for layer, has_experts in enumerate(shape.moe) if has_experts]
    absent = _missing_routes(batch) if missing == "error" else None
    return absent or _bad_routes(batch, layers, len(shape.moe), config.num_moe_experts, config.moe_router_topk)


def _bad_routes(
    batch: TrainingBatch, replayed: Sequence[int], layers: int, experts: int, topk: int
) -> Exception | None:
    """Return the error of routes that are not ``topk`` different ones of ``experts`` experts in each of the
    ``replayed`` ones of ``layers`` layers; it names uid, token and layer."""
    known = [(row, routes) for row, routes in enumerate(batch.rollout_routes) if routes is not None]
    stride = max(-(-sum(len(routes) for _, routes in known) * len(replayed) // CHECKED_ROUTES), 1)
    for row, routes in known:
        uid = batch.uids[row] if batch.uids else row
        if routes.shape[1:] != (layers, topk):
            return ValueError(
                f"uid {uid}: the engine's routes are of {routes.shape[1]} layers and {routes.shape[2]} experts a "
                f"token, the model has {layers} layers and takes {topk}: engine and trainer have different models"
            )
        looked_at = np.sort(routes[::stride, list(replayed)], axis=-1)
        wrong = (looked_at >= experts).any(-1) | (looked_at[..., 1:] == looked_at[..., :-1]).any(-1)
        if wrong.any():
            token, place = (int(each) for each in np.argwhere(wrong)[0])
            token, layer = token * stride, replayed[place]
            return ValueError(
                f"uid {uid}, token {token}, layer {layer}: the engine's route {routes[token, layer].tolist()} is not "
                f"of {topk} different experts from 0 to {experts - 1}"
            )
    return None


def _missing_routes(batch: TrainingBatch) -> Exception | None:
    """Return the error of a token that has no route and counts in the loss: one before a token that is trained on."""
    width = batch.loss_mask.shape[1]
    for row, length in enumerate(batch.lengths.tolist()):
        trained = batch.loss_mask[row].nonzero()
        needed = length - (width - int(trained[-1])) if len(trained) else 0
        routes = batch.rollout_routes[row] if batch.rollout_routes else None
        if (known := 0 if routes is None else len(routes)) < needed:
            return ValueError(
                f"uid {batch.uids[row] if batch.uids else row}: the engine returned no experts for token {known} of "
                f"{needed} before the last one that is trained on: find out why (its log), or set "
                "moe_routing_replay_missing=natural"
            )
    return None
