"""Where a sync by routes puts weights in a vLLM 0.32 model, and how they become what its kernels compute with.

A module's parameters are made anew and packed by vLLM, as after any load, when the last copy is made. The experts of
vLLM's CPU kernel are packed one by one instead, each out of memory that the next one uses, straight into the tensors
that the kernel has: all of a module's at once cost three more passes over it, and its size twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from skyrl_megatron.weight_sync.routes import Route


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """What packs each expert of a module by itself: ``CPUUnquantizedExperts.process_weights_after_loading``, whose
    kernel (``prepack_moe_weight``) goes expert by expert and writes where it is told to."""

    packed: dict[str, Tensor]
    """Parameters as the kernel has them, [experts, …]."""
    isa: str

    @classmethod
    def of(cls, layer: torch.nn.Module) -> ExpertPacking | None:
        """Return a module's; None where nothing says that its experts can be packed alone. The module is between
        ``initialize_layerwise_reload`` and ``finalize_layerwise_reload``."""
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        kept = get_layerwise_info(layer).kernel_tensors
        if type(experts) is not CPUUnquantizedExperts or experts._use_zentorch or kept is None:
            return None
        loaded = {name: tensor for name, tensor in get_layer_tensors(layer).items() if name not in SKIP_TENSORS}
        packed = {name: kept[0][name].data for name in loaded if name in kept[0]}
        if set(packed) != {"w13_weight", "w2_weight"} or set(loaded) != set(packed):
            return None
        if any(
            packed[name].shape != tensor.shape or packed[name].dtype != tensor.dtype for name, tensor in loaded.items()
        ):
            return None  # it is padded for the kernel
        return cls(packed, experts.isa)

    def pack(self, name: str, part: int, expert: Tensor) -> None:
        """Pack one expert of a parameter. ``expert``: its elements, [n]."""
        into = self.packed[name][part : part + 1]
        torch.ops._C.prepack_moe_weight(expert.view(into.shape), into, self.isa)


class ModelTargets:
    """The parameters that ``route`` fills, of a model between ``initialize_layerwise_reload`` and
    ``finalize_layerwise_reload`` (``parcel_receiver.Targets``)."""

    def __init__(self, model: torch.nn.Module, route: Route) -> None:
        self.route = route
        self.layers = [model.get_submodule(path) for path, *_ in route.targets]
        self.own: defaultdict[torch.nn.Module, list[int]] = defaultdict(list)
        for number, layer in enumerate(self.layers):
            self.own[layer].append(number)
        self.left = {layer: len(own) for layer, own in self.own.items()}
        covered = route.covered().tolist()
        self.padded = {n for n, target in enumerate(route.targets) if covered[n] < target[3]}
        """Targets that are not filled everywhere."""
        self.packing = {layer: ExpertPacking.of(layer) for layer in self.left}
        self.made: dict[int, Tensor] = {}
        """Memory of targets that something was asked for and not all is there."""
        self.free: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        """Memory of experts that were packed, by dtype and elements."""

    @torch.no_grad()
    def memory(self, target: int) -> Tensor:
        if target not in self.made:
            *_, dtype, size, part = self.route.targets[target]
            if part >= 0:
                free = self.free[dtype, size]
                tensor = free.pop() if free else torch.empty(size, dtype=getattr(torch, dtype))
                self.made[target] = tensor.zero_() if target in self.padded else tensor
            else:
                self._make(self.layers[target])
        return self.made[target]

    def _make(self, layer: torch.nn.Module) -> None:
        """Make all of a module's parameters."""
        own = {n: self.route.targets[n][1] for n in self.own[layer]}
        empty = [name for n, name in own.items() if n in self.padded and getattr(layer, name).is_meta]
        materialize_layer(layer, get_layerwise_info(layer))
        self.made |= {n: getattr(layer, name).data for n, name in own.items()}
        for name in empty:
            getattr(layer, name).data.zero_()

    @torch.no_grad()
    def complete(self, target: int) -> None:
        layer, (_, name, dtype, size, part) = self.layers[target], self.route.targets[target]
        tensor, packing = self.made.pop(target), self.packing[layer]
        self.left[layer] -= 1
        if packing is not None and part >= 0:
            packing.pack(name, part, tensor)
            self.free[dtype, size].append(tensor)
            if not self.left[layer]:
                info = get_layerwise_info(layer)
                _place_kernel_tensors(layer, info)
                info.reset()
        elif not self.left[layer]:
            _layerwise_process(layer, get_layerwise_info(layer))
