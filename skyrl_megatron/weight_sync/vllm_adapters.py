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
from skyrl_megatron.weight_sync.metadata import metadata_of

type Pair = dict[str, Tensor]
"""``A`` [rank, in] and ``B`` [out, rank] of a projection; those of experts [experts or 1, …]."""


class AdapterExtension:
    """Methods of a worker that hold adapters; ``compat.WorkerExtension`` mixes them in."""

    weight_transfer_engine: Any
    model_runner: Any
    skyrl_staged: dict[str, LoRALayerWeights] | None = None

    def skyrl_stage_adapter(self, senders: list[list[list[Any]]] | None) -> tuple[list[list[int]], list[str]]:
        """Receive an adapter beside those that are held. ``senders``: as in ``vllm_backend.UpdateInfo``.

        Returns the checksums of the buckets, per sender, and the projections that no module here has a place for.
        Raises WeightSyncError for an adapter that the engine was not started for.
        """
        transfer = self.weight_transfer_engine
        if transfer.receiver is None:
            raise RuntimeError("no trainer is connected")
        if senders is not None:
            transfer.receiver.set_metadata([[metadata_of(*item) for item in sender] for sender in senders])
        self.skyrl_staged = None
        try:
            tensors = dict(transfer.receiver.tensors())
            transfer.receiver.finish()
        except BaseException:
            transfer.shutdown()
            raise
        self.skyrl_staged, left = modules_of(self._manager(), pairs_of(tensors))
        return transfer.receiver.checksums, left

    def skyrl_activate_adapter(self, number: int) -> None:
        """Give the adapter received last a slot, as adapter ``number``. Those that requests use stay."""
        staged, self.skyrl_staged = self.skyrl_staged, None
        if staged is None:
            raise WeightSyncError("no adapter was received")
        manager = self._manager()
        if None not in manager.lora_index_to_id:
            raise WeightSyncError(f"no slot is free for adapter {number}: {manager.lora_index_to_id} are held")
        adapter = LoRAModel(number, 0, staged)
        manager._registered_adapters[number] = adapter
        manager.activate_adapter(number)
        device.mark()()
        adapter.loras.clear()  # its slot has them now, and keeps them until the adapter is dropped

    def skyrl_keep_adapters(self, numbers: list[int]) -> list[int]:
        """Drop what was received and not activated, and all adapters but ``numbers``; return those that are held."""
        self.skyrl_staged = None
        manager = self._manager()
        for number in list(manager.list_adapters()):
            if number not in numbers:
                manager.remove_adapter(number)
        return sorted(number for number in manager.lora_index_to_id if number is not None)

    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Sort tensors by the projections that they serve."""
    pairs: dict[str, Pair] = {}
    for name, tensor in tensors.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            pairs.setdefault(module, {})[factor.letter] = tensor
    return pairs


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
