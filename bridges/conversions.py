"""Exact, invertible tensor operations between HF tensors and one Megatron parameter.

A Megatron tensor is the concatenation of ``parts`` equally long parts along dim 0: 1 for most, 2 for gate and up
projections, which are split over tp separately. Streaming code works on parts, so gate and up projections need not be
copied into one tensor. The conversions have concrete sizes; the tables in ``families/`` have symbolic dimensions
(:mod:`bridges.rows`).

HF tensors are [rows, columns] as on disk, vectors [rows], stacked experts [experts, …]; the Megatron tensor is
[rows, columns] of the whole model. The dtype is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The linear maps of a weight ``[groups · sum(rows), columns]``: in each group, ``rows[i]`` rows of map i.

    A fused weight holds several: q, k and v; gate and up; the sections of a delta net's input projection. The order of
    rows within a map does not matter to an optimizer: an orthogonalised matrix permutes with its rows.
    """

    groups: int
    rows: tuple[int, ...]

    def split(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices ``[groups · rows[i], columns]`` of a whole weight; views where possible."""
        by_group = weight.unflatten(0, (self.groups, sum(self.rows)))
        return [part.flatten(0, 1) for part in by_group.split(self.rows, dim=1)]

    def shard(self, size: int) -> Blocks:
        """Return the maps of the rows that one of ``size`` ranks holds. A part of a single group is one map."""
        if self.groups % size == 0:
            return Blocks(self.groups // size, self.rows)
        if self.groups == 1:
            return Blocks(1, tuple(rows // size for rows in self.rows))
        return Blocks(1, (self.groups * sum(self.rows) // size,))

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Invert :meth:`split`."""
        if len(matrices) == 1:
            return matrices[0]
        return torch.cat([each.unflatten(0, (self.groups, -1)) for each in matrices], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Conversion:
    """One HF tensor is the unchanged Megatron tensor. Base of all conversions."""

    keeps_rows: ClassVar[bool] = True
    """Whether each row of the Megatron tensor is a row of a HF tensor, in any order."""

    @property
    def keeps_order(self) -> bool:
        """Whether the rows of one HF tensor keep their order within each group, which adapters need."""
        return True

    parts: int = 1

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert HF tensors, in the order of the row, to the parts of the Megatron tensor; views if possible."""
        return tuple(hf)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Invert :meth:`to_parts` exactly; views if possible."""
        return tuple(parts)

    def to_megatron(self, hf: Sequence[Tensor]) -> Tensor:
        """Convert HF tensors in the order of the row to the whole (unsharded) Megatron tensor."""
        parts = self.to_parts(hf)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        """Convert the whole (unsharded) Megatron tensor to HF tensors in the order of the row."""
        return self.from_parts(megatron.chunk(self.parts))

    def blocks(self, rows: int) -> Blocks:
        """Return the linear maps of a weight of ``rows`` rows: one for each part. Each class says so for itself."""
        return Blocks(1, (rows // self.parts,) * self.parts)


@dataclass(frozen=True, slots=True)
class InterleaveQkv(Conversion):
    """q ``[groups·queries·dim, …]``, k and v ``[groups·dim, …]`` → ``[groups·(queries + 2)·dim, …]``.

    ``value``: size of a value head if it is not ``dim``.
    Megatron orders the rows by KV group: the group's query heads, its key head, its value head
    (``megatron/core/transformer/attention.py``, ``SelfAttention.get_query_key_value_tensors``). With 2 groups of
    2 query heads: ``q0 q1 k0 v0 q2 q3 k1 v1``. A tp split is then a contiguous split into whole groups.
    """

    groups: int = 1
    queries: int = 1
    dim: int = 1
    value: int | None = None

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = hf
        rest = q.shape[1:]
        by_group = [
            q.reshape(self.groups, self.queries * self.dim, *rest),
            k.reshape(self.groups, self.dim, *rest),
            v.reshape(self.groups, self.value or self.dim, *rest),
        ]
        return (torch.cat(by_group, dim=1).flatten(0, 1),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = parts[0].shape[1:]
        by_group = parts[0].reshape(self.groups, -1, *rest)
        q, k, v = torch.tensor_split(by_group, (self.queries * self.dim, (self.queries + 1) * self.dim), dim=1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)

    def blocks(self, rows: int) -> Blocks:
        return Blocks(self.groups, (self.queries * self.dim, self.dim, self.value or self.dim))


@dataclass(frozen=True, slots=True)
class InterleaveGatedQkv(InterleaveQkv):
    """:class:`InterleaveQkv` with an output gate after each head of q: q ``[groups·queries·2·dim, …]``.

    Megatron (``attention_output_gate``) has the group's query heads first, then its gates. With 1 group of 2 heads:
    ``q0 g0 q1 g1``, ``k0``, ``v0`` → ``q0 q1 g0 g1 k0 v0``.
    """

    @property
    def keeps_order(self) -> bool:
        return False

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = hf
        rest = q.shape[1:]
        by_group = [
            q.reshape(self.groups, self.queries, 2, self.dim, *rest).transpose(1, 2).flatten(1, 3),
            k.reshape(self.groups, self.dim, *rest),
            v.reshape(self.groups, self.dim, *rest),
        ]
        return (torch.cat(by_group, dim=1).flatten(0, 1),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = parts[0].shape[1:]
        rows = 2 * self.queries * self.dim
        by_group = parts[0].reshape(self.groups, rows + 2 * self.dim, *rest)
        q, k, v = torch.tensor_split(by_group, (rows, rows + self.dim), dim=1)
        q = q.reshape(self.groups, 2, self.queries, self.dim, *rest).transpose(1, 2)
        return q.flatten(0, 3), k.flatten(0, 1), v.flatten(0, 1)

    def blocks(self, rows: int) -> Blocks:
        return Blocks(self.groups, (self.queries * self.dim, self.queries * self.dim, self.dim, self.dim))


@dataclass(frozen=True, slots=True)
class JoinByGroup(Conversion):
    """Sections of one or several HF tensors → rows by group: a group's rows of every section, in their order.

    ``sections``: for each HF tensor, the number of rows of one group in each of its sections. ``matrices``: rows of
    one group of each linear map, if a section fuses several. With 2 groups:
    ``(a0 a1 b0 b1)``, ``(c0 c1)`` → ``a0 b0 c0 a1 b1 c1``. A tp split is then a contiguous split into whole groups.
    """

    groups: int = 1
    sections: tuple[tuple[int, ...], ...] = ((1,),)
    matrices: tuple[int, ...] = ()

    @property
    def keeps_order(self) -> bool:
        return all(len(rows) == 1 for rows in self.sections)

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pieces = [
            piece.reshape(self.groups, -1, *piece.shape[1:])
            for tensor, rows in zip(hf, self.sections, strict=True)
            for piece in tensor.split([self.groups * count for count in rows])
        ]
        return (torch.cat(pieces, dim=1).flatten(0, 1),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_group = parts[0].reshape(self.groups, -1, *parts[0].shape[1:])
        pieces = iter(by_group.split([count for rows in self.sections for count in rows], dim=1))
        return tuple(torch.cat([next(pieces).flatten(0, 1) for _ in rows]) for rows in self.sections)

    def blocks(self, rows: int) -> Blocks:
        return Blocks(self.groups, self.matrices or tuple(count for each in self.sections for count in each))


@dataclass(frozen=True, slots=True)
class Transpose(Conversion):
    """``[a, b]`` ↔ ``[b, a]``."""

    keeps_rows: ClassVar[bool] = False

    blocks = Conversion.blocks

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (hf[0].t(),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (parts[0].t(),)


@dataclass(frozen=True, slots=True)
class Squeeze(Conversion):
    """``[1, a]`` ↔ ``[a]``."""

    keeps_rows: ClassVar[bool] = False

    blocks = Conversion.blocks

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (hf[0].squeeze(0),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (parts[0].unsqueeze(0),)


@dataclass(frozen=True, slots=True)
class DeinterleaveGateUp(Conversion):
    """``[H, 2f]`` or ``[2f]`` with columns gate, up, gate, up … ↔ gate and up, each ``[f, H]`` or ``[f]``."""

    keeps_rows: ClassVar[bool] = False
    parts: int = 2

    blocks = Conversion.blocks

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rows = hf[0].t() if hf[0].dim() == 2 else hf[0]
        return rows[0::2], rows[1::2]

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rows = torch.stack(tuple(parts), dim=1).flatten(0, 1)
        return (rows.t() if rows.dim() == 2 else rows,)


@dataclass(frozen=True, slots=True)
class InterleaveRope(Conversion):
    """Reorders the last ``rope`` rows of each of ``heads`` blocks from halves to pairs.

    Some HF models rotate ``(x[i], x[i + rope/2])``; Megatron's MLA rotates ``(x[2i], x[2i + 1])``. Hence
    ``new[2i] = old[i]`` and ``new[2i + 1] = old[i + rope/2]``. The ``plain`` rows before them are unchanged.
    """

    heads: int = 1
    plain: int = 0
    rope: int = 2

    blocks = Conversion.blocks

    def _permute(self, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        blocks = rows.reshape(self.heads, self.plain + self.rope, *rows.shape[1:])
        plain, rope = torch.tensor_split(blocks, (self.plain,), dim=1)
        rope = rope.reshape(self.heads, *shape, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
        return torch.cat([plain, rope], dim=1).flatten(0, 1)

    def to_parts(self, hf: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self._permute(hf[0], (2, self.rope // 2)),)

    def from_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self._permute(parts[0], (self.rope // 2, 2)),)
