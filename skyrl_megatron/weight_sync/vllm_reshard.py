"""The receiving side of the reshard plan in vLLM 0.32: target maps are recorded from loaders, then filled.

:func:`record_targets` runs the model's ``load_weights`` once on parameters without memory. vLLM's recorder for tensors
that are fetched by slice (vllm/distributed/weight_transfer/sharded_rdt_fake.py) replaces the weights. The recording
fails if a loader does anything other than copy slices, or copies outside of a parameter's loader.

:class:`ModelTargets` allocates a module's parameters again, and vLLM packs them after the last copy, as after any
load. The experts of vLLM's CPU kernel are packed one by one instead, from memory that the next expert reuses, straight
into the kernel's tensors. Packing a whole module at once takes three more passes over it and twice its memory. Packed
experts are read back in the order of the weight and compared with the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.slices import (
    ReshardUnsupported,
    StridedCopy,
    TargetMap,
    TargetTensor,
    merge_copies,
    split_by_part,
    strided_copies,
    width_of,
)
from skyrl_megatron.weight_sync.tensors import dtype_name

ROWS = 16
"""Rows of a weight that packing interleaves."""


@dataclass(frozen=True, slots=True)
class ExpertPacking:
    """Packs the experts of a module one by one, as ``CPUUnquantizedExperts.process_weights_after_loading`` does with
    ``prepack_moe_weight``."""

    path: str
    """Name of the module, for messages."""
    packed: dict[str, Tensor]
    """The kernel's tensors, [experts, …]."""
    isa: str
    word: type[np.integer[Any]]
    """The unit that packing moves, see :func:`unpacked`."""

    @classmethod
    def of(cls, layer: torch.nn.Module, path: str) -> ExpertPacking | None:
        """Return the packing of a module between ``initialize_layerwise_reload`` and ``finalize_layerwise_reload``;
        None if its experts cannot be packed alone, or the packing cannot be reversed."""
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        kept = get_layerwise_info(layer).kernel_tensors
        # not isinstance: a subclass, or the zentorch kernel, packs in another way
        if type(experts) is not CPUUnquantizedExperts or experts._use_zentorch or kept is None:
            return None
        loaded = {name: tensor for name, tensor in get_layer_tensors(layer).items() if name not in SKIP_TENSORS}
        packed = {name: kept[0][name].data for name in loaded if name in kept[0]}
        if set(packed) != {"w13_weight", "w2_weight"} or set(loaded) != set(packed):
            return None
        if any(
            packed[name].shape != tensor.shape or packed[name].dtype != tensor.dtype for name, tensor in loaded.items()
        ):
            return None  # padded for the kernel
        word = word_of(packed["w2_weight"].dtype, experts.isa)
        return None if word is None else cls(path, packed, experts.isa, word)

    def pack(self, name: str, part: int, expert: Tensor) -> None:
        """Pack one expert of a parameter. ``expert``: its elements, [n]. Raises WeightSyncError if the kernel's memory
        does not hold that expert afterwards."""
        into = self.packed[name][part : part + 1]
        prepack(expert.view(into.shape), into, self.isa)
        if not np.array_equal(unpacked(into[0], self.word), _in_words(expert.view(into.shape[1:]), self.word)):
            raise WeightSyncError(
                f"{self.path}.{name}[{part}] is wrong in the memory of vLLM's kernel after it was packed: set "
                "generator.inference_engine.weight_sync_routes=false if it happens again"
            )


def prepack(expert: Tensor, into: Tensor, isa: str) -> None:
    """Pack ``expert`` [1, rows, columns] for the kernel of ``isa``."""
    torch.ops._C.prepack_moe_weight(expert, into, isa)


