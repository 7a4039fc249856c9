"""Profiles of a training step: torch profiler traces and snapshots of CUDA memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyrl_megatron import device
from skyrl_megatron.errors import SkyRLMegatronWarning

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronTorchProfilerConfig


@contextlib.contextmanager
def profiled(settings: MegatronTorchProfilerConfig, log_folder: Path, name: str, rank: int) -> Iterator[None]:
    """Record the enclosed work as ``<name>_rank<rank>.json.gz``, which chrome://tracing and Perfetto open.

    Empty ``settings.ranks`` are all ranks; without ``settings.save_path`` traces go to ``log_folder/profile``. Costs
    nothing where no profile is asked for.
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
    """History of the CUDA allocator, written as a snapshot after each step for https://docs.pytorch.org/memory_viz."""

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
