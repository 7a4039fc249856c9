"""The worker's end of a sync of adapters in vLLM 0.32: received beside the one that serves, checked, then activated.

vLLM takes adapters from folders, and 37,000 tensors of a large one, each by its name. Here its worker's LoRA manager
is given what it would have made of them: one set of stacked factors for each of its modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import FactorName, stacked

type Pair = dict[str, Tensor]
"""``A`` [rank, in] and ``B`` [out, rank] of a projection; those of experts [experts or 1, …]."""


class AdapterExtension:
    """Methods of a worker that hold adapters; ``compat.WorkerExtension`` mixes them in."""

    weight_transfer_engine: Any
    model_runner: Any
    skyrl_staged: dict[str, dict[str, LoRALayerWeights]] | None = None

    def skyrl_stage_adapters(self, senders: list[list[list[Any]]] | None) -> tuple[list[list[int]], list[str]]:
        """Receive adapters beside those that are held. ``senders``: as in ``vllm_backend.UpdateInfo``.

        Returns the checksums of the buckets, per sender, and the projections that no module here has a place for.
        Raises WeightSyncError for an adapter that the engine was not started for.
        """
        self.skyrl_staged, left = None, []
        try:
            receiver = self.weight_transfer_engine.prepared(senders)
            tensors = dict(receiver.tensors())
            receiver.finish()
        except BaseException:
            self.weight_transfer_engine.shutdown()
            raise
        staged: dict[str, dict[str, LoRALayerWeights]] = {}
        for name, pairs in pairs_of(tensors).items():
            staged[name], unplaced = modules_of(self._manager(), pairs)
            left += unplaced
        self.skyrl_staged = staged
        return receiver.checksums, left

    def skyrl_activate_adapters(self, numbers: dict[str, int]) -> list[int]:
        """Give the adapters received last a slot each, by name, under these numbers; return all that are held. Those
        that requests use stay."""
        staged, self.skyrl_staged = self.skyrl_staged or {}, None
        if missing := [name or "the adapter" for name in numbers if name not in staged]:
            raise WeightSyncError(f"{', '.join(missing)} was not received")
        manager = self._manager()
        if manager.lora_index_to_id.count(None) < len(numbers):
            raise WeightSyncError(f"no slots are free for {numbers}: {manager.lora_index_to_id} are held")
        for name, number in numbers.items():
            adapter = LoRAModel(number, 0, staged[name])
            manager._registered_adapters[number] = adapter
            manager.activate_adapter(number)
            device.mark()()
            adapter.loras.clear()  # its slot has them now, and keeps them until the adapter is dropped
        return self._active()

    def skyrl_keep_adapters(self, numbers: list[int]) -> list[int]:
        """Drop what was received and not activated, and all adapters but ``numbers``; return those that are held."""
        self.skyrl_staged = None
        manager = self._manager()
        for number in list(manager.list_adapters()):
            if number not in numbers:
                manager.remove_adapter(number)
        return self._active()

    def _active(self) -> list[int]:
        return sorted(number for number in self._manager().lora_index_to_id if number is not None)

    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Pair]]:
    """Sort tensors by adapter and by the projections that they serve."""
    adapters: dict[str, dict[str, Pair]] = {}
    for name, tensor in tensors.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            adapters.setdefault(factor.adapter, {}).setdefault(module, {})[factor.letter] = tensor
    return adapters


@torch.no_grad()
def modules_of(manager: Any, pairs: Mapping[str, Pair]) -> tuple[dict[str, LoRALayerWeights], list[str]]:
    """Return the factors for each of vLLM's modules, and the projections that belong to none of them.

    Raises WeightSyncError for a projection with one factor, and for a rank that the engine has no room for.
    """
    renamed = _renaming(manager.model)
    left = {renamed(module): (module, pair) for module, pair in pairs.items()}
    most = manager.lora_config.max_lora_rank
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise WeightSyncError(f"{module} has a lora_{next(iter(pair))} alone")
        if (rank := pair["A"].shape[-2]) > most or rank != pair["B"].shape[-1]:
            raise WeightSyncError(
                f"factors of {module} are {list(pair['A'].shape)} and {list(pair['B'].shape)}, the engine was started "
                f"for a rank of at most {most}"
            )
    modules: dict[str, LoRALayerWeights] = {}
    for name, wrapper in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        experts = isinstance(wrapper, FusedMoEWithLoRA)
        if experts:  # gate, down and up of expert 0, then of expert 1, …
            parts = [stacked(part) for part in parts[:3]]
        found: list[Pair | None] = [left.pop(part)[1] if part in left else None for part in parts]
        if not any(found):
            continue
        if experts:
            found = _of_local_experts(wrapper, found)
        a, b = ([None if pair is None else pair[letter] for pair in found] for letter in "AB")
        if experts or name in manager.packed_modules:
            modules[name] = PackedLoRALayerWeights(name, 0, [None] * len(a), a, b, scaling=[1.0] * len(a))
        else:
            modules[name] = LoRALayerWeights(name, 0, 0, a[0], b[0], scaling=1.0)
    return modules, [module for module, _ in left.values()]


def _of_local_experts(wrapper: Any, found: Sequence[Pair | None]) -> list[Pair | None]:
    """Return the pairs of this rank's experts, [local experts, …]; zeros for a projection that has none."""
    count = wrapper.local_num_experts
    first = wrapper.ep_rank * count if wrapper.use_ep else 0
    some = next(pair["A"] for pair in found if pair is not None)
    width, inner = wrapper.hidden_size, wrapper.intermediate_size_per_partition * wrapper.tp_size

    def local(factor: Tensor) -> Tensor:
        return factor.expand(count, -1, -1) if len(factor) == 1 else factor[first : first + count]

    def nothing(rows: int, columns: int) -> Pair:
        rank = some.shape[-2]
        return {"A": some.new_zeros(count, rank, columns), "B": some.new_zeros(count, rows, rank)}

    missing = [nothing(inner, width), nothing(width, inner), nothing(inner, width)]
    return [
        zeros if pair is None else {letter: local(factor) for letter, factor in pair.items()}
        for pair, zeros in zip(found, missing, strict=True)
    ]


def _renaming(model: Any) -> Any:
    """Return vLLM's name of a module of the checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return (lambda module: module) if mapper is None else mapper.get_rename_mapper()._map_name