def unpacked(packed: Tensor, word: type[np.integer[Any]]) -> NDArray[Any]:
    """View a packed weight [rows, columns] in its original order, [rows / 16, 16, columns in words].

    ``prepack_moe_weight`` interleaves 16 rows word by word. A word is one element, or two bfloat16 for AMX.
    """
    words = packed.view(torch.uint8).numpy().view(word)
    rows, columns = words.shape
    return words.reshape(rows // ROWS, columns, ROWS).transpose(0, 2, 1)


def _in_words(weight: Tensor, word: type[np.integer[Any]]) -> NDArray[Any]:
    words = weight.view(torch.uint8).numpy().view(word)
    return words.reshape(-1, ROWS, words.shape[1])


@cache
def word_of(dtype: torch.dtype, isa: str) -> type[np.integer[Any]] | None:
    """Find by trial the word size that reverses the packing of ``dtype`` for ``isa``; None for another packing."""
    numbers = torch.arange(2 * ROWS * 64, dtype={2: torch.int16, 4: torch.int32}[dtype.itemsize])
    weight = numbers.view(dtype).view(1, 2 * ROWS, 64)
    packed = torch.empty_like(weight)
    prepack(weight, packed, isa)
    # a word is at least one element: 4-byte dtypes have int32 alone
    for word in (np.int16, np.int32)[dtype.itemsize // 4 :]:
        if np.array_equal(unpacked(packed[0], word), _in_words(weight[0], word)):
            return word
    return None


class ModelTargets:
    """The parameters that ``target_map`` fills, of a model between ``initialize_layerwise_reload`` and
    ``finalize_layerwise_reload`` (``point_to_point.Targets``)."""

    def __init__(self, model: torch.nn.Module, target_map: TargetMap) -> None:
        self.target_map = target_map
        self.layers = [model.get_submodule(path) for path, *_ in target_map.targets]
        self.own: defaultdict[torch.nn.Module, list[int]] = defaultdict(list)
        for number, layer in enumerate(self.layers):
            self.own[layer].append(number)
        self.left = {layer: len(numbers) for layer, numbers in self.own.items()}
        covered = target_map.covered().tolist()
        self.padded = {n for n, target in enumerate(target_map.targets) if covered[n] < target[3]}
        """Targets with elements that no copy fills."""
        paths = {layer: path for layer, (path, *_) in zip(self.layers, target_map.targets, strict=True)}
        self.packing = {layer: ExpertPacking.of(layer, path) for layer, path in paths.items()}
        self.made: dict[int, Tensor] = {}
        """Memory of targets that are requested and not yet complete."""
        self.free: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        """Memory of packed experts for reuse, by dtype and number of elements."""

    @torch.no_grad()
    def memory(self, target: int) -> Tensor:
        """Return the memory that a target is received into, [elements] in the parameter's dtype."""
        if target not in self.made:
            *_, dtype, size, part = self.target_map.targets[target]
            if part >= 0:
                free = self.free[dtype, size]
                tensor = free.pop() if free else torch.empty(size, dtype=getattr(torch, dtype))
                # reused memory holds another expert's elements where this one has padding
                self.made[target] = tensor.zero_() if target in self.padded else tensor
            elif self.packing[self.layers[target]] is not None:  # keeps its memory during a reload
                self.made[target] = getattr(self.layers[target], self.target_map.targets[target][1]).data
            else:
                self._make(self.layers[target])
        return self.made[target]

    def _make(self, layer: torch.nn.Module) -> None:
        """Allocate all parameters of a module."""
        names = {n: self.target_map.targets[n][1] for n in self.own[layer]}
        # before the parameters have memory: those that keep theirs during a reload also keep their padding
        empty = [name for n, name in names.items() if n in self.padded and getattr(layer, name).is_meta]
        materialize_layer(layer, get_layerwise_info(layer))
        self.made |= {n: getattr(layer, name).data for n, name in names.items()}
        for name in empty:
            getattr(layer, name).data.zero_()

    @torch.no_grad()
    def complete(self, target: int) -> None:
        layer, (_, name, dtype, size, part) = self.layers[target], self.target_map.targets[target]
        tensor, packing = self.made.pop(target), self.packing[layer]
        self.left[layer] -= 1
        if packing is not None:
            if part >= 0:
                packing.pack(name, part, tensor)
                self.free[dtype, size].append(tensor)
            if not self.left[layer]:
                info = get_layerwise_info(layer)
                # what _layerwise_process does for a module that is packed already
                _place_kernel_tensors(layer, info)
                info.reset()
        elif not self.left[layer]:
            _layerwise_process(layer, get_layerwise_info(layer))


class _Sink(BakeSink):
    """Collects the copies of one recording."""

    copying = False
    unnamed: str = ""
    """A tensor that was copied outside of any parameter's loader."""

    def accept_copy(self, dest: Tensor, src: FakeRDTTensor) -> Tensor:
        if self.current is None:
            self.unnamed = self.unnamed or src._name
        self.copying = True
        try:
            copied: Tensor = super().accept_copy(dest, src)
            return copied
        finally:
            self.copying = False


class _WriteWatcher(TorchDispatchMode):
    """Watches what loaders write in addition to the recorded copies. Zeros are allowed, because elements that no copy
    fills are zero; the first other write is noted in ``other``."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sink, self.other = sink, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not self.sink.copying:
            zeros = func is torch.ops.aten.zero_.default or (
                func is torch.ops.aten.fill_.Scalar and args[1] == 0 and args[0].is_meta
            )
            if not zeros:
                layer, name = self.sink.current or (None, "")
                self.other = self.other or f"{func} on {name or 'a tensor'} of {type(layer).__name__}"
        return func(*args, **(kwargs or {}))


def record_targets(model: torch.nn.Module, tensors: Sequence[TensorMeta], device: torch.device) -> TargetMap:
    """Record which slices of ``tensors`` (whole tensors, in load order) the loaders of ``model`` copy where.

    The model is unchanged. Raises ReshardUnsupported, which says why the recording failed.
    """
    sink = _Sink()
    watch = _WriteWatcher(sink)
    recorder: Any = ShardedRDTWeightTransferEngine
    loaded: Any = model
    fakes = [
        (meta.name, FakeRDTTensor(meta.name, torch.Size(meta.shape), meta.torch_dtype, device, sink=sink))
        for meta in tensors
    ]
    with torch.device(device), torch.no_grad():
        initialize_layerwise_reload(model)
        # vLLM's methods use no state of their engine, so there is none to make
        recorder._install_recording_stamps(None, model, sink)
        try:
            with watch:
                loaded.load_weights(iter(fakes))
            return _target_map(model, sink, watch, {meta.name: meta for meta in tensors})
        except NotImplementedError as error:
            # vLLM's recorder raises it for every operation that is no slice
            raise ReshardUnsupported(str(error).splitlines()[0]) from error
        finally:
            recorder._restore_after_dry_run(None, model)


def _target_map(
    model: torch.nn.Module, sink: _Sink, watch: _WriteWatcher, tensors: dict[str, TensorMeta]
) -> TargetMap:
    if sink.unnamed:
        raise ReshardUnsupported(f"{sink.unnamed} is copied outside of any parameter's loader")
    if watch.other:
        raise ReshardUnsupported(f"a loader does more than copy: {watch.other}")
    paths = {module: path for path, module in model.named_modules()}
    numbers = {name: number for number, name in enumerate(tensors)}
    targets: list[TargetTensor] = []
    copies_of: dict[tuple[int, int], list[StridedCopy]] = {}  # by (tensor, target)
    for layer, copies in sink.copies_by_layer.items():
        path = paths[layer]
        if is_deferred_attention_layer(layer):
            raise ReshardUnsupported(f"{path} is an attention layer that vLLM processes after the load")
        packing = ExpertPacking.of(layer, path)
        target_of: dict[tuple[str, int], int] = {}
        for copy in copies:
            name, meta, parameter = copy.param_name, tensors[copy.src[0]], getattr(layer, copy.param_name)
            if name in layer._non_persistent_buffers_set:
                raise ReshardUnsupported(f"{path}.{name} is a non-persistent buffer")
            one_by_one = packing is not None and name in packing.packed  # not the router's bias, which it also has
            size = parameter.numel() // (len(parameter) if one_by_one else 1)
            for strided in _strided_copies_of(copy, meta):
                for part, inside in split_by_part(strided, size) if one_by_one else [(-1, strided)]:
                    if (name, part) not in target_of:
                        target_of[name, part] = len(targets)
                        targets.append((path, name, dtype_name(parameter), size, part))
                    copies_of.setdefault((numbers[meta.name], target_of[name, part]), []).append(inside)
        # the kernel would continue with an expert of the previous version
        if packing and sum(part >= 0 for _, part in target_of) != sum(map(len, packing.packed.values())):
            raise ReshardUnsupported(f"no tensor is loaded into some experts of {path}")
    rows = [
        (*pair, *strided)
        for pair, several in copies_of.items()
        for strided in merge_copies(sorted(several, key=lambda part: (part.column, part.row)))
    ]
    return TargetMap.of(targets, rows)


def _strided_copies_of(copy: Any, meta: TensorMeta) -> list[StridedCopy]:
    """Return a recorded copy as strided copies of its source tensor."""
    source = torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta")
    part = source
    try:
        for operation, arguments, keywords in copy.src[1]:
            if operation != "contiguous":  # the same elements
                part = getattr(part, operation)(*arguments, **dict(keywords))
        part = part.broadcast_to(copy.shape)
    except RuntimeError as error:
        raise ReshardUnsupported(f"{meta.name}: {str(error).splitlines()[0]}") from error
    if part.untyped_storage()._cdata != source.untyped_storage()._cdata or part.dtype != source.dtype:
        raise ReshardUnsupported(f"{meta.name} is changed before it is copied: {copy.src[1]}")
    try:
        return strided_copies(
            copy.shape, (part.stride(), int(part.storage_offset())), (copy.stride, copy.offset), width_of(meta.shape)
        )
    except ValueError as error:
        raise ReshardUnsupported(f"{meta.name}: {error}") from error
