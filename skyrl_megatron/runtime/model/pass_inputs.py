"""What routers read of a micro-batch besides the hidden states: recorded routes, numbers of sequences.

With recorded routes (rollout routing replay, arXiv:2510.11370) routers use the experts that the engine selected during
sampling.

A forward pass of a model chunk gets it as a keyword argument (``PackedInputs.model_arguments``). Recomputation in the
backward pass runs layers, or only their experts, without this call, so a router queues what passes that will be
recomputed got. Megatron's schedules run the backward passes of a chunk in the order of its forward passes, with any
number of micro-batches in flight, so the oldest entry is always the right one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

type TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class SequenceNumbers(NamedTuple):
    """Which sequence of its micro-batch each token of a rank is in."""

    numbers: Tensor
    """[t] int64, in the order in which routers of this rank see tokens."""
    sequences: int
    """Sequences of the micro-batch, on all ranks."""
    of_rows: Tensor | None = None
    """[rows, sequences] float32: 1 for the sequences (segments) that a row is made of. None: a row is a sequence."""


class PassInput[T]:
    """What the current pass gives to one router; None in a pass that did not get it."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """The model's layer, from 0."""
        self.value: T | None = None
        self.in_pass = False
        self.queues = False
        """Whether the pass may be recomputed, so that the value is queued."""
        self.queue: deque[T | None] = deque()

    def take(self) -> T | None:
        """Return the value of the pass that calls the router. Call it once for each of the router's calls."""
        if self.in_pass:
            # without gradients in training: the first run of a block that is recomputed in the backward pass
            if self.queues and not torch.is_grad_enabled():
                self.queue.append(self.value)
            return self.value
        # the backward pass calls layers without the model: only the queue knows their micro-batch
        if not self.queue:
            raise RuntimeError(f"layer {self.layer}: the router runs outside of a pass and nothing is queued for it")
        return self.queue.popleft()


def give_inputs[T](
    chunk: nn.Module, name: str, inputs: Sequence[PassInput[T]], value_of: Callable[[Any, int], T]
) -> None:
    """Let the forward pass of a model chunk take an argument; each input gets ``value_of(argument, layer)``."""

    def begin(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        argument = keywords.pop(name, None)
        for router_input in inputs:
            router_input.in_pass, router_input.queues = True, chunk.training
            router_input.value = None if argument is None else value_of(argument, router_input.layer)
        return arguments, keywords

    def end(*_: Any) -> None:
        for router_input in inputs:
            router_input.in_pass, router_input.value = False, None

    chunk.register_forward_pre_hook(begin, with_kwargs=True)
    chunk.register_forward_hook(end, always_call=True)


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
        self.copies: Tensor | None = None
        """[t] float32: rows that have each token of the current pass; None: one."""
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
        weights = 1.0 if self.copies is None else self.copies.double()
        found = torch.stack([(known * weights).sum(), ((known & ~same) * weights).sum()]).double()
        self.mismatch = found if self.mismatch is None else self.mismatch + found


def replay_routes(chunk: nn.Module, routers: Sequence[TopKRouter]) -> None:
    """Make the expert layers of a model chunk replay routes.

    Its forward pass then takes the argument ``routes`` (``PackedInputs.routes``); without it, the model routes.
    """
    replays = [RoutingReplay(router.layer_number - 1) for router in routers]
    for router, replay in zip(routers, replays, strict=True):
        router.router_replay = replay
    give_inputs(chunk, "routes", replays, lambda routes, layer: routes[layer])
