"""Routers, and experts without Transformer Engine: all local experts in one module, with grouped GEMMs.

Megatron 0.19 without Transformer Engine has only ``SequentialMLP``, with one module and several autograd nodes per
expert. Here the weights of all local experts are two tensors, and a layer is two grouped GEMMs and one activation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, te_general_gemm
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from bridges.family import MegatronModelConfig
from skyrl_megatron import device
from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.runtime.cpu_patches import grouped_gemm
from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement
from skyrl_megatron.runtime.model.pass_inputs import PassInput, RoutingReplay, SequenceNumbers, give_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class GroupedLinear(torch.nn.Module):
    """One linear layer per local expert: ``weight`` [E, out, in], and ``bias`` [E, out] or None.

    ``split``: the dimension of one expert's matrix that is split over etp, 0 or 1. ``parts``: number of separately
    split parts of the matrix along dim 0 (2: gate rows, then up rows).
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
        parameter: Any  # Megatron stores metadata of a parameter in its attributes
        for parameter in self.parameters():
            parameter.allreduce = False  # gradients are summed over expert-data-parallel ranks only
            split_over_etp = parameter is self.weight or split == 0
            parameter.tensor_model_parallel = split_over_etp  # makes every etp shard count in the gradient norm
            if split_over_etp:
                parameter.partition_dim, parameter.partition_stride = 1 + split, parts

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Map rows sorted by expert, [n, in] → [n, out]; the caller adds the bias."""
        return grouped_gemm(x, self.weight, tokens_per_expert)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare ``weight`` and ``bias`` with a leading axis of all experts."""
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
        # Megatron's numbering, by slot; checkpoints replace it by the experts' own numbers (rank_state.py).
        first = self.groups.ep.rank() * self.experts
        shards = []
        for expert, matrix in enumerate(tensor):
            leading = [*offsets, (len(offsets), first + expert, self.total_experts)]
            axis = len(leading) + self.split
            for number, part in enumerate(matrix.chunk(self.parts, 0)):
                offset = [] if replicated else [(axis, number * etp + rank, self.parts * etp)]
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        key, part, *leading, *offset, replica_id=replica_id, prepend_axis_num=len(leading)
                    )
                )
        return shards


@torch.no_grad()
def _merge_shards(shards: list[Tensor], *, parts: int) -> Tensor:
    """Concatenate the parts of each expert and stack the experts; ``shards`` are in order [expert · part]."""
    return torch.stack([torch.cat(shards[i : i + parts]) for i in range(0, len(shards), parts)])


class GroupedExperts(torch.nn.Module):
    """Gated MLPs of this rank's experts: E local experts, H hidden size, f = moe_ffn_hidden_size.

    ``linear_fc1.weight`` [E, 2f / etp, H] holds gate rows, then up rows; ``linear_fc2.weight`` [E, H, f / etp]. Under
    etp the dispatcher gathers the tokens before and sums the outputs after, so the GEMMs here are local. Biases are
    for gpt-oss and are scaled by the routing probability. The bias of ``linear_fc2`` is added on etp rank 0 only,
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
        # Before linear_fc2, which is linear, as in Megatron: a row has f / etp elements here, usually fewer than H.
        h = self._gate(h) * probs.unsqueeze(-1).to(h.dtype)
        out = self.linear_fc2(h, tokens_per_expert)
        if self.linear_fc2.bias is not None and self.groups.expt_tp.rank() == 0:
            out = out + self.linear_fc2.bias[expert_of_row] * probs.unsqueeze(-1).to(out.dtype)
        return out, None

    def _gate(self, h: Tensor) -> Tensor:
        """Return activation(gate) · (up + offset), clamped if configured (transformer/mlp.py, glu)."""
        gate, up = h.chunk(2, dim=-1)
        limit = self.config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        offset = self.config.glu_linear_offset
        gated: Tensor = self.config.activation_func(gate) * (up + offset if offset else up)
        return gated

    def backward_dw(self) -> None:
        """Do nothing. Megatron calls this to compute delayed weight gradients; here none are delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare the weights with the keys and shapes of Transformer Engine's grouped experts."""
        state = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            for key, shards in linear.sharded_state_dict(f"{name}.", sharded_offsets, metadata).items():
                shards.key = f"{prefix}experts.{key}"
                state[f"{prefix}{key}"] = shards
        return state


