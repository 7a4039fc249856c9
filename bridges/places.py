"""Where an entry of the table is: its name in a built model, its key and position in a distributed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from bridges.names import EXPERTS, local_spelling
from bridges.rows import ModelShape, Shape
from bridges.rules import Entry


def module_name(entry: Entry, spec: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """Return the name of an entry inside a built model: the inverse of :func:`bridges.names.canonical`.

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
class CheckpointPlace:
    """Where an entry lies in a distributed checkpoint: ``key``, the index on each leading axis (layer, expert), the
    length of those axes. The tensor under ``key`` has shape ``[*axes, *entry.shape]``."""

    key: str
    index: Shape
    axes: Shape


def checkpoint_place(entry: Entry, shape: ModelShape, *, uniform: bool | None = None) -> CheckpointPlace:
    """Return key and position of an entry in a ``torch_dist`` checkpoint.

    Models whose layers all hold the same parameters have a leading layer axis unless ``uniform`` is False
    (``TransformerBlock.sharded_state_dict``: ``non_homogeneous_layers``); the others have the layer in the key.
    """
    return _place(entry, entry.bound.te_name, shape, shape.uniform if uniform is None else uniform)


def checkpoint_places(entry: Entry, shape: ModelShape, *, uniform: bool) -> tuple[CheckpointPlace, ...]:
    """Return where other writers may have put an entry: :func:`checkpoint_place` first, then the canonical spelling,
    then that of Megatron's local spec, which stores the norm before experts as if it were fused."""
    canonical_name = entry.bound.row.megatron
    spellings = (entry.bound.te_name, canonical_name, local_spelling(canonical_name))
    return tuple(_place(entry, name, shape, uniform) for name in dict.fromkeys(spellings))


def _place(entry: Entry, template: str, shape: ModelShape, uniform: bool) -> CheckpointPlace:
    if entry.layer is None:
        return CheckpointPlace(entry.name, (), ())
    layer = "" if uniform else f"{entry.layer}."
    index: Shape = (entry.layer,) if uniform else ()
    axes: Shape = (len(shape.moe),) if uniform else ()
    template = template.replace("{layer}.", layer)
    if entry.expert is not None:
        template = template.replace("{expert}.", "experts.")
        index, axes = (*index, entry.expert), (*axes, shape.dims["E"])
    return CheckpointPlace(template, index, axes)
