"""Tensors that are on disk in another form than rows of Megatron's: experts in one tensor (gpt-oss), a leading 1
(ERNIE 4.5).

They travel as Megatron has them, each expert on its own, because what travels is rows of shards. The engine's worker
turns them into the form on disk, under the name by which vLLM's loader takes the tensor of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from bridges.conversions import Conversion, DeinterleaveGateUp, Squeeze, Transpose
from bridges.rows import Shape
from bridges.rules import Entry
from skyrl_megatron.weight_sync.bucket import TensorMeta

_BY_NAME: dict[str, Conversion] = {kind.__name__: kind() for kind in (DeinterleaveGateUp, Squeeze, Transpose)}
"""Conversions that do not keep rows; they depend on no sizes, so that a name says them."""


def travelling(entry: Entry) -> Sequence[tuple[str, Shape]]:
    """List (name, shape) of the tensors as which an entry travels."""
    if entry.has_rows_of_hf:
        return [(piece.name, piece.shape) for piece in entry.hf]
    (piece,) = entry.hf
    if piece.index is None:
        return [(piece.name, entry.shape)]
    layer, _, leaf = piece.name.rpartition(".")
    return [(f"{layer}.{piece.index}.{leaf}", entry.shape)]


def turning(entry: Entry) -> str | None:
    """Name what turns the tensor that travels into that on disk; None if nothing has to (``TensorMeta.turned``)."""
    name = type(entry.bound.conversion).__name__
    return name if name in _BY_NAME else None


def as_on_disk(
    tensors: Iterable[tuple[str, Tensor]], senders: Iterable[Iterable[TensorMeta]]
) -> Iterator[tuple[str, Tensor]]:
    """Turn those of ``tensors`` of which the metadata of ``senders`` says so; others pass. Views where possible."""
    conversions = {meta.name: _BY_NAME[meta.turned] for sender in senders for meta in sender if meta.turned}
    for name, tensor in tensors:
        conversion = conversions.get(name)
        yield name, tensor if conversion is None else conversion.to_hf(tensor)[0]