_choose_experts = megatron_router.topk_routing_with_score_function


def _route(logits: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Replace ``topk_routing_with_score_function`` of Megatron's routers (transformer/moe/moe_utils.py)."""
    if not exact_ops.active():
        chosen: tuple[Tensor, Tensor] = _choose_experts(logits, topk, **options)
        return chosen
    return exact_routing(logits, topk, **options)


# Routers look the function up in this module at each call, so that replacing it there is enough.
megatron_router.topk_routing_with_score_function = _route


def exact_routing(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    router_replay: Any = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Route as the engine does (``trainer.exact_rollouts``): [n, E] → (weights [n, E], map [n, E] bool)."""
    assert (num_groups or 1) == 1 and score_function in ("softmax", "sigmoid")
    softmax = score_function == "softmax"
    scores = exact_ops.expert_scores(logits, softmax=softmax)
    compared = scores if expert_bias is None else scores + expert_bias

    def choose(values: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        best = exact_ops.best_experts(values, k)
        return values.gather(1, best), best

    # Ties must fall as in the engine; torch.topk promises no order.
    if router_replay is None:
        experts = exact_ops.best_experts(compared, topk)
    else:
        experts = router_replay.get_replay_topk(compared, topk, None, None, choose)[1]
    normalise = not use_pre_softmax if softmax else topk > 1
    weights, experts = exact_ops.expert_weights(scores, experts, normalise=normalise, scale=scaling_factor)
    zeros = torch.zeros_like(logits)
    return zeros.scatter(1, experts, weights), zeros.scatter(1, experts, 1.0).bool()


class TokenWeightedRouter(TopKRouter):
    """``TopKRouter`` whose load-balancing losses give each valid token the same weight, in every layout.

    A loss is E · Σ_e share_e · score_e, averaged over tokens. ``share``: the part of all choices that fell on an
    expert, in the micro-batch (``aux_loss``, arXiv:2101.03961), in the token's own sequence (``seq_aux_loss``,
    arXiv:2412.19437), or in the micro-batches of all replicas so far in the step (``global_aux_loss``,
    arXiv:2501.11873). Choices are the K best scores, as in Megatron: without the bias or the groups that a family may
    choose by.

    Megatron-Core 0.19.2 computes something else. Its count of the tokens is summed in place over the ranks and then
    taken for the local one (transformer/moe/moe_utils.py, ``get_tokens_per_expert_and_token_count``,
    NVIDIA/Megatron-LM#7452), which multiplies the loss by tp·cp. The loss of a micro-batch without valid tokens is
    NaN, and all sequences of a pack count as one.
    """

    load: Tensor | None = None
    """Sums for :func:`router_metrics` over this rank's tokens since its last call, [E + 3] float64: tokens per expert,
    Σ z-loss, Σ entropy in nats, tokens. Counts training passes only, and a recomputed pass once."""

    balance: Tensor | None = None
    """Σ load-balancing loss over this rank's tokens since that call, [] float64; None without such a loss."""

    sequences: PassInput[SequenceNumbers] | None = None
    """The number of each token's sequence in its micro-batch, for ``seq_aux_loss``."""

    _sequences: SequenceNumbers | None = None

    copies: PassInput[Tensor | None] | None = None
    """How many rows have each token, [t] float32, with ``trainer.share_prefixes``: losses and counts weigh it so."""

    _copies: Tensor | None = None

    placement: ExpertPlacement | None = None
    """The slots of the experts (``give_placement``)."""

    planned_padding: Tensor | None = None
    """The mask of the next training pass by a schedule plan, which does not give it to routers."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., E], without rounding fp32 inputs to TF32.

        If Transformer Engine is installed, Megatron uses its GEMM, which rounds fp32 inputs to TF32. For bf16 inputs
        that GEMM is exact.
        """
        both_fp32 = input.dtype == self.weight.dtype == torch.float32
        if te_general_gemm is not None and both_fp32 and self.config.moe_router_dtype != "fp64":
            return torch.nn.functional.linear(input, self.weight, self.bias)
        if exact_ops.active() and self.bias is None:
            return exact_ops.with_gradient(exact_ops.linear, torch.nn.functional.linear, input, self.weight)
        logits: Tensor = super().gating(input)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as ``TopKRouter`` does, update ``load``, and order the columns of both results by slot.

        ``padding_mask``: [sequence, batch], True on padding.
        """
        if (
            self.config.overlap_moe_expert_parallel_comm
            and torch.is_grad_enabled()
            and self.planned_padding is not None
        ):
            padding_mask = self.planned_padding.transpose(0, 1)
        if padding_mask is not None and padding_mask.numel() != logits.shape[:-1].numel():
            # Megatron splits the mask over sequence-parallel ranks on the first pipeline stage only
            # (megatron/core/models/gpt/gpt_model.py, _preprocess).
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        # Taken once per pass and kept: the losses below are called from within Megatron's routing.
        self._sequences = None if self.sequences is None else self.sequences.take()
        self._copies = None if self.copies is None else self.copies.take()
        if isinstance(self.router_replay, RoutingReplay):
            self.router_replay.copies = self._copies
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        if self.training and torch.is_grad_enabled() and not self.is_mtp_layer:
            self._count(logits.detach().flatten(0, -2), routing_map, padding_mask)
        # Counted by expert, above; only the dispatcher reads columns as slots.
        if self.placement is None or self.is_mtp_layer:
            return probs, routing_map
        columns = self.placement.columns(self.layer_number - 1, probs.device)
        if columns is None:
            return probs, routing_map
        return probs.index_select(1, columns), routing_map.index_select(1, columns)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.score_function == "softmax" else logits.sigmoid()

    def _count(self, logits: Tensor, routing_map: Tensor, padding_mask: Tensor | None) -> None:
        scores = self._scores(logits)
        entropy = torch.special.entr(scores / scores.sum(-1, keepdim=True)).sum(-1)
        z = logits.logsumexp(-1).square()
        columns = torch.cat([routing_map, torch.stack([z, entropy, torch.ones_like(entropy)], dim=1)], dim=1)
        # Padding is routed as well, because shapes must fit, but must not count.
        if padding_mask is not None:
            columns = columns.masked_fill(padding_mask.reshape(-1, 1), 0.0)
        sums = self._weighed(columns).sum(0, dtype=torch.float64)
        self.load = sums if self.load is None else self.load + sums

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Pass the mask as a column, because Megatron combines it with a [tokens, experts] map."""
        mask = None if padding_mask is None else padding_mask.reshape(-1, 1)
        if self._copies is None:
            super()._apply_expert_bias(routing_map, mask)
        elif self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                counted = routing_map if mask is None else routing_map & ~mask
                self.local_tokens_per_expert += self._weighed(counted).sum(0)

    def _weighed(self, per_token: Tensor) -> Tensor:
        """Return values of tokens [t, …], each as often as rows have the token."""
        if self._copies is None:
            return per_token
        return per_token * self._copies.view(-1, *[1] * (per_token.dim() - 1))

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z-loss to ``logits`` [t, E]: a sum over tokens, as Megatron's is with SUMMED_GRADIENTS."""
        coefficient = self.config.moe_z_loss_coeff
        if self._copies is None or coefficient is None or not (self.training and torch.is_grad_enabled()):
            plain: Tensor = super().apply_z_loss(logits, padding_mask=padding_mask)
            return plain
        z = self._weighed(logits.logsumexp(-1).square())
        if padding_mask is not None:
            z = z.masked_fill(padding_mask.reshape(-1), 0.0)
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, coefficient * z.sum())
        return attached

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if not self.get_aux_loss_coeff("aux_loss"):
            return probs
        shares = _shares(_summed(self._weighed(routing_map).sum(0), self.tp_cp_group))
        return self._attach("aux_loss", probs, self._weighed(scores_for_aux_loss * shares))

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        if not self.get_aux_loss_coeff("seq_aux_loss"):
            return probs
        assert self._sequences is not None, "the model is not given the sequences of its tokens"
        numbers = self._sequences.numbers
        counts = scores_for_aux_loss.new_zeros(self._sequences.sequences, self.config.num_moe_experts)
        counts.index_add_(0, numbers, routing_map.to(counts.dtype))
        counts = _summed(counts, self.tp_cp_group)
        if (of_rows := self._sequences.of_rows) is None:
            shares = _shares(counts)
        else:  # a token is in the sequences of several rows, which have different shares
            shares = of_rows.mT @ _shares(of_rows @ counts)
        return self._attach("seq_aux_loss", probs, scores_for_aux_loss * shares[numbers])

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        so_far = self.global_tokens_per_expert  # Megatron empties it after the step
        so_far += _summed(self._weighed(routing_map).sum(0), self.tp_dp_cp_group)
        return self._attach("global_aux_loss", probs, self._weighed(scores_for_aux_loss * _shares(so_far)))

    def _attach(self, kind: str, probs: Tensor, products: Tensor) -> Tensor:
        """Return ``probs``, with the gradient of a load-balancing loss in their backward pass, and count the loss.

        ``products``: [t, E], score · share of the tokens, each as often as rows have it; 0 on padding. The loss is a
        sum over tokens, because the schedule divides it by the tokens of the step (``loss_scale.AuxiliaryLossScale``).
        """
        # Shares are counts and have no gradient; the scores carry it.
        loss = self.config.num_moe_experts * products.sum()
        if not self.is_mtp_layer:
            so_far = 0.0 if self.balance is None else self.balance
            self.balance = so_far + loss.detach().double()
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, self.get_aux_loss_coeff(kind) * loss)
        return attached


