"""How many parameters and bytes each rank holds, from the model's mapping table and the layout: no model is built.

The table (``bridges/``) names every Megatron parameter with its global shape and split, so that the counts are those
of the built model exactly. Bytes follow Megatron's buffers: parameters in the training type, gradients in fp32 unless
told otherwise, Adam's state sharded over the ranks that sum a gradient (megatron/core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridges.plan import Plan
from bridges.rules import Entry
from bridges.shard import local_shape, padded_rows
from skyrl_megatron.config.rules.layout import ParallelConfig, stage_layers

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronConfig


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Numbers of elements that each rank of one pipeline stage holds."""

    dense: int
    """Parameters whose gradients are summed over dp·cp: all but the experts."""
    expert: int
    """Parameters of this rank's experts, whose gradients are summed over edp."""
    buffers: int
    """Elements of fp32 buffers (router biases)."""

    @property
    def parameters(self) -> int:
        """All parameters of a rank."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that each rank of one pipeline stage holds for one role."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and moments on the device."""
    host_optimizer: int
    """The part of them that ``optimizer_cpu_offload`` keeps in host memory."""
    buffers: int
    """Router biases, and the two buckets of a weight sync."""

    @property
    def device(self) -> int:
        """Everything in device memory."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def stage_parameters(plan: Plan, parallel: ParallelConfig, stage: int, *, value_head: bool = False) -> StageParameters:
    """Count the parameters on each rank of pipeline stage ``stage`` (all its chunks; each rank holds as many).

    ``value_head``: a critic, whose last stage has a row of hidden size instead of the output layer.
    """
    layers = {
        layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, len(plan.shape.moe), stage, chunk)
    }
    first, last = stage == 0, stage == parallel.pp - 1
    experts_here = plan.shape.dims.get("E", 0) // parallel.ep
    dense = expert = buffers = 0
    for entry in plan.entries:
        if entry.layer is None:
            here = first if entry.name.startswith("embedding.") else last
            here = here and not (value_head and entry.name.startswith("output_layer."))
        else:
            here = entry.layer in layers
        if not here:
            continue
        if entry.expert is not None:
            if entry.expert < experts_here:  # every ep rank holds as many
                expert += _local_size(entry, parallel.etp)
        elif entry.is_buffer:
            buffers += _local_size(entry, parallel.tp)
        else:
            dense += _local_size(entry, parallel.tp)
    dims = plan.shape.dims
    if last and value_head:
        dense += dims["H"]
    elif last and not first and "untied" not in plan.shape.flags:  # the last stage's copy of the embedding
        dense += padded_rows(dims["V"], parallel.tp) // parallel.tp * dims["H"]
    return StageParameters(dense, expert, buffers)


def _local_size(entry: Entry, size: int) -> int:
    return math.prod(local_shape(entry, size))


def model_parameters(plan: Plan) -> int:
    """Count the parameters of the whole model, vocabulary not padded, tied embeddings once."""
    return sum(math.prod(entry.shape) for entry in plan.entries if not entry.is_buffer)


def active_parameters(plan: Plan, top_k: int) -> int:
    """Count the parameters that take part in one token: of the routed experts, ``top_k`` of each layer."""
    return sum(
        math.prod(entry.shape)
        for entry in plan.entries
        if not entry.is_buffer and (entry.expert is None or entry.expert < top_k)
    )


def rank_bytes(
    count: StageParameters,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    *,
    bf16: bool,
    trained: bool,
    bucket_bytes: int = 0,
) -> RankBytes:
    """Return the bytes of each rank of a stage. ``trained``: with gradients and optimizer.

    ``bucket_bytes``: size of one bucket of a weight sync.
    """
    width = 2 if bf16 else 4
    weights = count.parameters * width
    buckets = 2 * min(bucket_bytes, weights)
    if not trained:
        return RankBytes(weights, 0, 0, 0, count.buffers * 4 + buckets)
    gradients = count.parameters * (4 if megatron.ddp_config.grad_reduce_in_fp32 else width)
    shard = -(-count.dense // parallel.dp_cp) + -(-count.expert // parallel.edp)
    state = shard * _optimizer_width(megatron, bf16)
    kwargs = megatron.optimizer_config_kwargs
    on_host = float(kwargs.get("optimizer_offload_fraction") or 0) if kwargs.get("optimizer_cpu_offload") else 0.0
    host = round(state * on_host)
    return RankBytes(weights, gradients, state - host, host, count.buffers * 4 + buckets)


def _optimizer_width(megatron: MegatronConfig, bf16: bool) -> int:
    """Return bytes of Adam's state per parameter: two moments, and an fp32 master copy unless parameters are fp32."""
    kwargs = megatron.optimizer_config_kwargs
    if not kwargs.get("use_precision_aware_optimizer"):
        return 12 if bf16 else 8
    moments = sum(_width_of(kwargs.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    return moments + (_width_of(kwargs.get("main_params_dtype")) if bf16 else 0)


def _width_of(dtype: object) -> int:
    """Return the bytes of a torch dtype or its name; fp32 where none is given."""
    name = str(dtype).removeprefix("torch.")
    return {"float16": 2, "bfloat16": 2, "fp16": 2, "bf16": 2, "uint8": 1, "fp8": 1}.get(name, 4)
