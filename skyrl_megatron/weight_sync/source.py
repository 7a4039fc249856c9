"""What a trainer rank sends: tensors by HF name, and where in the memory of which ranks their rows lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a tensor that lie evenly spaced in one rank's share: ``tensor[start + i] = share[first + i · step]``."""

    owner: int
    """Rank in the group of the tensor's shares."""
    start: int
    count: int
    first: int
    step: int = 1
    column: int = 0
    """First column of the tensor that the share holds."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that rank 0 of a group contributes, put together from the shares of the group's ranks."""

    meta: TensorMeta
    share: Tensor
    """[rows, columns], this rank's: a view of memory that stays where it is."""
    runs: Sequence[Run]
    group: Any = None
    """Process group of the shares; None: the rank has all of it."""

    @property
    def rank(self) -> int:
        """This rank's in the group."""
        return 0 if self.group is None else int(self.group.rank())


class WeightSource(Protocol):
    """Ranks that hold shares of the same tensors list them in the same order."""

    def metadata(self) -> Sequence[TensorMeta]:
        """What this rank contributes, in order, without transferring anything."""

    def parts(self) -> Sequence[Part]:
        """What this rank contributes, and what it has shares of."""

    def addresses(self) -> list[int]:
        """Where the memory is now. When it has moved, parts are asked for anew."""


class StateSource:
    """Tensors that one rank has whole, as of a state dict; their contents change between syncs.

    Raises WeightSyncError for a tensor of more than two dimensions whose memory is not contiguous.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta(name, dtype_name(t), tuple(t.shape)) for name, t in self.tensors.items()]

    def parts(self) -> Sequence[Part]:
        shares = [as_rows(name, tensor) for name, tensor in self.tensors.items()]
        metadata = zip(self.metadata(), shares, strict=True)
        return [Part(meta, share, (Run(0, 0, len(share), 0),)) for meta, share in metadata]

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors.values()]


def as_rows(name: str, tensor: Tensor) -> Tensor:
    """A view [rows, columns] of a tensor's memory; a vector has one column. Raises WeightSyncError."""
    tensor = tensor.detach()
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.unsqueeze(-1) if tensor.dim() else tensor.view(1, 1)
    if not tensor.is_contiguous():
        raise WeightSyncError(f"{name} {list(tensor.shape)} has gaps in memory: give a contiguous tensor")
    return tensor.flatten(0, -2)


def dtype_name(tensor: Tensor) -> str:
    """``float32`` of a torch.float32 tensor."""
    return str(tensor.dtype).removeprefix("torch.")
