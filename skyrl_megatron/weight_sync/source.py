"""Tensors that a trainer rank sends, by HF name, and the rows of them that each rank's shard holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a tensor that lie evenly spaced in one rank's shard: ``tensor[start + i] = shard[first + i · step]``."""

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
    """This rank's shard of a tensor, which rank 0 of a group puts together from the shards of its ranks and sends."""

    meta: TensorMeta
    local: Tensor
    """[rows, columns]: a view of memory that stays where it is."""
    ranges: Sequence[RowRange]
    """Where every row of the tensor lies, in the shards of all ranks."""
    group: Any = None
    """Process group of the shards; None: the rank has all of it."""
    make: Callable[[slice, slice], Tensor] | None = None
    """Makes rows and columns of what is sent of the shard, in the dtype of ``local``, which may then have no memory: a
    weight that is kept in 8 bits, or brought into them, or that an adapter is added to."""

    def part(self, rows: slice, columns: slice) -> Tensor | Callable[[], Tensor]:
        """View a part of the shard, or return what makes it."""
        return self.local[rows, columns] if self.make is None else partial(self.make, rows, columns)

    @property
    def rank(self) -> int:
        """This rank's number in the group; the tensor is sent by rank 0."""
        return 0 if self.group is None else int(self.group.rank())


class WeightSource(Protocol):
    """Ranks that hold shards of the same tensors list them in the same order."""

    def metadata(self) -> Sequence[TensorMeta]:
        """List what this rank sends, in order, without transferring anything."""

    def shards(self) -> Sequence[TensorShard]:
        """List the shards that this rank holds, of tensors that it sends and of tensors that others send."""

    def held(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """List all that this rank holds, replicas of what others send too, and its number among the owners of each.

        Raises Unroutable for tensors that are not sent as they are held.
        """

    def travels(self, adapter: str) -> bool:
        """Return whether the tensors of :meth:`held` that belong to an adapter are sent in the next pass."""

    def refresh(self) -> None:
        """Prepare for the next pass: what ``make`` reads may have changed. Every rank calls it before each pass."""

    def addresses(self) -> list[int]:
        """Return where the memory is now (:func:`place_of`). When it has moved, the shards are asked for anew."""


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Tell a tensor's memory from other memory. A storage that is emptied and filled again stays the same: views of it
    remain."""
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
        raise WeightSyncError(f"{name} {list(tensor.shape)} is not contiguous in memory: give a contiguous tensor")
    return tensor.flatten(0, -2)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype: ``float32`` for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")
