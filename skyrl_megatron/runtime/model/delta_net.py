"""Gated delta nets (Qwen3-Next) for packed sequences and any layout. They replace attention in some layers.

Megatron's own module (``megatron.core.ssm.gated_delta_net``) has GPU kernels only and rejects packed sequences without
them. Its input projection is ordered by section; here it is ordered by key head, so that tp splits contiguous rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.runtime.model import delta_kernels
from skyrl_megatron.runtime.model.attention import global_order, local_positions
from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule, l2_normalize, short_convolution
from skyrl_megatron.runtime.model.norm import RMSNorm

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class _Exchange(torch.autograd.Function):
    """Exchanges tokens for heads (``to_heads``) or heads for tokens. Each is the transpose of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.lengths, ctx.group, ctx.to_heads = lengths, group, to_heads
        return (_tokens_to_heads if to_heads else _heads_to_tokens)(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _heads_to_tokens if ctx.to_heads else _tokens_to_heads
        return back(grads[0], ctx.lengths, ctx.group), None, None, None


def _tokens_to_heads(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    cp = group.size()
    received = _all_to_all(x.unflatten(1, (cp, -1)).transpose(0, 1), group)  # [rank of the tokens, p, n / cp, …]
    return received.flatten(0, 1)[global_order(lengths, cp).to(x.device)]


def _heads_to_tokens(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    cp = group.size()
    held = torch.cat([local_positions(lengths, cp, rank) for rank in range(cp)]).to(x.device)
    received = _all_to_all(x[held].unflatten(0, (cp, -1)), group)  # [rank of the heads, p, n / cp, …]
    return received.transpose(0, 1).flatten(1, 2)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[rank]`` to each rank of the group; return the received tensors, by sender."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def tokens_to_heads(x: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Exchange [P / cp, n, …], this rank's tokens with all heads, for [P, n / cp, …]; differentiable.

    The result has all tokens, in the packed global order, with a cp-th of the heads.
    """
    if group.size() == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, padded_lengths, group, True)  # type: ignore[no-untyped-call]
    return exchanged


def heads_to_tokens(x: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Undo :func:`tokens_to_heads`: [P, n / cp, …] → [P / cp, n, …]."""
    if group.size() == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, padded_lengths, group, False)  # type: ignore[no-untyped-call]
    return exchanged


class GatedDeltaNet(MegatronModule):
    """A short causal convolution of queries, keys and values, the gated delta rule, and a gated norm of the result.

    tp splits key heads, each with its value heads. cp exchanges tokens for heads before the convolution and back after
    the norm, because the recurrent state needs the whole sequence.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.groups = layer_number, pg_collection
        keys, self.ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.heads = keys // pg_collection.tp.size()  # key heads of this rank, before cp
        self.value_rows = self.ratio * self.value_size
        self.mixed_rows = 2 * self.key_size + self.value_rows
        rows = self.mixed_rows + self.value_rows + 2 * self.ratio
        linear: dict[str, Any] = dict(
            config=config, bias=False, skip_bias_add=True, is_expert=False, tp_group=pg_collection.tp
        )
        self.linear_in = ColumnParallelLinear(
            config.hidden_size, keys * rows, init_method=config.init_method, gather_output=False, **linear
        )
        self.linear_out = RowParallelLinear(
            keys * self.value_rows,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        self.conv_weight = _split_over_heads(config, self.heads * self.mixed_rows, 1, config.linear_conv_kernel_dim)
        self.A_log = _split_over_heads(config, self.heads * self.ratio)
        self.dt_bias = _split_over_heads(config, self.heads * self.ratio)
        self.out_norm = RMSNorm(config, self.value_size, config.layernorm_epsilon, zero_centred=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix [s, b, hidden] along each sequence → (same shape, no bias)."""
        mixed, _ = self.linear_in(hidden_states)
        length, batch = mixed.shape[:2]
        lengths = (length,) * batch if packed_seq_params is None else packed_seq_params.padded_lengths
        heads = mixed.transpose(0, 1).flatten(0, 1).unflatten(-1, (self.heads, -1))  # [p, n, rows]
        pack = tokens_to_heads(heads, lengths, self.groups.cp)
        rows = getattr(packed_seq_params, "rows", None)
        # A segment starts from the state and the last inputs of the one before it. Here whole rows are mixed, and the
        # outputs of a shared token are those of its first row: equal forward and backward, without its projections.
        result = self._mix(pack, lengths) if rows is None else rows.mixed(pack, self._mix)
        result = heads_to_tokens(result, lengths, self.groups.cp).flatten(1)
        # Megatron's layers expect [s, b, …]
        out, _ = self.linear_out(result.unflatten(0, (batch, length)).transpose(0, 1))
        return out, None

    def _mix(self, heads: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Mix whole sequences for some key heads: [P, n, rows] → [P, n, value rows]."""
        fused = delta_kernels.use_kernels(heads.dtype, self.key_size, on_gpu=heads.is_cuda)
        mixed, gate, beta, step = heads.split([self.mixed_rows, self.value_rows, self.ratio, self.ratio], -1)
        weight = self._mine(self.conv_weight).squeeze(1)
        if fused:
            starts = delta_kernels.sequence_starts(lengths, heads.device)
            mixed = delta_kernels.convolve(mixed.flatten(1), weight, starts)
        else:
            plan = chunk_plan(lengths, heads.device)
            mixed = F.silu(short_convolution(mixed.flatten(1), weight, plan.positions))
        q, k, v = mixed.unflatten(1, (heads.shape[1], -1)).split([self.key_size, self.key_size, self.value_rows], -1)
        shape = (heads.shape[1], self.ratio)
        # fp32 for the decay: its exponential is taken over whole sequences
        rate = self._mine(self.A_log).float().exp().view(shape)
        kept = -rate * F.softplus(step.float() + self._mine(self.dt_bias).float().view(shape))
        v, beta = v.unflatten(-1, (self.ratio, self.value_size)), beta.sigmoid()
        if fused:
            out = delta_kernels.gated_delta_rule(q, k, v, kept, beta, starts)
        else:
            # back to the layer's dtype only here: the rule itself runs in fp32
            out = gated_delta_rule(l2_normalize(q), l2_normalize(k), v, kept, beta, plan)[0].to(heads.dtype)
        gate = gate.view(out.shape)
        normed: Tensor = (self.out_norm(out) * F.silu(gate.float())).to(heads.dtype).flatten(2)
        return normed

    def _mine(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter [rows of the heads, …] for the heads of this cp rank."""
        cp = self.groups.cp
        mine: Tensor = parameter.chunk(cp.size())[cp.rank()]
        return mine

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Declare these parameters as split by head; Megatron's default would declare them as replicated."""
        parameters = {name: parameter for name, parameter in self.named_parameters(recurse=False)}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(parameters, 0),
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=self.groups.dp_cp,
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.groups.tp
            )
        return sharded


def _split_over_heads(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    parameter: Any = torch.nn.Parameter(torch.zeros(*shape, dtype=config.params_dtype))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    split: torch.nn.Parameter = parameter
    return split
