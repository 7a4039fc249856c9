"""The tensors of a sync by HF name: what each rank sends of them, and the checks before anything is sent.

Ranks send rows of Megatron's shards, each expert separately. If the tensor on disk has another form, the engine's
worker converts it (:func:`as_on_disk`), under the name that vLLM's loader uses for the tensor of one expert.

An engine silently leaves garbage in a module that it gets only a part of, and ignores unknown names. So
:func:`check_metadata` requires that the tensors of all ranks make up the model exactly: every tensor, complete, once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, is_dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from bridges.conversions import Conversion, DeinterleaveGateUp, Squeeze, Transpose
from bridges.errors import BridgeError
from bridges.plan import Plan
from bridges.quantisation import EngineForm
from bridges.rows import Shape
from bridges.rules import Entry
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import TensorMeta


@dataclass(frozen=True, slots=True)
class RowRange:
    """Evenly spaced rows of one rank's shard: ``tensor[start + i] = shard[first + i · step]``."""

    owner: int
    """Rank in the group of the tensor's shards."""
    start: int
    count: int
    first: int
    step: int = 1
    column: int = 0
    """First column of the tensor that the shard holds."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """This rank's shard of a tensor. Rank 0 of the group gathers the shards of its ranks and sends the tensor."""

    meta: TensorMeta
    local: Tensor
    """[rows, columns]: a view of memory that does not move."""
    ranges: Sequence[RowRange]
    """Where every row of the tensor is, in the shards of all ranks."""
    group: Any = None
    """Process group of the shards; None: this rank holds the whole tensor."""
    make: Callable[[slice, slice], Tensor] | None = None
    """Computes rows and columns of the shard as they are sent, in the dtype of ``local``, which may then have no
    memory: for a weight that is stored in 8 bits, is quantised, or has an adapter merged."""

    def part(self, rows: slice, columns: slice) -> Tensor | Callable[[], Tensor]:
        """View a part of the shard, [rows, columns] in the dtype of ``local``, or return a function that computes
        it."""
        return self.local[rows, columns] if self.make is None else partial(self.make, rows, columns)

    @property
    def rank(self) -> int:
        """This rank's number in the group; the tensor is sent by rank 0."""
        return 0 if self.group is None else int(self.group.rank())


class WeightSource(Protocol):
    """A source of weights for engines. Ranks that hold shards of the same tensors list them in the same order."""

    def metadata(self) -> Sequence[TensorMeta]:
        """List the tensors that this rank sends, in order. Transfers nothing."""

    def shards(self) -> Sequence[TensorShard]:
        """List this rank's shards of the tensors that it sends, and of tensors that other ranks gather and send."""

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """List all shards that this rank holds, including replicas, and this rank's number among the owners of each.

        Raises ReshardUnsupported for tensors that are sent in another form than they are held.
        """

    def sends_adapter(self, adapter: str) -> bool:
        """Return whether the next pass sends the tensors of an adapter."""

    def refresh(self) -> None:
        """Update what ``make`` reads. Every rank calls it before each pass."""

    def addresses(self) -> list[int]:
        """Return where the memory is now (:func:`memory_id`). If it has moved, the shards are listed again."""


class AdapterWeights(WeightSource, Protocol):
    """A source of adapters alone."""

    def choose(self, adapters: Sequence[str]) -> None:
        """Send only these adapters from now on, by name; the same on all ranks."""


class SentAdapters(Protocol):
    """The adapters of a run that sends them alone, to engines that hold the base weights."""

    @property
    def names(self) -> Sequence[str]:
        """Their names; ``("",)`` for one without a name."""

    def check(self, metadata: Sequence[Sequence[TensorMeta]]) -> None:
        """Raise WeightSyncError unless the senders send exactly these adapters, each complete."""


