"""What routers read of a micro-batch besides the hidden states: recorded routes, numbers of sequences.

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
from torch import Tensor, nn


class SequenceNumbers(NamedTuple):
    """Which sequence of its micro-batch each token of a rank is in."""

    numbers: Tensor
    """[t] int64, in the order in which routers of this rank see tokens."""
    sequences: int
    """Sequences of the micro-batch, on all ranks."""


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
