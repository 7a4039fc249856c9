"""What the modules of vLLM 0.32 take of adapters: one set of stacked factors each, made of tensors of any number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import FactorName, stacked

type Pair = dict[str, Tensor]
"""``A`` [rank, in] and ``B`` [out, rank] of a projection; those of experts [experts or 1, …]."""
type Modules = dict[str, LoRALayerWeights]
"""The factors of each of vLLM's modules, by its name."""


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Pair]]:
    """Sort tensors by adapter and by the projections that they serve."""
    adapters: dict[str, dict[str, Pair]] = {}
    for name, tensor in tensors.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            adapters.setdefault(factor.adapter, {}).setdefault(module, {})[factor.letter] = tensor
    return adapters


@torch.no_grad()
def fill_slot(modules: Mapping[str, Any], slot: int, factors: Modules) -> None:
    """Let each module copy its factors to its memory of a slot; one that has none gets zeros."""
    for name, module in modules.items():
        if name in factors:
            module.set_lora(slot, factors[name].lora_a, factors[name].lora_b)
        else:
            module.reset_lora(slot)


@torch.no_grad()
def modules_of(manager: Any, pairs: Mapping[str, Pair]) -> tuple[Modules, list[str]]:
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
    modules: Modules = {}
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
