"""Worker extension of ``weight_sync.py``: loads weights that the worker already holds in memory."""

from __future__ import annotations

import time
from pathlib import Path

from skyrl_megatron.weight_sync.vllm_compat import WorkerExtension


class LoadOnly(WorkerExtension):
    """The exchange without the exchange."""

    def bench_hold(self, folder: str) -> None:
        """Read a folder into memory."""
        from safetensors.torch import load_file

        self.bench_tensors = {
            k: v.clone() for path in Path(folder).glob("*.safetensors") for k, v in load_file(path).items()
        }

    def bench_fuse_experts(self) -> None:
        """One tensor for all experts of a layer in place of one for each."""
        import torch

        held, experts = self.bench_tensors, {}
        for name in [name for name in held if ".experts." in name]:
            layer, rest = name.split(".experts.")
            number, kind, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts", {})[kind, int(number)] = held.pop(name)
        for layer, found in experts.items():
            count = len(found) // 3
            both = [torch.cat([found.pop(("gate_proj", n)), found.pop(("up_proj", n))]) for n in range(count)]
            held[f"{layer}.gate_up_proj"] = torch.stack(both)
            held[f"{layer}.down_proj"] = torch.stack([found.pop(("down_proj", n)) for n in range(count)])

    def bench_load(self) -> float:
        """Seconds for start, load and finish."""
        began = time.perf_counter()
        self.weight_transfer_engine.start_weight_update()
        self.model_runner.model.load_weights(iter(self.bench_tensors.items()))
        self.weight_transfer_engine.finish_weight_update()
        return time.perf_counter() - began