def _summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``counts`` over the ranks of a group, in float32."""
    total = counts.float()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def _shares(counts: Tensor) -> Tensor:
    """Return what part of the choices fell on each expert, [.., E]; 0 if there were none."""
    shares: Tensor = counts / counts.sum(-1, keepdim=True).clamp(min=1.0)
    return shares


class LogOddsRouter(TokenWeightedRouter):
    """Router with softmax scores and a bias that affects only the selection of experts (ERNIE 4.5).

    Megatron supports such a bias for sigmoid scores only. The sigmoid of a probability's log-odds is the probability,
    so this router passes log-odds to Megatron's sigmoid routing. The z-loss is that of the logits.
    """

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z-loss to ``logits`` [t, E] and return their log-odds, which all that follows routes by."""
        return log_odds(super().apply_z_loss(logits, padding_mask=padding_mask))

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


def log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of the softmax probabilities p over the last dimension, [.., E].

    For the largest p, 1 − p is computed as the sum of the other probabilities, because a subtraction would cancel. All
    others are below 1/2.
    """
    largest = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.argmax(-1, keepdim=True), True)
    others = logits.masked_fill(largest, -torch.inf).logsumexp(-1, keepdim=True)
    logs = logits.log_softmax(-1)
    rest = torch.log1p(-logs.masked_fill(largest, -torch.inf).exp())
    return torch.where(largest, logits - others, logs - rest)


def router_class(model: MegatronModelConfig) -> type[TokenWeightedRouter]:
    """Return the router class for a model's scores."""
    return LogOddsRouter if model.softmax_log_odds else TokenWeightedRouter


