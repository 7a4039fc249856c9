"""Expand a family's table to one entry per Megatron parameter; split entries over tp or etp.

The rules of a split, with tp=2:

- a plain split takes equal contiguous runs of dim 0 or 1;
- gate and up are split separately: rank 0 holds ``[gate[:f/2]; up[:f/2]]``, not the gate half;
- q, k, v rows are split by whole KV groups (with more ranks than groups, the rows of a group are split evenly), output
  projections by whole heads;
- a vocabulary is first padded with zero rows to ``padded_vocab`` rows, or to the next multiple of the size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bridges.conversions import Blocks, Conversion
from bridges.errors import BridgeError
from bridges.rows import DELTA_NET, ModelShape, Row, Shape, Split
from bridges.tensor_names import EXPERTS, local_spelling, te_spelling

if TYPE_CHECKING:
    from bridges.family import Family

NOT_LINEAR = ("mlp.router.weight", "mlp.shared_experts.gate_weight")
"""Two-dimensional weights that score (experts, the shared expert) and are not linear maps of the residual stream."""


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A row with concrete sizes, shared by the entries of all layers and experts."""

    row: Row
    te_name: str
    conversion: Conversion
    shape: Shape
    hf_shapes: tuple[Shape, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class HfSlice:
    """A HF tensor: name, whole shape, and the expert's index on dim 0 if the tensor holds all experts."""

    name: str
    shape: Shape
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter or buffer.

    ``name``: canonical global name, e.g. ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``. ``hf``: its HF tensors.
    ``layer``, ``expert``: numbers, or None. An entry with an expert is split over etp, others over tp.
    """

    name: str
    hf: tuple[HfSlice, ...]
    layer: int | None
    expert: int | None
    bound: BoundRow

    @property
    def shape(self) -> Shape:
        """Global shape, without padding of the vocabulary."""
        return self.bound.shape

    @property
    def split(self) -> Split:
        """The split over tp (etp for an expert)."""
        return self.bound.split

    def whole(self) -> Entry:
        """Return the entry without a split, see :attr:`Split.whole_under_te`."""
        return replace(self, bound=replace(self.bound, split=Split()))

    @property
    def parts(self) -> int:
        """Number of equally long parts along dim 0 (2 for gate and up)."""
        return self.bound.conversion.parts

    @property
    def is_expert(self) -> bool:
        """Whether it is split over ep and etp instead of tp."""
        return self.expert is not None

    @property
    def layer_number(self) -> int:
        """The layer's number, for an entry that belongs to a layer."""
        assert self.layer is not None, self.name
        return self.layer

    @property
    def can_be_scaled(self) -> bool:
        """Whether it is a linear weight made of HF rows, so that 8-bit values and scales can be sliced alike."""
        return ".linear_" in self.name and len(self.shape) == 2 and self.has_rows_of_hf

    @property
    def has_rows_of_hf(self) -> bool:
        """Whether its rows are rows of HF tensors that no other entry uses."""
        return self.bound.conversion.keeps_rows and self.hf[0].index is None

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer (``named_buffers``) and not a parameter."""
        return self.bound.row.buffer

    @property
    def te_name(self) -> str:
        """The name in Transformer Engine's layer spec, with canonical names of experts."""
        return self.bound.te_name.format(layer=self.layer, expert=self.expert)

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """Convert HF tensors (one expert's slices if stacked), in the order of ``hf``, to the Megatron tensor."""
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
    """Return every parameter and buffer of the model of ``hf_config`` (``config.json`` as a dict).

    The order is embedding, layers, final norm, output layer, and with ``draft`` the multi-token-prediction layer,
    whose number follows that of the last layer. Raises :class:`BridgeError` for a config that the family does not
    support.
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
        raise BridgeError(f"the table of {family.model_type} has two rows for one Megatron parameter")
    return tuple(entries)


def module_name(entry: Entry, spec: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """Return the name of an entry in a built model; the inverse of :func:`bridges.tensor_names.canonical`.

    ``spec``: ``local`` (sequential experts), ``te`` (grouped experts) or ``local_grouped`` (local norms, grouped
    experts).
    """
    template = entry.bound.te_name if spec == "te" else entry.bound.row.megatron
    if entry.expert is None:
        return template if entry.layer is None else template.format(layer=entry.layer - layer_offset)
    expert = entry.expert - expert_offset
    if spec == "local":
        template = template.replace(EXPERTS, EXPERTS + "local_experts.")
        return template.format(layer=entry.layer_number - layer_offset, expert=expert)
    return template.replace("{expert}.", "").format(layer=entry.layer_number - layer_offset) + str(expert)


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The location of an entry in a distributed checkpoint.

    ``index``, ``axes``: index on each leading axis (layer, expert), and the lengths of these axes. The tensor under
    ``key`` has shape ``[*axes, *entry.shape]``.
    """

    key: str
    index: Shape
    axes: Shape


def checkpoint_location(entry: Entry, shape: ModelShape, *, uniform: bool | None = None) -> CheckpointLocation:
    """Return key and index of an entry in a ``torch_dist`` checkpoint.

    If all layers have the same parameters there is a leading layer axis, unless ``uniform`` is False
    (``TransformerBlock.sharded_state_dict``: ``non_homogeneous_layers``). Otherwise the key has the layer number.
    """
    return _place(entry, entry.bound.te_name, shape, shape.uniform if uniform is None else uniform)


def checkpoint_locations(entry: Entry, shape: ModelShape, *, uniform: bool) -> tuple[CheckpointLocation, ...]:
    """Return all possible locations of an entry in checkpoints of different writers.

    :func:`checkpoint_location` is first, then the canonical spelling, then that of Megatron's local spec, which stores
    the norm before experts as if it were fused.
    """
    canonical_name = entry.bound.row.megatron
    spellings = (entry.bound.te_name, canonical_name, local_spelling(canonical_name))
    return tuple(_place(entry, name, shape, uniform) for name in dict.fromkeys(spellings))


def _place(entry: Entry, template: str, shape: ModelShape, uniform: bool) -> CheckpointLocation:
    if entry.layer is None:
        return CheckpointLocation(entry.name, (), ())
    layer = "" if uniform else f"{entry.layer}."
    index: Shape = (entry.layer,) if uniform else ()
    axes: Shape = (len(shape.moe),) if uniform else ()
    template = template.replace("{layer}.", layer)
    if entry.expert is not None:
        template = template.replace("{expert}.", "experts.")
        index, axes = (*index, entry.expert), (*axes, shape.dims["E"])
    return CheckpointLocation(template, index, axes)


def padded_rows(rows: int, size: int, padded_vocab: int | None = None) -> int:
    """Return the rows of a padded vocabulary: ``padded_vocab``, or the next multiple of ``size`` if it is None."""
    padded = padded_vocab if padded_vocab is not None else -(-rows // size) * size
    if padded < rows or padded % size:
        raise BridgeError(
            f"a padded vocabulary of {padded} must hold {rows} rows and be a multiple of tp={size}: leave it out, "
            "to use the smallest one"
        )
    return padded


def check_divisible(entry: Entry, size: int) -> None:
    """Raise :class:`BridgeError` if the entry cannot be split evenly over ``size`` ranks."""
    split = entry.split
    if split.dim is None or split.vocab or size == 1:
        return
    length = entry.shape[split.dim] // split.parts
    units = split.units or length
    if units % size and not (split.shared and size % units == 0 and length % size == 0):
        what = "heads or KV groups" if split.units else f"entries along dim {split.dim}"
        kind = "etp" if entry.is_expert else "tp"
        raise BridgeError(f"{entry.name}: {units} {what} cannot be split over {kind}={size}; use a divisor of {units}")


def local_shape(entry: Entry, size: int, padded_vocab: int | None = None) -> Shape:
    """Return the shape of one rank's shard."""
    split = entry.split
    if split.dim is None:
        return entry.shape
    check_divisible(entry, size)
    shape = list(entry.shape)
    if split.vocab:
        shape[0] = padded_rows(shape[0], size, padded_vocab)
    shape[split.dim] //= size
    return tuple(shape)


def shard(tensor: Tensor, entry: Entry, size: int, rank: int, padded_vocab: int | None = None) -> Tensor:
    """Return the shard of ``rank`` out of ``size``: a view if the shard is one contiguous run, else a copy.

    ``tensor`` has the entry's global shape, without padding of the vocabulary.
    """
    split = entry.split
    if split.dim is None:
        return tensor
    check_divisible(entry, size)
    if split.vocab:
        padded = padded_rows(tensor.shape[0], size, padded_vocab)
        rows = padded // size
        share = tensor[rank * rows : (rank + 1) * rows]
        missing = rows - share.shape[0]
        return share if not missing else torch.cat([share, share.new_zeros(missing, *share.shape[1:])])
    pieces = [part.chunk(size, dim=split.dim)[rank] for part in tensor.chunk(split.parts)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unshard(shares: Sequence[Tensor], entry: Entry) -> Tensor:
    """Join one shard per rank to the global tensor, without vocabulary padding; the inverse of :func:`shard`."""
    split = entry.split
    if split.dim is None or len(shares) == 1:
        full = shares[0]
        return full[: entry.shape[0]] if split.vocab else full
    if split.vocab:
        return torch.cat(list(shares))[: entry.shape[0]]
    by_part = zip(*(share.chunk(split.parts) for share in shares), strict=True)
    whole_parts = [torch.cat(pieces, dim=split.dim) for pieces in by_part]
    return whole_parts[0] if len(whole_parts) == 1 else torch.cat(whole_parts)


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
    kind = type(entry.bound.conversion)
    if "blocks" in vars(kind):
        return entry.bound.conversion.blocks(entry.shape[0])
    raise BridgeError(
        f"{entry.name}: the table does not say which matrices {kind.__name__} fuses: give it a method `blocks`, "
        "or train with optimizer=adam"
    )


def without_split(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a message for each kind of weight that :func:`matrix_blocks` cannot split."""
    for entry in {each.bound.row.megatron: each for each in entries}.values():
        try:
            matrix_blocks(entry)
        except BridgeError as error:
            yield str(error)
