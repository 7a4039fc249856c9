"""Rollout routing replay (arXiv:2510.11370): routers use the experts that the engine selected during sampling.

A forward pass of the model gets the routes of its micro-batch as the argument ``routes``
(``PackedInputs.model_arguments``, ``pass_inputs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from skyrl_megatron.runtime.model.pass_inputs import PassInput, give_inputs

type TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RoutingReplay(PassInput[Tensor]):
    """Replaces Megatron's ``RouterReplay`` in one router (megatron/core/transformer/moe/router.py).

    Scores are gathered from the scores of all experts, so gradients reach the router through the replayed experts, and
    each family's own rule turns them into weights. The model routes tokens without routes. ``value``: [t, K] routes of
    the current pass; -1 for tokens without a route.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.listener: Callable[[Tensor], None] | None = None
        """Called with the experts [t, K] of each pass without gradients."""
        self.mismatch: Tensor | None = None
        """[2] float64 since the last read: tokens with routes, and those of them that the model would have sent to
        other experts. Counts training passes only, and a recomputed pass once."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts) [t, K] of the replayed routes. ``choose``: the model's own top-k function."""
        routes = self.take()
        # the model's own choice is still made, for tokens without a route and to count differences
        values, experts = choose(scores, topk, num_groups, group_topk)
        if routes is not None:
            natural, recorded = experts, routes >= 0
            experts = torch.where(recorded, routes.long(), natural)
            # gathered from all scores, so that the gradient reaches the router
            values = scores.gather(1, experts)
            # in a recomputed pass gradients are on in the second run alone, so each token counts once
            if torch.is_grad_enabled():
                self._count(recorded[:, 0], natural, experts)
        if self.listener is not None and not torch.is_grad_enabled():
            self.listener(experts)
        return values, experts

    def _count(self, known: Tensor, natural: Tensor, replayed: Tensor) -> None:
        """Compare the two sets of K experts per token and update ``mismatch``."""
        same = (natural[:, :, None] == replayed[:, None, :]).any(-1).all(-1)
        found = torch.stack([known.sum(), (known & ~same).sum()]).double()
        self.mismatch = found if self.mismatch is None else self.mismatch + found


def replay_routes(chunk: nn.Module, routers: Sequence[TopKRouter]) -> None:
    """Make the expert layers of a model chunk replay routes.

    Its forward pass then takes the argument ``routes`` (``PackedInputs.routes``); without it, the model routes.
    """
    replays = [RoutingReplay(router.layer_number - 1) for router in routers]
    for router, replay in zip(routers, replays, strict=True):
        router.router_replay = replay
    give_inputs(chunk, "routes", replays, lambda routes, layer: routes[layer])