def routers_of(chunks: Iterable[torch.nn.Module]) -> list[TokenWeightedRouter]:
    """Return the routers of model chunks in order, without that of a draft head."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, TokenWeightedRouter) and not module.is_mtp_layer]


def number_sequences(chunk: torch.nn.Module) -> None:
    """Let the routers of a model chunk read which sequence a token is in: its forward pass then takes the argument
    ``sequences`` (``PackedInputs.sequences``)."""
    inputs: list[PassInput[SequenceNumbers]] = []
    for router in routers_of([chunk]):
        router.sequences = PassInput(router.layer_number - 1)
        inputs.append(router.sequences)
    give_inputs(chunk, "sequences", inputs, lambda sequences, _: sequences)


def count_copies(chunk: torch.nn.Module) -> None:
    """Let the routers of a model chunk read how many rows have a token: its forward pass then takes the argument
    ``copies`` (``PackedInputs.copies``)."""
    inputs: list[PassInput[Tensor | None]] = []
    for router in routers_of([chunk]):
        router.copies = PassInput(router.layer_number - 1)
        inputs.append(router.copies)
    give_inputs(chunk, "copies", inputs, lambda copies, _: copies)


def forget_pass_inputs(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop what is queued for passes that will not be recomputed, for example after an error."""
    # Recomputation takes inputs in the order of the forward passes: leftovers would go to the wrong micro-batch.
    for router in routers_of(chunks):
        for queued in (router.router_replay, router.sequences, router.copies):
            if isinstance(queued, PassInput):
                queued.queue.clear()


