"""Experts without Transformer Engine: all local experts in one module, with grouped GEMMs.

Megatron 0.19 without Transformer Engine has only ``SequentialMLP``, one module and several autograd nodes per expert.
Here the weights of all local experts are two tensors, and a layer is two grouped GEMMs and one activation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from skyrl_megatron.runtime.cpu.gemm import grouped_gemm

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class GroupedLinear(torch.nn.Module):
    """One linear map per local expert: ``weight`` [E, out, in], and ``bias`` [E, out] or None.

    ``split``: the dimension of one expert's matrix that is split over etp, 0 or 1. ``parts``: along dim 0 the matrix
    is this many pieces, each split on its own (2: gate rows, then up rows).
    """

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        *,
        init: Callable[[Tensor], object],
        split: int,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.experts, self.groups, self.split, self.parts = experts, groups, split, parts
        self.total_experts = config.num_moe_experts
        etp = groups.expt_tp.size()
        shape = [out_features, in_features]
        shape[split] //= etp
        where: dict[str, Any] = {} if config.use_cpu_initialization else {"device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(experts, *shape, dtype=config.params_dtype, **where))
        self.register_parameter("bias", None)
        if config.add_bias_linear:
            self.bias = torch.nn.Parameter(torch.zeros(experts, shape[0], dtype=config.params_dtype, **where))
        if config.perform_initialization:
            for matrix in self.weight.data:
                init(matrix)
        parameter: Any  # Megatron keeps its facts about a parameter as attributes of it
        for parameter in self.parameters():
            parameter.allreduce = False  # gradients are summed over expert-data-parallel ranks only
            split_over_etp = parameter is self.weight or split == 0
            parameter.tensor_model_parallel = split_over_etp  # every etp rank's share counts in the gradient norm
            if split_over_etp:
                parameter.partition_dim, parameter.partition_stride = 1 + split, parts

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Map rows sorted by expert, [n, in] → [n, out]; the bias is left to the caller."""
        return grouped_gemm(x, self.weight, tokens_per_expert)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe ``weight`` and ``bias`` with an axis of all experts before the matrix."""
        return {
            f"{prefix}{name}": ShardedTensorFactory(
                f"{prefix}{name}",
                tensor,
                functools.partial(self._shards, offsets=tuple(sharded_offsets), is_bias=name == "bias"),
                functools.partial(_merge_shards, parts=self.parts),
                replica_id=(0, 0, self.groups.expt_dp.rank()),
            )
            for name, tensor in self.named_parameters()
        }

    @torch.no_grad()
    def _shards(
        self,
        key: str,
        tensor: Tensor,
        replica_id: Any,
        flattened_range: Any,
        *,
        offsets: tuple[Any, ...],
        is_bias: bool,
    ) -> list[ShardedTensor]:
        """Make one ShardedTensor per local expert and part; inverse: :func:`_merge_shards`."""
        etp, rank = self.groups.expt_tp.size(), self.groups.expt_tp.rank()
        replicated = is_bias and self.split == 1
        if replicated:
            replica_id = (replica_id[0], rank, replica_id[2])
        first = self.groups.ep.rank() * self.experts
        shards = []
        for expert, matrix in enumerate(tensor):
            places = [*offsets, (len(offsets), first + expert, self.total_experts)]
            axis = len(places) + self.split
            for part, piece in enumerate(matrix.chunk(self.parts, 0)):
                at = [] if replicated else [(axis, part * etp + rank, self.parts * etp)]
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        key, piece, *places, *at, replica_id=replica_id, prepend_axis_num=len(places)
                    )
                )
        return shards


@torch.no_grad()
def _merge_shards(shards: list[Tensor], *, parts: int) -> Tensor:
    """Stack [expert · part] tensors, in order, as the module's tensor with a leading expert axis."""
    return torch.stack([torch.cat(shards[i : i + parts]) for i in range(0, len(shards), parts)])


class GroupedExperts(torch.nn.Module):
    """Gated MLPs of this rank's experts. E local experts, H hidden, f = moe_ffn_hidden_size.

    ``linear_fc1.weight`` [E, 2f / etp, H] holds gate rows, then up rows; ``linear_fc2.weight`` [E, H, f / etp]. Under
    etp the dispatcher gathers the tokens before and sums the outputs after, so the GEMMs here stay local. Biases are
    those of gpt-oss, scaled by the routing probability; that of ``linear_fc2`` is added on etp rank 0 only,
    because outputs are summed over etp.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert pg_collection is not None and config.gated_linear_unit
        self.config, self.num_local_experts, self.groups = config, num_local_experts, pg_collection
        make = functools.partial(GroupedLinear, num_local_experts, config=config, groups=pg_collection)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = make(2 * ffn, hidden, init=config.init_method, split=0, parts=2)
        self.linear_fc2 = make(hidden, ffn, init=config.output_layer_init_method, split=1)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Map rows sorted by local expert, [n, H] → ([n, H], None). ``tokens_per_expert``: [E]; ``probs``: [n]."""
        h = self.linear_fc1(hidden, tokens_per_expert)
        expert_of_row = None
        if self.linear_fc1.bias is not None:
            counts = tokens_per_expert.to(hidden.device)
            expert_of_row = torch.repeat_interleave(
                torch.arange(self.num_local_experts, device=hidden.device), counts, output_size=len(hidden)
            )
            h = h + self.linear_fc1.bias[expert_of_row]
        h = self._gate(h) * probs.unsqueeze(-1).to(h.dtype)
        out = self.linear_fc2(h, tokens_per_expert)
        if self.linear_fc2.bias is not None and self.groups.expt_tp.rank() == 0:
            out = out + self.linear_fc2.bias[expert_of_row] * probs.unsqueeze(-1).to(out.dtype)
        return out, None

    def _gate(self, h: Tensor) -> Tensor:
        """Return activation(gate) · (up + offset), clamped where the config says so (transformer/mlp.py, glu)."""
        gate, up = h.chunk(2, dim=-1)
        limit = self.config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        offset = self.config.glu_linear_offset
        gated: Tensor = self.config.activation_func(gate) * (up + offset if offset else up)
        return gated

    def backward_dw(self) -> None:
        """Do nothing: Megatron calls this where weight gradients may be delayed; here they are not."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weights with keys and shapes of Transformer Engine's grouped experts."""
        state = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            for key, shards in linear.sharded_state_dict(f"{name}.", sharded_offsets, metadata).items():
                shards.key = f"{prefix}experts.{key}"
                state[f"{prefix}{key}"] = shards
        return state
