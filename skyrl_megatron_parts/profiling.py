"""Profiler traces and memory snapshots of steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from skyrl_megatron import device
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.errors import SkyRLMegatronWarning
from skyrl_megatron.runtime.parts import PartSetup, RankPart

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


class Profiler(RankPart):
    """Profiles the schedule and the optimizer of each step on the ranks that ``torch_profiler_config`` names."""

    name = "profiler"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether ``torch_profiler_config.enable`` is set for a role that is trained."""
        return not is_frozen(setup.role) and setup.settings.megatron_config.torch_profiler_config.enable

    def around(self, phase: str, name: str) -> contextlib.AbstractContextManager[None]:
        """Profile the phase and write ``<name>_rank<rank>.json.gz``."""
        settings = self.setup.settings.megatron_config.torch_profiler_config
        return profiled(settings, run_folder(self.setup.cfg), name, dist.get_rank())


class MemorySnapshots(RankPart):
    """Records the history of the CUDA allocator, and writes ``memory_snapshots/<step>_rank<rank>.pickle`` next to the
    checkpoints after each step; https://docs.pytorch.org/memory_viz shows them."""

    name = "memory_snapshots"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether ``record_memory`` is set, which only the policy has."""
        return bool(getattr(setup.settings, "record_memory", False))

    def __init__(self, setup: PartSetup) -> None:
        super().__init__(setup)
        self.folder = Path(setup.cfg.trainer.ckpt_path) / "memory_snapshots"
        self.enabled = device.has_cuda()
        if not self.enabled:
            warnings.warn(
                "trainer.policy.record_memory=true has no effect without CUDA: there is no device allocator to record",
                SkyRLMegatronWarning,
                stacklevel=2,
            )
            return
        torch.cuda.memory._record_memory_history(max_entries=200_000)

    def end_step(self, name: str) -> None:
        """Write the history up to the end of a step."""
        if self.enabled:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}_rank{dist.get_rank()}.pickle"))
