"""One spelling for every Megatron parameter, whichever layer spec or expert module holds it.

Canonical names are global and plain: norms where they stand in the architecture, experts spelled out by number, e.g.
``decoder.layers.3.input_layernorm.weight`` and ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``. Other spellings:

=====================  ===========================================================================================
local layer spec       canonical, but ``mlp.experts.local_experts.3.linear_fc1.weight`` (SequentialMLP)
Transformer Engine     norms inside the next matrix (``self_attention.linear_qkv.layer_norm_weight``), experts grouped
                       (``mlp.experts.linear_fc1.weight3``)
checkpoint key         Transformer Engine's, experts under ``mlp.experts.experts.linear_fc1.weight``, with layers and
                       experts as leading axes of the tensor instead of numbers in the name
=====================  ===========================================================================================

Module names count layers within a pipeline stage and experts within a rank: pass the offsets. No regular
expressions: a name costs about a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bridges.rows import ModelShape, Shape
from bridges.rules import Entry

LAYERS = "decoder.layers."
EXPERTS = "mlp.experts."

# What follows the layer number: Transformer Engine's spelling → canonical.
_PLAIN = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_ALIASES = {te + leaf: plain + leaf for te, plain in _PLAIN.items() for leaf in ("weight", "bias")}
_WRAPPERS = ("module.", "model.")  # Megatron's DDP and Float16Module


def canonical(name: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """The canonical global name of a module's parameter or buffer, whichever spec named it.

    ``layer_offset``: number of the chunk's first layer; ``expert_offset``: number of the rank's first expert.
    """
    if not name.startswith(LAYERS):
        while name.startswith(_WRAPPERS):
            name = name.partition(".")[2]
        if not name.startswith(LAYERS):
            return name
    layer, _, tail = name[len(LAYERS) :].partition(".")
    if layer_offset:
        layer = str(int(layer) + layer_offset)
    return f"{LAYERS}{layer}.{_canonical_tail(tail, expert_offset)}"


@lru_cache(maxsize=8192)  # the same few names per layer and expert come again in every layer
def _canonical_tail(tail: str, expert_offset: int) -> str:
    """``local_experts.3.linear_fc1.weight``, ``linear_fc1.weight3`` or ``3.linear_fc1.weight`` → canonical."""
    if not tail.startswith(EXPERTS):
        return _ALIASES.get(tail, tail)
    tail = tail[len(EXPERTS) :]
    if tail[-1].isdigit():
        leaf = tail.rstrip("0123456789")
        number = tail[len(leaf) :]
    else:
        number, _, leaf = tail.removeprefix("local_experts.").partition(".")
    return f"{EXPERTS}{int(number) + expert_offset}.{leaf}"


def module_name(entry: Entry, spec: str, *, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """The name of an entry inside a built model: the inverse of :func:`canonical`.

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
    """Key and position of an entry in a ``torch_dist`` checkpoint.

    Models whose layers all hold the same parameters have a leading layer axis unless ``uniform`` is False
    (``TransformerBlock.sharded_state_dict``: ``non_homogeneous_layers``); the others have the layer in the key.
    """
    return _place(entry, entry.bound.te_name, shape, shape.uniform if uniform is None else uniform)


def checkpoint_places(entry: Entry, shape: ModelShape, *, uniform: bool) -> tuple[CheckpointPlace, ...]:
    """Where other writers may have put an entry: :func:`checkpoint_place` first, then the canonical spelling, then
    that of Megatron's local spec, which stores the norm before experts as if it were fused."""
    canonical_name = entry.bound.row.megatron
    spellings = (entry.bound.te_name, canonical_name, canonical_name.replace("pre_mlp_layernorm.", _FUSED_NORM))
    return tuple(_place(entry, name, shape, uniform) for name in dict.fromkeys(spellings))


_FUSED_NORM = "mlp.linear_fc1.layer_norm_"


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
