"""Profiler traces and memory snapshots of steps, and a recorder of expert routes and layer outputs.

A rank has some layers (pp), a part of the sequence (tp) and a part of each row (cp). A :class:`Recorder` gathers the
tokens on all tp and cp ranks. It does not gather the layers of other pipeline stages.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from skyrl_megatron import device
from skyrl_megatron.data.batch import recorded_name
from skyrl_megatron.errors import SkyRLMegatronWarning
from skyrl_megatron.runtime.forward_step import LogprobHead, LogprobStep, MicroBatch
from skyrl_megatron.runtime.model.moe import routers_of
from skyrl_megatron.runtime.model.routing_replay import RoutingReplay

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronTorchProfilerConfig


@contextlib.contextmanager
def profiled(settings: MegatronTorchProfilerConfig, log_folder: Path, name: str, rank: int) -> Iterator[None]:
    """Profile the enclosed code and write ``<name>_rank<rank>.json.gz``, which chrome://tracing and Perfetto open.

    Empty ``settings.ranks`` means all ranks. Without ``settings.save_path`` traces go to ``log_folder/profile``.
    """
    if not settings.enable or (settings.ranks and rank not in settings.ranks):
        yield
        return
    folder = Path(settings.save_path or log_folder / "profile")
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.has_cuda():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profile:
        yield
    profile.export_chrome_trace(str(folder / f"{name}_rank{rank}.json.gz"))


class MemoryRecorder:
    """Records the history of the CUDA allocator; snapshots are for https://docs.pytorch.org/memory_viz."""

    def __init__(self, enabled: bool, folder: Path) -> None:
        self.folder = folder
        self.enabled = enabled and device.has_cuda()
        if enabled and not self.enabled:
            warnings.warn(
                "trainer.policy.record_memory=true has no effect without CUDA: there is no device allocator to record",
                SkyRLMegatronWarning,
                stacklevel=2,
            )
        if self.enabled:
            torch.cuda.memory._record_memory_history(max_entries=200_000)

    def snapshot(self, name: str, rank: int) -> None:
        """Write ``<folder>/<name>_rank<rank>.pickle``."""
        if self.enabled:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}_rank{rank}.pickle"))


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

    def keep(self, micro_batch: MicroBatch, rows: np.ndarray) -> None:
        """Store the values of a micro-batch in ``found``. ``rows``: row of the micro-batch → row of the batch."""
        width, lengths = micro_batch.packed.tokens.shape[0], micro_batch.batch.lengths
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
