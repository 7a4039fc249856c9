"""Rollout routing replay (arXiv:2510.11370): routers use the experts that the engine selected during sampling.

A forward pass of the model gets the routes of its micro-batch as the argument ``routes``
(``PackedInputs.model_arguments``). Recomputation in the backward pass runs layers, or only their experts, without this
call. A router therefore queues the routes of passes that will be recomputed. Megatron's schedules run the backward
passes of a chunk in the order of its forward passes, with any number of micro-batches in flight, so the oldest routes
are always the right ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

type TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RoutingReplay:
    """Replaces Megatron's ``RouterReplay`` in one router (megatron/core/transformer/moe/router.py).

    Scores are gathered from the scores of all experts, so gradients reach the router through the replayed experts, and
    each family's own rule turns them into weights. The model routes tokens without routes.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """The model's layer, from 0."""
        self.routes: Tensor | None = None
        """[t, K] routes of the current pass; -1 for tokens without a route."""
        self.in_pass = False
        self.queues = False
        """Whether the pass may be recomputed, so that its routes are queued."""
        self.queue: deque[Tensor | None] = deque()
        self.listener: Callable[[Tensor], None] | None = None
        """Called with the experts [t, K] of each pass without gradients."""
        self.mismatch: Tensor | None = None
        """[2] float64 since the last read: tokens with routes, and those of them that the model would have sent to
        other experts. Counts training passes only, and a recomputed pass once."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts) [t, K] of the replayed routes. ``choose``: the model's own top-k function."""
        routes = self._current_routes()
        values, experts = choose(scores, topk, num_groups, group_topk)
        if routes is not None:
            natural, known = experts, routes >= 0
            experts = torch.where(known, routes.long(), natural)
            values = scores.gather(1, experts)
            if torch.is_grad_enabled():
                self._count(known[:, 0], natural, experts)
        if self.listener is not None and not torch.is_grad_enabled():
            self.listener(experts)
        return values, experts

    def _current_routes(self) -> Tensor | None:
        if self.in_pass:
            if self.queues and not torch.is_grad_enabled():
                self.queue.append(self.routes)
            return self.routes
        if not self.queue:
            raise RuntimeError(f"layer {self.layer}: the router runs outside of a pass and has no queued routes")
        return self.queue.popleft()

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

    def begin(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes = keywords.pop("routes", None)
        for router, replay in zip(routers, replays, strict=True):
            replay.in_pass, replay.queues = True, router.training
            replay.routes = None if routes is None else routes[replay.layer]
        return arguments, keywords

    def end(*_: Any) -> None:
        for replay in replays:
            replay.in_pass, replay.routes = False, None

    chunk.register_forward_pre_hook(begin, with_kwargs=True)
    chunk.register_forward_hook(end, always_call=True)


def forget_routes(routers: Sequence[TopKRouter]) -> None:
    """Drop the queued routes of passes that will not be recomputed, for example after an error."""
    for router in routers:
        if isinstance(replay := router.router_replay, RoutingReplay):
            replay.queue.clear()
