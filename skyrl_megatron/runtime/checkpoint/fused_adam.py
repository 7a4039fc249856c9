"""What Transformer Engine's precision-aware Adam keeps of a parameter, as checkpoints hold it.

A checkpoint has fp32 masters and unscaled moments whichever optimizer saves it, so that another can go on. What this
one keeps in fp32 or bf16 is stored from its own memory. FP16 and FP8 states are unscaled to fp32 first, and masters of
which it keeps the lower half alone (``store_param_remainders``) are put together; both lie in new memory on the host.

An fp32 master is then a bf16 weight, its upper half rounded, and an int16 remainder: as integers,
``master = weight · 2**16 + remainder`` (transformer_engine/common/multi_tensor/adam.cu, which takes one off the weight
where the remainder is negative). A master half-way between two weights that was rounded down, as torch rounds to even,
has no such remainder; the nearest is one unit in its last place away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_HALF = 1 << 16


def make_state(adam: Any) -> None:
    """Make the state of parameters that have none, as its first step would: moments of zeros, masters of the weights.

    Megatron's ``init_state_fn`` (megatron/core/optimizer/__init__.py) leaves out an argument that it has to be given.
    """
    for group in adam.param_groups:
        for shard in group["params"]:
            if not adam.state[shard]:
                adam.initialize_state(shard, adam.store_param_remainders and shard.dtype == torch.bfloat16)


def stored(adam: Any, shard: Tensor) -> dict[str, Tensor]:
    """Return ``param`` and the moments, of fp32 or bf16, in the optimizer's own memory where it holds them so."""
    found = {}
    for name in adam.state[shard]:
        state = adam.state[shard][name]
        if _is_remainder(name, state):
            found["param"] = joined(shard, state).cpu()
        else:
            plain = adam.get_unscaled_state(shard, name, skip_unscale=state.dtype == torch.bfloat16)
            found["param" if name == "master_param" else name] = plain if plain is state else plain.cpu()
    return found


def put_back(adam: Any, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Take the changed ``tensors`` of :func:`stored` into the state. The weights in ``shard`` must be loaded."""
    for name, value in tensors.items():
        state_name = "master_param" if name == "param" else name
        state = adam.state[shard][state_name]
        if _is_remainder(state_name, state):
            state.copy_(remainder(shard, value.to(shard.device)))
        elif value.data_ptr() != state.data_ptr():
            adam.set_scaled_state(shard, state_name, value.to(shard.device))


def _is_remainder(name: str, state: Tensor) -> bool:
    return name == "master_param" and state.dtype == torch.int16


def joined(weight: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 ``weight`` and int16 remainders ``lower``, in new memory."""
    bits = weight.detach().view(torch.int16).to(torch.int32)
    return bits.mul_(_HALF).add_(lower).view(torch.float32)


def remainder(weight: Tensor, master: Tensor) -> Tensor:
    """Return the int16 remainders that make fp32 ``master`` of the bf16 ``weight`` that it was rounded to."""
    bits = weight.detach().view(torch.int16).to(torch.int32).mul_(_HALF)
    return torch.sub(master.view(torch.int32), bits).clamp_(-_HALF // 2, _HALF // 2 - 1).to(torch.int16)
