"""The expansion of a family's table: one entry per Megatron parameter or buffer of a given model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bridges.conversions import Conversion
from bridges.errors import BridgeError
from bridges.names import te_spelling
from bridges.rows import DELTA_NET, ModelShape, Row, Shape, Split

if TYPE_CHECKING:
    from bridges.family import Family


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A row with its sizes, shared by the entries of all layers and experts."""

    row: Row
    te_name: str
    conversion: Conversion
    shape: Shape
    hf_shapes: tuple[Shape, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class HfSlice:
    """A tensor on disk: its name, its whole shape, and the expert's index on dim 0 where all experts share it."""

    name: str
    shape: Shape
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter or buffer.

    ``name``: canonical global name, e.g. ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``. ``hf``: where its data
    is on disk. ``layer``, ``expert``: None where it belongs to none; an entry with an expert lives in the expert
    group and is split over etp, others over tp.
    """

    name: str
    hf: tuple[HfSlice, ...]
    layer: int | None
    expert: int | None
    bound: BoundRow

    @property
    def shape(self) -> Shape:
        """Global shape, vocabulary not padded."""
        return self.bound.shape

    @property
    def split(self) -> Split:
        """How it is split over tp (etp for an expert)."""
        return self.bound.split

    def whole(self) -> Entry:
        """Return the entry as a copy on every rank, see :attr:`Split.whole_under_te`."""
        return replace(self, bound=replace(self.bound, split=Split()))

    @property
    def parts(self) -> int:
        """Pieces of equal length along dim 0 (2 for gate and up)."""
        return self.bound.conversion.parts

    @property
    def is_expert(self) -> bool:
        """Whether it is split over ep and etp instead of tp."""
        return self.expert is not None

    @property
    def layer_number(self) -> int:
        """The layer's number, for an entry known to belong to one."""
        assert self.layer is not None, self.name
        return self.layer

    @property
    def can_be_scaled(self) -> bool:
        """Whether it is a linear map's matrix made of rows on disk, so that 8-bit values and their scales can be cut
        and ordered as they are."""
        return ".linear_" in self.name and len(self.shape) == 2 and self.has_rows_of_hf

    @property
    def has_rows_of_hf(self) -> bool:
        """Whether its rows are rows of HF tensors that are its alone."""
        return self.bound.conversion.keeps_rows and self.hf[0].index is None

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer (``named_buffers``) and not a parameter."""
        return self.bound.row.buffer

    @property
    def te_name(self) -> str:
        """The name under Transformer Engine's layer spec, canonical expert spelling."""
        return self.bound.te_name.format(layer=self.layer, expert=self.expert)

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """Convert HF tensors (slices of one expert where stacked), in the order of ``hf``, to the Megatron tensor."""
        return self.bound.conversion.to_megatron(tensors)

    def to_hf(self, megatron: Tensor) -> tuple[Tensor, ...]:
        """Convert the Megatron tensor ``[shape]`` to HF tensors, in the order of ``hf``."""
        return self.bound.conversion.to_hf(megatron)


def _bind(rows: Sequence[Row], shape: ModelShape, moe_layer: bool, mixer: str = "") -> list[BoundRow]:
    bound = []
    for row in rows:
        if row.when is None or row.when in shape.flags:
            te_name = te_spelling(row.megatron, mla=shape.mla, moe=moe_layer, delta_net=mixer == DELTA_NET)
            bound.append(
                BoundRow(
                    row,
                    te_name,
                    row.conversion(shape.dims),
                    row.megatron_shape(shape.dims),
                    row.hf_shapes(shape.dims),
                    row.sharding(shape.dims),
                )
            )
    return bound


def _entries(bound: BoundRow, layer: int | None, experts: int) -> Iterator[Entry]:
    row = bound.row
    per_expert = "{expert}" in row.megatron
    for expert in range(experts) if per_expert else (None,):
        names = [name.format(layer=layer, expert=expert) for name in row.hf_names]
        if row.stacked:
            hf = tuple(
                HfSlice(name, (experts, *shape), expert) for name, shape in zip(names, bound.hf_shapes, strict=True)
            )
        else:
            hf = tuple(HfSlice(name, shape) for name, shape in zip(names, bound.hf_shapes, strict=True))
        yield Entry(row.megatron.format(layer=layer, expert=expert), hf, layer, expert, bound)


def expand(family: Family, hf_config: Mapping[str, Any], *, draft: bool = False) -> tuple[Entry, ...]:
    """Return every parameter and buffer of the model that ``hf_config`` (``config.json`` as a dict) describes.

    In model order: embedding, layers from first to last, final norm, output layer; with ``draft`` then the layer that
    predicts the token after the next, numbered behind the last. Raises :class:`BridgeError` for a config that the
    family does not support.
    """
    shape = family.shape(hf_config)
    experts = shape.dims.get("E", 0)
    first, last = _bind(family.embedding, shape, False), _bind(family.head, shape, False)
    layers = {kind: _bind(family.layer_rows(*kind), shape, *kind) for kind in set(shape.kinds)}
    entries = [entry for bound in first for entry in _entries(bound, None, 0)]
    for layer, kind in enumerate(shape.kinds):
        entries += [entry for bound in layers[kind] for entry in _entries(bound, layer, experts)]
    entries += [entry for bound in last for entry in _entries(bound, None, 0)]
    if draft:
        _, mixer = shape.kinds[-1]
        rows = _bind((*family.layer_rows(True, mixer), *family.draft), shape, True, mixer)
        entries += [entry for bound in rows for entry in _entries(bound, len(shape.kinds), experts)]
    if len({entry.name for entry in entries}) != len(entries):
        raise BridgeError(f"the table of {family.model_type} names a Megatron parameter twice")
    return tuple(entries)