def memory_id(tensor: Tensor) -> tuple[int, int]:
    """Return an identifier of the memory of a tensor, […]. It does not change if the storage is freed and allocated
    again, because views of it remain valid."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def as_rows(name: str, tensor: Tensor) -> Tensor:
    """View a tensor's memory as [rows, columns]; a vector has one column.

    Raises WeightSyncError for a tensor of more than two dimensions whose memory is not contiguous.
    """
    tensor = tensor.detach()
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.unsqueeze(-1) if tensor.dim() else tensor.view(1, 1)
    if not tensor.is_contiguous():
        raise WeightSyncError(f"{name} {list(tensor.shape)} is not contiguous in memory: pass a contiguous tensor")
    return tensor.flatten(0, -2)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of the dtype of a tensor, […]: ``float32`` for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


_BY_NAME: dict[str, Conversion] = {kind.__name__: kind() for kind in (DeinterleaveGateUp, Squeeze, Transpose)}
"""Conversions that do not keep rows. They have no parameters, so their names identify them."""


def sent_tensors(entry: Entry) -> Sequence[tuple[str, Shape]]:
    """List (name, shape) of the tensors that are sent for an entry."""
    if entry.has_rows_of_hf:
        return [(piece.name, piece.shape) for piece in entry.hf]
    (piece,) = entry.hf
    if piece.index is None:
        return [(piece.name, entry.shape)]
    layer, _, leaf = piece.name.rpartition(".")
    return [(f"{layer}.{piece.index}.{leaf}", entry.shape)]


def conversion_name(entry: Entry) -> str | None:
    """Return the name of the conversion from the sent tensor to the tensor on disk; None if they are equal
    (``TensorMeta.conversion``)."""
    name = type(entry.bound.conversion).__name__
    return name if name in _BY_NAME else None


def as_on_disk(
    tensors: Iterable[tuple[str, Tensor]], senders: Iterable[Iterable[TensorMeta]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert the tensors whose metadata name a conversion, and yield all tensors: (HF name, [shape on disk], in the
    dtype that came). Views where possible."""
    conversions = {meta.name: _BY_NAME[meta.conversion] for sender in senders for meta in sender if meta.conversion}
    for name, tensor in tensors:
        conversion = conversions.get(name)
        yield name, tensor if conversion is None else conversion.to_hf(tensor)[0]


NAMED_IN_MESSAGES = 5
VALUES = "float8_e4m3fn"
"""The dtype of values that are sent in 8 bits."""
FUSED_EXPERTS = frozenset({"glm4_moe", "qwen3_moe"})
"""Families whose experts are sent as one tensor per layer: vLLM loads it three times as fast as single experts
(``benchmarks/weight_sync.py``). Only families that a test with a real engine covers."""
_FUSED = re.compile(r"^(?P<layer>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)$")


def plain_metadata(metadata: Sequence[Sequence[Any]]) -> list[list[list[Any]]]:
    """Convert the metadata of all senders, ``TensorMeta`` or tuples, to the lists of fields that workers receive."""
    return [[list(astuple(m) if is_dataclass(m) and not isinstance(m, type) else m) for m in s] for s in metadata]


def metadata_of(
    name: str,
    dtype: str,
    shape: Sequence[int],
    rows: Sequence[int] | None = None,
    position: int = -1,
    conversion: str | None = None,
) -> TensorMeta:
    """Make a tensor's metadata from the fields that a worker receives."""
    return TensorMeta(name, dtype, tuple(shape), None if rows is None else (rows[0], rows[1]), position, conversion)


def check_metadata(
    metadata: Sequence[Sequence[TensorMeta]], hf_config: Mapping[str, Any], *, draft: bool = False
) -> None:
    """Raise WeightSyncError unless the senders send exactly the tensors of the model that ``hf_config`` (a HF
    ``config.json``) describes, in one of the namings that the engine loads.

    Experts may be sent one by one, as on disk, or fused over a layer: ``experts.gate_up_proj`` [E, 2·ffn, H] and
    ``experts.down_proj`` [E, H, ffn]. Tensors with another form on disk are sent as :func:`sent_tensors` lists them. A
    tied output layer may be sent or not. 8-bit values need their scales (``QuantisedWeightSource``). ``draft``: with
    the trained layer of multi-token prediction.
    """
    problems: list[str] = []
    sent = _without_scales(whole_shapes(metadata, problems), metadata, hf_config, problems)
    plan = Plan.of(hf_config, draft=draft)
    expected: dict[str, Shape] = dict(pair for entry in plan.entries for pair in sent_tensors(entry))
    for copy in plan.copies:
        # a tied output layer: engines accept it and do not need it
        sent.pop(copy, None)
    for name, shape in list(sent.items()):
        if name not in expected and (fused := _FUSED.match(name)):
            for single, single_shape in _unfused(fused, shape).items():
                sent[single] = single_shape
            del sent[name]
    missing = [name for name in expected if name not in sent]
    extra = [name for name in sent if name not in expected]
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {named_some(missing)}")
    for name in extra[:NAMED_IN_MESSAGES]:
        near = difflib.get_close_matches(name, missing or expected, n=1)
        # difflib compares with every name, so only a few are looked up: a model has tens of thousands
        problems.append(f"{name} is not a tensor of the model" + (f" (nearest: {near[0]})" if near else ""))
    if len(extra) > NAMED_IN_MESSAGES:
        problems.append(f"{len(extra) - NAMED_IN_MESSAGES} more unknown tensors")
    for name, shape in sent.items():
        if name in expected and shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, the model has {list(expected[name])}")
    if problems:
        raise WeightSyncError("the trainer does not send the complete model: " + "; ".join(problems))


