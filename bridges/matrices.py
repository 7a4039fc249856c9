"""Which matrices a Megatron weight consists of, for optimizers that treat a matrix as one object (Muon).

A fused weight holds several: q, k and v; gate and up; the sections of a delta net's input projection. The order of a
matrix's rows does not matter here: an orthogonalised matrix permutes with its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bridges.conversions import (
    Conversion,
    DeinterleaveGateUp,
    InterleaveGatedQkv,
    InterleaveQkv,
    InterleaveRope,
    JoinByGroup,
    Squeeze,
    Transpose,
)
from bridges.errors import BridgeError
from bridges.rules import Entry

NOT_LINEAR = ("mlp.router.weight", "mlp.shared_experts.gate_weight")
"""Two-dimensional weights that score (experts, the shared expert) and are not linear maps of the residual stream."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The matrices of a weight ``[groups · sum(rows), columns]``: in each group, ``rows[i]`` rows of matrix i."""

    groups: int
    rows: tuple[int, ...]

    def split(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices ``[groups · rows[i], columns]`` of a whole weight; views where possible."""
        by_group = weight.unflatten(0, (self.groups, sum(self.rows)))
        return [part.flatten(0, 1) for part in by_group.split(self.rows, dim=1)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Invert :meth:`split`."""
        if len(matrices) == 1:
            return matrices[0]
        return torch.cat([each.unflatten(0, (self.groups, -1)) for each in matrices], dim=1).flatten(0, 1)


def is_matrix(entry: Entry) -> bool:
    """Return whether a weight consists of matrices: it is none of embedding, output layer, router, norm, bias and
    convolution."""
    flat = len(entry.shape) != 2 or entry.split.vocab or entry.is_buffer
    return not (flat or entry.name.endswith(NOT_LINEAR))


def matrix_blocks(entry: Entry) -> Blocks | None:
    """Return the matrices of a weight; None if it has none (:func:`is_matrix`).

    A weight that HF stores as one linear layer is one matrix (also MLA's projections), unless HF fuses several in it.
    Raises :class:`BridgeError` for a conversion without a known split, for example a plugin's.
    """
    if not is_matrix(entry):
        return None
    conversion, rows = entry.bound.conversion, entry.shape[0]
    kind = type(conversion)
    if kind is InterleaveQkv and isinstance(conversion, InterleaveQkv):
        dim, value = conversion.dim, conversion.value or conversion.dim
        return Blocks(conversion.groups, (conversion.queries * dim, dim, value))
    if kind is InterleaveGatedQkv and isinstance(conversion, InterleaveGatedQkv):
        dim = conversion.dim
        return Blocks(conversion.groups, (conversion.queries * dim, conversion.queries * dim, dim, dim))
    if kind is JoinByGroup and isinstance(conversion, JoinByGroup):
        sections = tuple(count for each in conversion.sections for count in each)
        return Blocks(conversion.groups, conversion.matrices or sections)
    if kind in (Conversion, DeinterleaveGateUp, InterleaveRope, Squeeze, Transpose):
        return Blocks(1, (rows // conversion.parts,) * conversion.parts)
    raise BridgeError(
        f"{entry.name}: the table does not say which matrices {kind.__name__} fuses; add it to bridges/matrices.py, "
        "or train with optimizer=adam"
    )


def without_split(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a message for each kind of weight that :func:`matrix_blocks` cannot split."""
    for entry in {each.bound.row.megatron: each for each in entries}.values():
        try:
            matrix_blocks(entry)
        except BridgeError as error:
            yield str(error)
