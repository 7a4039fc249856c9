"""Where a sync by routes puts weights in a vLLM 0.32 model, and how they become what its kernels compute with.

A module's parameters are made anew and packed by vLLM, as after any load, when the last copy is made. The experts of
vLLM's CPU kernel are packed one by one instead, each out of memory that the next one uses, straight into the tensors
that the kernel has: all of a module's at once cost three more passes over it, and its size twice. What packing leaves
is read back in the order of the weight, and compared with what was packed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.routes import Route

ROWS = 16
"""Of a weight, those that its packing lays side by side."""


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """What packs each expert of a module by itself: ``CPUUnquantizedExperts.process_weights_after_loading``, whose
    kernel (``prepack_moe_weight``) goes expert by expert and writes where it is told to."""

    path: str
    """Of the module, for messages."""
    packed: dict[str, Tensor]
    """Parameters as the kernel has them, [experts, …]."""
    isa: str
    word: type[np.integer[Any]]
    """What packing moves as a whole, see :func:`unpacked`."""

    @classmethod
    def of(cls, layer: torch.nn.Module, path: str) -> ExpertPacking | None:
        """Return a module's; None where nothing says that its experts can be packed alone, or how packing is undone.
        The module is between ``initialize_layerwise_reload`` and ``finalize_layerwise_reload``."""
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
        word = word_of(packed["w2_weight"].dtype, experts.isa)
        return None if word is None else cls(path, packed, experts.isa, word)

    def pack(self, name: str, part: int, expert: Tensor) -> None:
        """Pack one expert of a parameter. ``expert``: its elements, [n]. Raises WeightSyncError unless the kernel's
        memory is then that expert's, packed."""
        into = self.packed[name][part : part + 1]
        prepack(expert.view(into.shape), into, self.isa)
        if not np.array_equal(unpacked(into[0], self.word), _in_words(expert.view(into.shape[1:]), self.word)):
            raise WeightSyncError(
                f"{self.path}.{name}[{part}] is not in its place in the memory of vLLM's kernel after it was packed"
            )


def prepack(expert: Tensor, into: Tensor, isa: str) -> None:
    """Pack ``expert`` [1, rows, columns] for the kernel that computes with ``isa``."""
    torch.ops._C.prepack_moe_weight(expert, into, isa)


def unpacked(packed: Tensor, word: type[np.integer[Any]]) -> NDArray[Any]:
    """View a packed weight [rows, columns] in the order that it had before, [rows / 16, 16, columns in words].

    ``prepack_moe_weight`` lays 16 rows side by side, a word of each in turn: an element, or two bfloat16 for AMX.
    """
    words = packed.view(torch.uint8).numpy().view(word)
    rows, columns = words.shape
    return words.reshape(rows // ROWS, columns, ROWS).transpose(0, 2, 1)


def _in_words(weight: Tensor, word: type[np.integer[Any]]) -> NDArray[Any]:
    words = weight.view(torch.uint8).numpy().view(word)
    return words.reshape(-1, ROWS, words.shape[1])


@cache
def word_of(dtype: torch.dtype, isa: str) -> type[np.integer[Any]] | None:
    """Find the word that undoes the packing of ``dtype`` for ``isa``, by trying; None: it is another packing."""
    numbers = torch.arange(2 * ROWS * 64, dtype={2: torch.int16, 4: torch.int32}[dtype.itemsize])
    weight = numbers.view(dtype).view(1, 2 * ROWS, 64)
    packed = torch.empty_like(weight)
    prepack(weight, packed, isa)
    for word in (np.int16, np.int32)[dtype.itemsize // 4 :]:
        if np.array_equal(unpacked(packed[0], word), _in_words(weight[0], word)):
            return word
    return None


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
        paths = {layer: path for layer, (path, *_) in zip(self.layers, route.targets, strict=True)}
        self.packing = {layer: ExpertPacking.of(layer, path) for layer, path in paths.items()}
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
            elif self.packing[self.layers[target]] is not None:  # it keeps its memory during a reload
                self.made[target] = getattr(self.layers[target], self.route.targets[target][1]).data
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
        if packing is not None:
            if part >= 0:
                packing.pack(name, part, tensor)
                self.free[dtype, size].append(tensor)
            if not self.left[layer]:
                info = get_layerwise_info(layer)
                _place_kernel_tensors(layer, info)
                info.reset()
        elif not self.left[layer]:
            _layerwise_process(layer, get_layerwise_info(layer))
