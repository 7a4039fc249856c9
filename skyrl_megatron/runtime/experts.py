"""Experts of the layer spec without Transformer Engine: all local experts in one module, their products batched.

Megatron 0.19 without Transformer Engine has only ``SequentialMLP``, one module and several autograd nodes per expert.
Here the weights of all local experts are two tensors, and a layer is two grouped products and one activation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class _GroupedProduct(torch.autograd.Function):
    """y[rows of expert e] = x[rows of expert e] @ w[e]ᵀ, with one autograd node for all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                torch.mm(x[start : start + count], weight[expert].t(), out=out[start : start + count])
            start += count
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        start = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(start, start + count)
            if grad_x is not None and count:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])  # zeros for an expert without tokens
            start += count
        return grad_x, grad_weight, None


def grouped_product(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """[n, k] sorted by expert × [E, m, k] → [n, m]; ``tokens_per_expert`` [E] sums to n.

    CUDA half precision runs ``grouped_mm`` (one kernel; strides must be multiples of 16 bytes); everything else runs
    one product per expert.
    """
    aligned = (x.shape[1] * x.element_size()) % 16 == 0 and (weight.shape[1] * x.element_size()) % 16 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0]:
        ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    product: Tensor = _GroupedProduct.apply(x, weight, tokens_per_expert.tolist())
    return product


class GroupedExperts(torch.nn.Module):
    """Gated MLPs of this rank's experts. E local experts, H hidden, f = moe_ffn_hidden_size / etp.

    ``linear_fc1`` [E, 2f, H] holds gate rows, then up rows; ``linear_fc2`` [E, H, f]. Under etp the dispatcher gathers
    the tokens before and sums the outputs after, so the products here stay local. Biases as in gpt-oss, scaled by the
    routing probability, come on etp rank 0 only for ``linear_fc2``, because outputs are summed over etp.
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
        ffn = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        make = functools.partial(torch.empty, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.linear_fc1 = torch.nn.Parameter(make(num_local_experts, 2 * ffn, config.hidden_size))
        self.linear_fc2 = torch.nn.Parameter(make(num_local_experts, config.hidden_size, ffn))
        self.bias1 = self.bias2 = None
        if config.add_bias_linear:
            self.bias1 = torch.nn.Parameter(make(num_local_experts, 2 * ffn).zero_())
            self.bias2 = torch.nn.Parameter(make(num_local_experts, config.hidden_size).zero_())
        if config.perform_initialization:
            for expert in range(num_local_experts):
                config.init_method(self.linear_fc1.data[expert])
                config.output_layer_init_method(self.linear_fc2.data[expert])
        for parameter in self.parameters():
            parameter.allreduce = False  # expert gradients are summed over expert-data-parallel ranks only

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``hidden`` [n, H] sorted by local expert, ``tokens_per_expert`` [E], ``probs`` [n] → ([n, H], None)."""
        h = grouped_product(hidden, self.linear_fc1, tokens_per_expert)
        expert_of_row = None
        if self.bias1 is not None:
            counts = tokens_per_expert.to(hidden.device)
            expert_of_row = torch.repeat_interleave(
                torch.arange(self.num_local_experts, device=hidden.device), counts, output_size=len(hidden)
            )
            h = h + self.bias1[expert_of_row]
        h = self._gate(h) * probs.unsqueeze(-1).to(h.dtype)
        out = grouped_product(h, self.linear_fc2, tokens_per_expert)
        if self.bias2 is not None and self.groups.expt_tp.rank() == 0:
            out = out + self.bias2[expert_of_row] * probs.unsqueeze(-1).to(out.dtype)
        return out, None

    def _gate(self, h: Tensor) -> Tensor:
        """activation(gate) · (up + offset), clamped where the config says so (transformer/mlp.py, glu)."""
        gate, up = h.chunk(2, dim=-1)
        limit = self.config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        offset = self.config.glu_linear_offset
        return self.config.activation_func(gate) * (up + offset if offset else up)

    def backward_dw(self) -> None:
        """Weight gradients are computed with the others; Megatron calls this where they may be delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Keys and shapes of Transformer Engine's grouped experts (``experts.linear_fc1.weight`` with an expert axis),
        whichever rank holds which experts; gate and up are sharded over etp each on its own."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors = {"linear_fc1": ("linear_fc1.weight", 2, 0), "linear_fc2": ("linear_fc2.weight", 1, 1)}
        if self.bias1 is not None:
            tensors |= {"bias1": ("linear_fc1.bias", 2, 0), "bias2": ("linear_fc2.bias", 1, None)}
        state = {}
        for attribute, (key, parts, split) in tensors.items():
            state[f"{prefix}{attribute}"] = ShardedTensorFactory(
                f"{prefix}experts.{key}",
                getattr(self, attribute),
                functools.partial(self._shards, parts=parts, split=split, offsets=tuple(sharded_offsets)),
                functools.partial(_merge_shards, parts=parts),
                replica_id=(0, 0, self.groups.expt_dp.rank()),
            )
        return state

    @torch.no_grad()
    def _shards(
        self,
        key: str,
        tensor: Tensor,
        replica_id: Any,
        flattened_range: Any,
        *,
        parts: int,
        split: int | None,
        offsets: tuple,
    ) -> list[ShardedTensor]:
        """One ShardedTensor per local expert and part; inverse: :func:`_merge_shards`."""
        etp, rank = self.groups.expt_tp.size(), self.groups.expt_tp.rank()
        first, total = self.groups.ep.rank() * self.num_local_experts, self.config.num_moe_experts
        if split is None:
            replica_id = (replica_id[0], rank, replica_id[2])
        shards = []
        for expert, matrix in enumerate(tensor):
            places = [*offsets, (len(offsets), first + expert, total)]
            for part, piece in enumerate(matrix.chunk(parts, 0)):
                at = [] if split is None else [(len(places) + split, part * etp + rank, parts * etp)]
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        key, piece, *places, *at, replica_id=replica_id, prepend_axis_num=len(places)
                    )
                )
        return shards


@torch.no_grad()
def _merge_shards(shards: list[Tensor], *, parts: int) -> Tensor:
    """[expert · part] tensors in order → the module's tensor with a leading expert axis."""
    return torch.stack([torch.cat(shards[i : i + parts]) for i in range(0, len(shards), parts)])
