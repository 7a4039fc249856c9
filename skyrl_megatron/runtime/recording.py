"""A recorder of expert routes and layer outputs of forward passes.

A rank has some layers (pp), a part of the sequence (tp) and a part of each row (cp). A :class:`Recorder` gathers the
tokens on all tp and cp ranks. It does not gather the layers of other pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from skyrl_megatron.data.batch import recorded_name
from skyrl_megatron.runtime.forward_step import LogprobHead, LogprobStep, MicroBatch
from skyrl_megatron.runtime.model.moe import routers_of
from skyrl_megatron.runtime.model.pass_inputs import RoutingReplay


class Recorder:
    """A context manager that records values of the forward pass by name. Layers count from 0.

    ``routes.<layer>``: experts [n, K] of every layer that can replay routes. With ``layers`` also, [n, H] each:
    ``embedding`` (input of the first layer), ``<layer>.attention``, ``<layer>.mlp`` and ``<layer>.output`` (outputs of
    attention, MLP and layer), and ``norm`` (output of the last norm).
    """

    def __init__(self, chunks: Sequence[nn.Module], *, layers: bool = False) -> None:
        self.chunks, self.layers = chunks, layers
        self.found: dict[str, dict[int, np.ndarray]] = {}
        """Name → row of the batch → values of its tokens, int32 or float32."""
        self._seen: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        for replay in self._replays():
            replay.listener = partial(self._see, recorded_name(replay.layer))
        for chunk in self.chunks if self.layers else ():
            self._watch(chunk)
        return self

    def __exit__(self, *_: object) -> None:
        for replay in self._replays():
            replay.listener = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def step(self, head: LogprobHead, rows: np.ndarray) -> RecordingStep:
        """Return a step over some ``rows`` of the batch, [b] int64, that feeds this recorder."""
        return RecordingStep(head, self, rows)

    def keep(self, micro_batch: MicroBatch, rows: np.ndarray) -> None:
        """Store the values of a micro-batch in ``found``. ``rows``, [b] int64: row of the micro-batch → row
        of the batch."""
        width, lengths = micro_batch.packed.tokens.shape[0], micro_batch.batch.lengths
        # Once per micro-batch and not in the hooks: gathering there would interleave with the model's collectives.
        for name, seen in self._seen.items():
            whole = micro_batch.packed.to_rows(seen.reshape(-1, width, seen.shape[-1]))
            for row, tokens, length in zip(micro_batch.rows, whole, lengths, strict=False):
                self.found.setdefault(name, {})[int(rows[row])] = tokens[:length].cpu().numpy()
        self._seen.clear()

    def _replays(self) -> list[RoutingReplay]:
        routers = routers_of(self.chunks)
        return [router.router_replay for router in routers if isinstance(router.router_replay, RoutingReplay)]

    def _watch(self, chunk: Any) -> None:
        """Register hooks on the layers of a model chunk (megatron/core/transformer/transformer_layer.py)."""
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number == 0:
                self._hooks.append(layer.register_forward_pre_hook(self._see_input, with_kwargs=True))
            for part, module in (("attention", layer.self_attention), ("mlp", layer.mlp), ("output", layer)):
                hook = partial(self._see_output, f"{number}.{part}")
                self._hooks.append(module.register_forward_hook(hook))
        # The last norm is outside of the layers, and only on the last stage.
        if chunk.post_process and chunk.decoder.final_layernorm is not None:
            hook = partial(self._see_output, "norm")
            self._hooks.append(chunk.decoder.final_layernorm.register_forward_hook(hook))

    def _see_input(self, _: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        self._see("embedding", keywords["hidden_states"] if "hidden_states" in keywords else arguments[0])

    def _see_output(self, name: str, _: nn.Module, arguments: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)  # Megatron returns (output, bias not yet added)
        value = sum(part.detach().float() for part in parts if isinstance(part, Tensor))
        assert isinstance(value, Tensor)
        self._see(name, value)

    def _see(self, name: str, value: Tensor) -> None:
        self._seen[name] = (
            value.detach().float().clone() if value.is_floating_point() else value.int()
        )  # no backend gathers int16


class RecordingStep(LogprobStep):
    """A :class:`LogprobStep` that feeds a recorder. ``rows``: rows of the recorder's batch in this step."""

    def __init__(self, head: LogprobHead, recorder: Recorder, rows: np.ndarray) -> None:
        super().__init__(head)
        self.recorder, self.rows = recorder, rows

    def passed(self, micro_batch: MicroBatch) -> None:
        self.recorder.keep(micro_batch, self.rows)
