"""The tensors of a HF folder compared with a model's, with a critic's value head in place of the LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.errors import BridgeError
from bridges.plan import Plan
from bridges.source import Source

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import Head

EXPORTED = "score.weight"
"""Name under which a head [1, H] is written, and found whatever the prefix: that of ``…ForTokenClassification``."""


def check_tensors(plan: Plan, source: Source, head: Head, prefix: str) -> str | None:
    """Compare a folder with ``plan``; return the name of its value head's weight, None if it has none.

    ``prefix``: ``trainer.algorithm.value_head_prefix``; its tensor goes before :data:`EXPORTED`. A policy does without
    value heads, a critic without an LM head. Raises BridgeError naming the tensors: those that differ, a critic's head
    of another shape than [1, H], or one with a bias, which would be lost.
    """
    shapes, where = dict(source.shapes()), str(source.path)
    found = {}
    for name in (f"{prefix}.weight", EXPORTED):
        for tensor in (name, _bias(name)):
            if tensor in shapes and tensor not in plan.hf:
                found[tensor] = shapes.pop(tensor)
    if head == "value":
        shapes = {name: shape for name, shape in plan.hf.items() if name == "lm_head.weight"} | shapes
    plan.check(shapes, where)
    weight = next((name for name in found if name.endswith(".weight")), None)
    if weight is None or head != "value":
        return None
    hidden = plan.shape.dims["H"]
    if found[weight] != (1, hidden):
        raise BridgeError(
            f"{where}: {weight} is {list(found[weight])}, a value head is [1, {hidden}]: name a critic's tensor with "
            "trainer.algorithm.value_head_prefix, or take a folder without one for a head that starts anew"
        )
    if _bias(weight) in found:
        raise BridgeError(f"{where}: {_bias(weight)}: value heads have no bias here; remove the tensor")
    return weight


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