def whole_shapes(metadata: Sequence[Sequence[TensorMeta]], problems: list[str]) -> dict[str, Shape]:
    """Return name → shape of every tensor. Adds a problem unless the senders' rows cover it without gap or overlap."""
    shards: dict[str, list[TensorMeta]] = {}
    for sender in metadata:
        for meta in sender:
            shards.setdefault(meta.name, []).append(meta)
    for name, pieces in shards.items():
        if len({(meta.shape, meta.dtype) for meta in pieces}) > 1:
            problems.append(f"{name} is listed with different shapes or dtypes")
        end = 0
        # the rows of all senders in order, so that gaps and overlaps show between neighbours
        for start, stop in sorted(meta.rows or (0, meta.shape[0] if meta.shape else 1) for meta in pieces):
            if start < end:
                problems.append(f"rows {start} to {min(end, stop)} of {name} are sent twice")
            elif start > end:
                problems.append(f"rows {end} to {start} of {name} are missing")
            end = max(end, stop)
        if pieces[0].shape and end != pieces[0].shape[0]:
            problems.append(f"rows {end} to {pieces[0].shape[0]} of {name} are missing")
    return {name: pieces[0].shape for name, pieces in shards.items()}


def _without_scales(
    shapes: dict[str, Shape],
    metadata: Sequence[Sequence[TensorMeta]],
    hf_config: Mapping[str, Any],
    problems: list[str],
) -> dict[str, Shape]:
    """Return ``shapes`` without the scales of 8-bit values. Adds a problem for values without matching scales."""
    dtypes = {meta.name: meta.dtype for sender in metadata for meta in sender}
    values = [name for name, dtype in dtypes.items() if dtype == VALUES]
    if not values:
        return shapes
    try:
        form = EngineForm.of(hf_config, "config.json")
    except BridgeError as error:
        problems.append(str(error))
        return shapes
    if form is None:
        problems.append(f"{named_some(values)} are sent in 8 bits, but config.json has no quantization_config")
        return shapes
    for name in values:
        scales, shape = name + form.suffix, shapes[name]
        grid = form.grid((shape[0], shape[1])) if len(shape) == 2 else None
        sent = f"{list(shapes[scales])} {dtypes[scales]}" if scales in shapes else "missing"
        if grid is None or shapes.get(scales) != grid or dtypes[scales] != form.scale_dtype:
            problems.append(f"{scales} is {sent}, the model has {list(grid or ())} {form.scale_dtype}")
    names_of_scales = {name + form.suffix for name in values}
    return {name: shape for name, shape in shapes.items() if name not in names_of_scales}


def _unfused(fused: re.Match[str], shape: Shape) -> dict[str, Shape]:
    layer, experts = fused["layer"], range(shape[0])
    if fused["projection"] == "down_proj":
        return {f"{layer}.{expert}.down_proj.weight": shape[1:] for expert in experts}
    # gate rows first, then up rows, as vLLM's fused loader splits them
    half = (shape[1] // 2, *shape[2:])
    return {f"{layer}.{expert}.{name}_proj.weight": half for expert in experts for name in ("gate", "up")}


def named_some(names: Sequence[str]) -> str:
    """Name the first few names, and count the others."""
    more = len(names) - NAMED_IN_MESSAGES
    return ", ".join(names[:NAMED_IN_MESSAGES]) + (f" and {more} more" if more > 0 else "")
