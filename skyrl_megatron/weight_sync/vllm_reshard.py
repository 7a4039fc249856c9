"""The reshard plan's end in vLLM 0.32: which part of which tensor its loaders copy where, recorded without weights.

A module's parameters are made anew and packed by vLLM, as after any load, when the last copy is made. The experts of
vLLM's CPU kernel are packed one by one instead, each out of memory that the next one uses, straight into the tensors
that the kernel has: all of a module's at once cost three more passes over it, and its size twice. What packing leaves
is read back in the order of the weight, and compared with what was packed.

vLLM's own recorder for tensors that are fetched by slice (vllm/distributed/weight_transfer/sharded_rdt_fake.py) stands
in for the weights in one run of the model's ``load_weights`` on parameters without memory. Whatever a loader does that
is no copy of a slice ends the recording, as does a copy that nothing says the parameter of.
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
    FilledTensor,
    Rectangle,
    Route,
    Unroutable,
    in_parts,
    merged,
    rectangles,
    width_of,
)
from skyrl_megatron.weight_sync.tensors import dtype_name

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


class _Sink(BakeSink):
    """Takes the copies of one recording."""

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


class _Watch(TorchDispatchMode):
    """Sees what loaders write besides the recorded copies: zeros, which is what is left of what nothing is copied to,
    or something else."""

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


def record_route(model: torch.nn.Module, tensors: Sequence[TensorMeta], device: torch.device) -> Route:
    """Record what ``model`` loads of ``tensors`` (whole ones, in the order in which they are loaded).

    The model is the same afterwards. Raises Unroutable with what the recording failed at.
    """
    sink = _Sink()
    watch = _Watch(sink)
    recorder: Any = ShardedRDTWeightTransferEngine
    loaded: Any = model
    fakes = [
        (meta.name, FakeRDTTensor(meta.name, torch.Size(meta.shape), meta.torch_dtype, device, sink=sink))
        for meta in tensors
    ]
    with torch.device(device), torch.no_grad():
        initialize_layerwise_reload(model)
        recorder._install_recording_stamps(None, model, sink)
        try:
            with watch:
                loaded.load_weights(iter(fakes))
            return _route_of(model, sink, watch, {meta.name: meta for meta in tensors})
        except NotImplementedError as error:
            raise Unroutable(str(error).splitlines()[0]) from error
        finally:
            recorder._restore_after_dry_run(None, model)


def _route_of(model: torch.nn.Module, sink: _Sink, watch: _Watch, tensors: dict[str, TensorMeta]) -> Route:
    if sink.unnamed:
        raise Unroutable(f"{sink.unnamed} is copied by no parameter's loader")
    if watch.other:
        raise Unroutable(f"a loader does more than copy: {watch.other}")
    paths = {module: path for path, module in model.named_modules()}
    numbers = {name: number for number, name in enumerate(tensors)}
    targets: list[FilledTensor] = []
    found: dict[tuple[int, int], list[Rectangle]] = {}  # by (tensor, target)
    for layer, copies in sink.copies_by_layer.items():
        path = paths[layer]
        if is_deferred_attention_layer(layer):
            raise Unroutable(f"{path} is loaded together with what it attends to")
        packing = ExpertPacking.of(layer, path)
        known: dict[tuple[str, int], int] = {}
        for copy in copies:
            name, meta, parameter = copy.param_name, tensors[copy.src[0]], getattr(layer, copy.param_name)
            if name in layer._non_persistent_buffers_set:
                raise Unroutable(f"{path}.{name} is a buffer that belongs to no checkpoint")
            one_by_one = packing is not None and name in packing.packed  # not so the router's bias, which it has too
            size = parameter.numel() // (len(parameter) if one_by_one else 1)
            for each in _rectangles_of(copy, meta):
                for part, inside in in_parts(each, size) if one_by_one else [(-1, each)]:
                    if (name, part) not in known:
                        known[name, part] = len(targets)
                        targets.append((path, name, dtype_name(parameter), size, part))
                    found.setdefault((numbers[meta.name], known[name, part]), []).append(inside)
        if packing and sum(part >= 0 for _, part in known) != sum(len(each) for each in packing.packed.values()):
            raise Unroutable(f"no tensor fills some experts of {path}")
    rows = [
        (*pair, *each)
        for pair, several in found.items()
        for each in merged(sorted(several, key=lambda part: (part.column, part.row)))
    ]
    return Route.of(targets, rows)


def _rectangles_of(copy: Any, meta: TensorMeta) -> list[Rectangle]:
    """Return a recorded copy's rectangles of its source tensor."""
    whole = torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta")
    part = whole
    try:
        for operation, arguments, keywords in copy.src[1]:
            if operation != "contiguous":  # the same elements
                part = getattr(part, operation)(*arguments, **dict(keywords))
        part = part.broadcast_to(copy.shape)
    except RuntimeError as error:
        raise Unroutable(f"{meta.name}: {str(error).splitlines()[0]}") from error
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata or part.dtype != whole.dtype:
        raise Unroutable(f"{meta.name} is not copied as it is: {copy.src[1]}")
    try:
        return rectangles(
            copy.shape, (part.stride(), int(part.storage_offset())), (copy.stride, copy.offset), width_of(meta.shape)
        )
    except ValueError as error:
        raise Unroutable(f"{meta.name}: {error}") from error