def freeze_expert_bias(chunks: Iterable[torch.nn.Module]) -> None:
    """Keep the bias per expert of all routers, which Megatron else updates with each step
    (``moe_router_bias_update_rate``)."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.frozen_expert_bias = True


def router_metrics(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, *, per_layer: bool
) -> tuple[dict[str, float], dict[int, Tensor]]:
    """Return (router metrics, layer → tokens per expert [E] float64) over all valid tokens since the last call.

    ``moe_load_imbalance``: tokens of the busiest expert divided by the mean (1 is even). ``moe_dead_experts``: share
    of experts without a token. ``moe_router_entropy``: mean entropy of the routing distribution, in nats. With
    ``moe_z_loss_coeff``, ``moe_z_loss``, and with a load-balancing loss ``moe_load_balancing_loss`` (1 is even), both
    as the step adds them to its loss, without their coefficients. With replayed routes also ``moe_routing_replayed``,
    the share of tokens with routes, and ``moe_routing_mismatch``, the share of these that the model would have sent to
    other experts. Metrics are means over layers; ``per_layer`` adds each layer as ``…/layer_N``. Both results are
    empty without experts. Collective over all ranks; with tp > 1 the sequence is split, so each token is counted on
    one rank.
    """
    if not config.num_moe_experts:
        return {}, {}
    load = torch.zeros(config.num_layers, config.num_moe_experts + 6, dtype=torch.float64, device=device.device())
    for router in routers_of(chunks):
        if router.load is not None:
            load[router.layer_number - 1, :-3] += router.load
            router.load = None
        if router.balance is not None:
            load[router.layer_number - 1, -3] += router.balance
            router.balance = None
        replay = router.router_replay
        if isinstance(replay, RoutingReplay) and replay.mismatch is not None:
            load[router.layer_number - 1, -2:] += replay.mismatch
            replay.mismatch = None
    # Stages have different layers, so one sum over all ranks puts the table together.
    dist.all_reduce(load)
    layers = load[:, -4].nonzero().flatten().tolist()
    if not layers:
        return {}, {}
    experts, (z, entropy, tokens, balance, replayed, elsewhere) = load[layers, :-6], load[layers, -6:].unbind(1)
    by_layer = {
        "moe_load_imbalance": (experts.amax(1) / experts.mean(1)).tolist(),
        "moe_dead_experts": (experts == 0).double().mean(1).tolist(),
        "moe_router_entropy": (entropy / tokens).tolist(),
    }
    if config.moe_z_loss_coeff:
        by_layer["moe_z_loss"] = (z / tokens).tolist()
    if balance.any():
        by_layer["moe_load_balancing_loss"] = (balance / tokens).tolist()
    if replayed.any():
        by_layer |= {
            "moe_routing_replayed": (replayed / tokens).tolist(),
            "moe_routing_mismatch": (elsewhere / replayed.clamp(min=1.0)).tolist(),
        }
    metrics = {name: sum(values) / len(values) for name, values in by_layer.items()}
    if per_layer:
        for name, values in by_layer.items():
            metrics |= {f"{name}/layer_{layer}": value for layer, value in zip(layers, values, strict=True)}
    return metrics, dict(zip(layers, experts, strict=True))
