"""Canonical names of Megatron parameters, independent of the layer spec and the expert module.

Canonical names are global: norms are separate modules and experts are numbered, e.g.
``decoder.layers.3.input_layernorm.weight`` and ``decoder.layers.3.mlp.experts.7.linear_fc1.weight``. Other spellings:

=====================  ===========================================================================================
local layer spec       canonical, but ``mlp.experts.local_experts.3.linear_fc1.weight`` (SequentialMLP)
Transformer Engine     norms in the next linear layer (``self_attention.linear_qkv.layer_norm_weight``), experts
                       grouped (``mlp.experts.linear_fc1.weight3``)
checkpoint key         Transformer Engine's, experts under ``mlp.experts.experts.linear_fc1.weight``, with layers and
                       experts as leading axes of the tensor instead of numbers in the name
=====================  ===========================================================================================

Module names count layers within a pipeline stage and experts within a rank, so callers pass the offsets. The functions
use no regular expressions; a name costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

LAYERS = "decoder.layers."
EXPERTS = "mlp.experts."

# Part after the layer number: canonical → Transformer Engine's spelling, where a linear layer holds its input norm.
_NORM_BEFORE_QKV = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_NORMS_IN_MLA = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_NORM_BEFORE_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_ALIASES = {
    te + leaf: plain + leaf
    for plain, te in (_NORM_BEFORE_QKV | _NORMS_IN_MLA | _NORM_BEFORE_MLP).items()
    for leaf in ("weight", "bias")
}
_WRAPPERS = ("module.", "model.")  # Megatron's DDP and Float16Module


def canonical(
    name: str, *, layer_offset: int = 0, expert: Callable[[int, int], int] = lambda layer, number: number
) -> str:
    """Return the canonical global name of a module's parameter or buffer, for any layer spec.

    ``layer_offset``: number of the chunk's first layer; ``expert``: maps a layer and the position of an expert within
    the rank to the expert's number.
    """
    if not name.startswith(LAYERS):
        while name.startswith(_WRAPPERS):
            name = name.partition(".")[2]
        if not name.startswith(LAYERS):
            return name
    layer, _, tail = name[len(LAYERS) :].partition(".")
    if layer_offset:
        layer = str(int(layer) + layer_offset)
    if not tail.startswith(EXPERTS):
        return f"{LAYERS}{layer}.{_ALIASES.get(tail, tail)}"
    number, leaf = _expert(tail)
    return f"{LAYERS}{layer}.{EXPERTS}{expert(int(layer), number)}.{leaf}"


@lru_cache(maxsize=8192)  # every layer has the same names
def _expert(tail: str) -> tuple[int, str]:
    """Split ``local_experts.3.linear_fc1.weight``, ``linear_fc1.weight3`` or ``3.linear_fc1.weight`` into the position
    of the expert and the rest."""
    tail = tail[len(EXPERTS) :]
    if tail[-1].isdigit():
        leaf = tail.rstrip("0123456789")
        return int(tail[len(leaf) :]), leaf
    number, _, leaf = tail.removeprefix("local_experts.").partition(".")
    return int(number), leaf


def fused_norms(*, mla: bool, moe: bool, delta_net: bool = False) -> dict[str, str]:
    """Return the norms that Transformer Engine fuses into the next linear layer: canonical → fused prefix.

    ``mla``: multi-latent attention. ``moe``: the layer has experts. ``delta_net``: the layer has a gated delta net
    (``runtime/model/delta_net.py``). The norms before experts and delta nets are not fused.
    """
    before = _NORMS_IN_MLA if mla else {} if delta_net else _NORM_BEFORE_QKV
    return before | ({} if moe else _NORM_BEFORE_MLP)


def te_spelling(name: str, *, mla: bool, moe: bool, delta_net: bool = False) -> str:
    """Translate a canonical template (``decoder.layers.{layer}.…``) to its name in Transformer Engine's spec."""
    for plain, fused in fused_norms(mla=mla, moe=moe, delta_net=delta_net).items():
        name = name.replace("}." + plain, "}." + fused)
    return name


def local_spelling(name: str) -> str:
    """Translate a template to its key in checkpoints of Megatron's local spec, which fuses the norm before experts."""
    ((plain, fused),) = _NORM_BEFORE_MLP.items()
    return name.replace(plain, fused)
