"""Worker extension of ``weight_sync.py``: loads weights that the worker already holds in memory."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch

from skyrl_megatron.inference.vllm.compat import WorkerExtension


class LoadOnly(WorkerExtension):
    """The exchange without the exchange."""

    def bench_hold(self, folder: str) -> None:
        """Read a folder into memory, twice: as it is, and with one tensor for all experts of a layer."""
        from safetensors.torch import load_file

        tensors = {k: v.clone() for path in Path(folder).glob("*.safetensors") for k, v in load_file(path).items()}
        self.bench_tensors = {False: tensors, True: experts_fused(tensors)}

    def bench_load(self, fused: bool) -> float:
        """Seconds for start, load and finish."""
        began = time.perf_counter()
        worker: Any = self  # vLLM mixes this class into its worker
        worker.weight_transfer_engine.start_weight_update()
        worker.model_runner.model.load_weights(iter(self.bench_tensors[fused].items()))
        worker.weight_transfer_engine.finish_weight_update()
        return time.perf_counter() - began

    def bench_pack(self) -> float:
        """Seconds of packing alone, of zeros that lie where a sync by the plan puts weights; there was one before."""
        from skyrl_megatron.weight_sync.vllm_reshard import ModelTargets

        worker: Any = self
        transfer = worker.weight_transfer_engine
        transfer.start_weight_update()
        targets = ModelTargets(transfer.model, transfer.target_map)
        seconds = 0.0
        for number in range(len(targets.layers)):
            targets.memory(number).zero_()
            began = time.perf_counter()
            targets.complete(number)
            seconds += time.perf_counter() - began
        began = time.perf_counter()
        transfer.finish_weight_update()
        return seconds + time.perf_counter() - began

    def bench_forget_peak(self) -> None:
        """The peak of memory is from now on, above what is held now."""
        self.bench_before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")

    def bench_peak(self) -> int:
        """Bytes beyond those held before."""
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
        return int(peak - self.bench_before)


def experts_fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``gate_up_proj`` [E, 2·ffn, H] and ``down_proj`` [E, H, ffn] of a layer in place of each expert's tensors."""
    held = dict(tensors)
    experts: dict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
    for name in [name for name in held if ".experts." in name]:
        layer, rest = name.split(".experts.")
        number, kind, _ = rest.split(".")
        experts[f"{layer}.experts"][kind, int(number)] = held.pop(name)
    for layer, found in experts.items():
        count = len(found) // 3
        both = [torch.cat([found["gate_proj", n], found["up_proj", n]]) for n in range(count)]
        held[f"{layer}.gate_up_proj"] = torch.stack(both)
        held[f"{layer}.down_proj"] = torch.stack([found["down_proj", n] for n in range(count)])
    return held
