"""Routes of a vLLM 0.32 model: which part of which tensor its loaders copy where, found without any weights.

vLLM's own recorder for tensors that are fetched by slice (vllm/distributed/weight_transfer/sharded_rdt_fake.py) stands
in for the weights in one run of the model's ``load_weights`` on parameters without memory. Whatever a loader does that
is no copy of a slice ends the recording, as does a copy that nothing says the parameter of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.rectangles import Rectangle, merged, rectangles, width_of
from skyrl_megatron.weight_sync.routes import Route, Unroutable
from skyrl_megatron.weight_sync.source import dtype_name


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
    targets: list[tuple[str, str, str, int]] = []
    found: dict[tuple[int, int], list[Rectangle]] = {}  # by (tensor, target)
    for layer, copies in sink.copies_by_layer.items():
        path = paths[layer]
        if is_deferred_attention_layer(layer):
            raise Unroutable(f"{path} is loaded together with what it attends to")
        known: dict[str, int] = {}
        for copy in copies:
            if copy.param_name not in known:
                parameter = getattr(layer, copy.param_name)
                if copy.param_name in layer._non_persistent_buffers_set:
                    raise Unroutable(f"{path}.{copy.param_name} is a buffer that belongs to no checkpoint")
                known[copy.param_name] = len(targets)
                targets.append((path, copy.param_name, dtype_name(parameter), parameter.numel()))
            meta = tensors[copy.src[0]]
            pair = numbers[meta.name], known[copy.param_name]
            found.setdefault(pair, []).extend(_rectangles_of(copy, meta))
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


class ModelTargets:
    """The parameters that ``route`` fills, of a model between ``initialize_layerwise_reload`` and
    ``finalize_layerwise_reload`` (``parcel_receiver.Targets``).

    A module's exist from its first copy on; after its last one vLLM packs it for its kernels, as after any load.
    """

    def __init__(self, model: torch.nn.Module, route: Route) -> None:
        self.targets = [(model.get_submodule(path), name) for path, name, *_ in route.targets]
        self.left = Counter(layer for layer, _ in self.targets)
        self.made: set[torch.nn.Module] = set()
        self.padded: dict[torch.nn.Module, list[str]] = {}
        """Parameters that are not filled everywhere."""
        for (layer, name), target, filled in zip(self.targets, route.targets, route.covered().tolist(), strict=True):
            if filled < target[3]:
                self.padded.setdefault(layer, []).append(name)

    @torch.no_grad()
    def memory(self, target: int) -> Tensor:
        layer, name = self.targets[target]
        if layer not in self.made:
            self.made.add(layer)
            empty = [padded for padded in self.padded.get(layer, ()) if getattr(layer, padded).is_meta]
            materialize_layer(layer, get_layerwise_info(layer))
            for padded in empty:
                getattr(layer, padded).data.zero_()
        tensor: Tensor = getattr(layer, name).data
        return tensor

    @torch.no_grad()
    def complete(self, target: int) -> None:
        layer, _ = self.targets[target]
        self.left[layer] -= 1
        if not self.left[layer]:
            _layerwise_process(layer, get_layerwise_info(layer))
