"""Routes of a vLLM 0.32 model: which part of which tensor its loaders copy where, found without any weights.

vLLM's own recorder for tensors that are fetched by slice (vllm/distributed/weight_transfer/sharded_rdt_fake.py) stands
in for the weights in one run of the model's ``load_weights`` on parameters without memory. Whatever a loader does that
is no copy of a slice ends the recording, as does a copy that nothing says the parameter of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.rectangles import Rectangle, in_parts, merged, rectangles, width_of
from skyrl_megatron.weight_sync.routes import FilledTensor, Route, Unroutable
from skyrl_megatron.weight_sync.source import dtype_name
from skyrl_megatron.weight_sync.vllm_targets import ExpertPacking


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
