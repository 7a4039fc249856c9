"""Routers that take the experts they are given: those that the engine chose when it sampled the tokens.

A pass of the model gets the routes of its micro-batch as the argument ``routes`` (``PackedInputs.model_arguments``).
Layers that are recomputed in the backward pass, whole or the experts alone, run without that call, so a router keeps
the routes of passes that are to be recomputed. Megatron's schedules run the backward passes of a chunk in the order of
its forward passes, with any number of micro-batches in flight: the oldest are the ones.

Rollout routing replay: arXiv:2510.11370.
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
    """Stands where Megatron's ``RouterReplay`` stands in one router (megatron/core/transformer/moe/router.py).

    Scores are gathered from those of all experts, so that the router learns from the experts that were used, and each
    family's own rule turns them into weights. Tokens without routes are routed as the model does.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """The model's layer, from 0."""
        self.given: Tensor | None = None
        """[t, K] of the pass that runs; -1 for tokens without."""
        self.in_pass = False
        self.keeps = False
        """Whether the router's training pass may be recomputed: routes are kept for it."""
        self.kept: deque[Tensor | None] = deque()
        self.listener: Callable[[Tensor], None] | None = None
        """Gets the experts [t, K] of each pass that is not a training pass."""
        self.mismatch: Tensor | None = None
        """[2] float64, since it was last read: tokens that got routes, and those of them that would have gone to other
        experts. Of training passes only; a pass that is recomputed counts once."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts) [t, K] of the given routes; ``choose`` is the model's own choice."""
        routes = self._routes()
        values, chosen = choose(scores, topk, num_groups, group_topk)
        if routes is not None:
            natural, known = chosen, routes >= 0
            chosen = torch.where(known, routes.long(), natural)
            values = scores.gather(1, chosen)
            if torch.is_grad_enabled():
                self._count(known[:, 0], natural, chosen)
        if self.listener is not None and not torch.is_grad_enabled():
            self.listener(chosen)
        return values, chosen

    def _routes(self) -> Tensor | None:
        if self.in_pass:
            if self.keeps and not torch.is_grad_enabled():
                self.kept.append(self.given)
            return self.given
        if not self.kept:
            raise RuntimeError(f"layer {self.layer}: its router runs outside of a pass, and no routes were kept")
        return self.kept.popleft()

    def _count(self, known: Tensor, natural: Tensor, chosen: Tensor) -> None:
        """Compare sets of experts: both hold K different ones."""
        same = (natural[:, :, None] == chosen[:, None, :]).any(-1).all(-1)
        found = torch.stack([known.sum(), (known & ~same).sum()]).double()
        self.mismatch = found if self.mismatch is None else self.mismatch + found


def replay_routes(chunk: nn.Module, routers: Sequence[TopKRouter]) -> None:
    """Let the expert layers of a model chunk take routes. Its passes then have the argument ``routes``
    (``PackedInputs.routes``); left out, the model routes."""
    replays = [RoutingReplay(router.layer_number - 1) for router in routers]
    for router, replay in zip(routers, replays, strict=True):
        router.router_replay = replay

    def begin(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes = keywords.pop("routes", None)
        for router, replay in zip(routers, replays, strict=True):
            replay.in_pass, replay.keeps = True, router.training
            replay.given = None if routes is None else routes[replay.layer]
        return arguments, keywords

    def end(*_: Any) -> None:
        for replay in replays:
            replay.in_pass, replay.given = False, None

    chunk.register_forward_pre_hook(begin, with_kwargs=True)
    chunk.register_forward_hook(end, always_call=True)


def forget_routes(routers: Sequence[TopKRouter]) -> None:
    """Drop what was kept for passes that will not be recomputed, as after an error."""
    for router in routers:
        if isinstance(replay := router.router_replay, RoutingReplay):
            replay.kept.clear()
