"""Adapters in the form that PEFT gives models whose experts are one tensor per layer."""

import torch

from bridges.errors import BridgeError
from bridges.peft import PREFIX


def stack_experts(factors, plan):
    """Convert factors named ``module.A`` and ``module.B`` to PEFT's tensors with stacked experts.

    If gate and up have separate ``A`` factors, they become one pair of twice the rank, with zeros in ``B``; the folder
    must then list them in ``rank_pattern``. Raises :class:`BridgeError` if only some experts of a layer are adapted.
    """
    left = dict(factors)
    stacked = {}
    layers = sorted({e.layer for e in plan.entries if e.is_expert and e.layer is not None})
    for layer in layers:
        for kind, inner in (("linear_fc1", ".base_layer"), ("linear_fc2", "")):
            entries = [
                e for e in plan.entries if e.layer == layer and e.is_expert and e.name.endswith(f".{kind}.weight")
            ]
            names = [[piece.name.removesuffix(".weight") for piece in entry.hf] for entry in entries]
            present = [f"{name}.A" in left for modules in names for name in modules]
            if not any(present):
                continue
            if not all(present):
                raise BridgeError(f"layer {layer}: only some experts are adapted; write them one by one")
            pairs = [join([(left.pop(f"{m}.A"), left.pop(f"{m}.B")) for m in modules]) for modules in names]
            prefix = names[0][0].partition(".experts.")[0] + ".experts" + inner
            stacked[f"{PREFIX}{prefix}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
            stacked[f"{PREFIX}{prefix}.lora_B.weight"] = torch.stack([b for _, b in pairs], dim=-1).flatten(1)
    plain = {f"{PREFIX}{name[:-2]}.lora_{name[-1]}.weight": tensor for name, tensor in left.items()}
    return plain | stacked


def join(pairs):
    """Join the factors of several projections into one pair."""
    if all(torch.equal(a, pairs[0][0]) for a, _ in pairs[1:]):
        return pairs[0][0], torch.cat([b for _, b in pairs])
    return torch.cat([a for a, _ in pairs]), torch.block_diag(*[b for _, b in pairs])
