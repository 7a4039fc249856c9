"""What training keeps of a rank's parameters: weights, gradients and Adam's state, under every option of Megatron.

Read off megatron/core 0.19: gradient buffers (distributed/param_and_grad_buffer.py), the distributed optimizer, which
shards its state over the ranks that sum a gradient (optimizer/distrib_optimizer.py), the precision-aware one, whose
state is Transformer Engine's, and the one that updates a part on the host (optimizer/cpu_offloading).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.names import OPTIMIZER_DTYPES
from skyrl_megatron.config.rules.layout import ParallelConfig
from skyrl_megatron.entrypoints.memory.parameters import StageParameters

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronConfig
    from skyrl_megatron.entrypoints.memory.adapters import Factors

_FP32 = 4


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that each rank of one pipeline stage holds for one role."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    """Master weights and moments in device memory."""
    buffers: int = 0
    """fp32 buffers of the model: router biases."""
    step: int = 0
    """Beside all that while the optimizer steps: fp32 copies of gradients that are not fp32."""
    unscaled: int = 0
    """On the host while a checkpoint is saved or loaded: fp32 copies of state that the optimizer keeps in less."""
    host_optimizer: int = 0
    """What ``optimizer_cpu_offload`` keeps on the host: master weights, moments and gradients, those that are pinned
    rounded up to powers of two as torch's allocator does."""

    @property
    def device(self) -> int:
        """Everything in device memory, from one step to the next."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def rank_bytes(
    count: StageParameters,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    *,
    bf16: bool,
    trained: bool,
    adapters: Factors | None = None,
) -> RankBytes:
    """Return the bytes of each rank of a stage. ``trained``: with gradients and optimizer; where there are
    ``adapters``, of those alone."""
    width = 2 if bf16 else _FP32
    weights, buffers = (count.parameters - count.scaled) * width, count.buffers * _FP32
    weights += count.scaled + count.scales * _FP32
    if adapters is not None:
        weights += adapters.parameters * width
    if not trained:
        return RankBytes(weights, buffers=buffers)
    options = megatron.optimizer_config_kwargs
    frozen = count.router if megatron.freeze_moe_router else 0
    frozen += 0 if megatron.transformer_config_kwargs.get("dsa_indexer_loss_coeff") else count.indexer
    dense, expert = (count.dense - frozen, count.expert) if adapters is None else (adapters.dense, adapters.expert)
    gradient_width = _FP32 if megatron.ddp_config.grad_reduce_in_fp32 else width
    gradients = (dense + expert) * gradient_width
    if options.get("use_distributed_optimizer", True):
        shard = -(-dense // parallel.dp_cp) + -(-expert // parallel.edp)
    else:
        shard = dense + expert
    state = _state(options, bf16)
    copied = 0 if gradient_width == _FP32 else round(shard * state.copied) * _FP32
    on_host = round(shard * state.offloaded)
    return RankBytes(
        weights,
        gradients,
        optimizer=shard * state.kept + (shard - on_host) * state.device,
        buffers=buffers,
        step=copied,
        unscaled=shard * state.unscaled,
        host_optimizer=round(on_host * (state.host + state.pinned * count.pinned_rounding)),
    )


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes of Adam's state for each parameter of a shard."""

    device: int
    """Of those that are updated on the device."""
    kept: int = 0
    """On the device whichever side updates it."""
    host: int = 0
    """Of those that are updated on the host, in pageable memory there."""
    pinned: int = 0
    """And in pinned memory."""
    offloaded: float = 0.0
    """Share of the parameters that is updated on the host."""
    copied: float = 1.0
    """Share of the gradients that is copied to fp32 on the device, unless they are fp32."""
    unscaled: int = 0
    """Of fp32 copies that a checkpoint makes (``runtime/checkpoint/fused_adam.py``)."""


def _state(options: Mapping[str, Any], bf16: bool) -> _State:
    aware = bool(options.get("use_precision_aware_optimizer"))
    if options.get("optimizer_cpu_offload"):
        offloaded = float(options.get("optimizer_offload_fraction") or 0.0)
        # Its moments are fp32 whatever the options say. On the host: master weight, gradient and two moments.
        if aware:  # the master weight is made from a pinned bf16 copy, whose memory the allocator keeps
            return _State(device=12, host=12, pinned=6, offloaded=offloaded, copied=1.0 - offloaded)
        # The distributed optimizer makes fp32 master weights on the device, which stay there beside those on the host.
        return _State(device=8, kept=_FP32 if bf16 else 0, host=8, pinned=8, offloaded=offloaded)
    if not aware:
        return _State(device=12 if bf16 else 8)
    types = [options.get(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")]
    *moments, master = [_width_of(each) for each in types]
    unscaled = _FP32 * sum(map(_is_scaled, types))
    if bf16 and master == _FP32 and options.get("store_param_remainders", True):
        master = 2  # the other half of an fp32 weight is the bf16 weight itself
        unscaled += _FP32
    return _State(device=sum(moments) + master, copied=0.0, unscaled=unscaled)


def _width_of(dtype: object) -> int:
    """Return the bytes of a torch dtype or its name; fp32 where none is given. FP8 has two, because Transformer Engine
    makes the transpose beside it (``runtime/offload.py``), but on Blackwell."""
    return {"float16": 2, "bfloat16": 2, "uint8": 2}.get(_torch_name(dtype), _FP32)


def _is_scaled(dtype: object) -> bool:
    """Tell whether state of this type has a scale beside it, without which a checkpoint stores it."""
    return _torch_name(dtype) in ("float16", "uint8")


def _torch_name(dtype: object) -> str:
    """Return torch's name of a type that is given by any of its names."""
    name = str(dtype).removeprefix("torch.")
    return OPTIMIZER_DTYPES.get(name, name)
