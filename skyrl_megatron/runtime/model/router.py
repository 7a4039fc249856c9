"""Megatron's router with a load-balancing loss that counts valid tokens exactly, and metrics of the routing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
    te_general_gemm,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from bridges.family import MegatronModelConfig
from skyrl_megatron import device
from skyrl_megatron.runtime.model.routing_replay import RoutingReplay


class TokenWeightedRouter(TopKRouter):
    """``TopKRouter`` whose auxiliary loss is weighted by the valid tokens of its micro-batch over tp·cp.

    Megatron multiplies the loss by the *local* count of valid tokens times the ranks (megatron/core/transformer/moe/
    router.py, ``attach_and_log_load_balancing_loss``): right only when all tp·cp ranks hold equally many. Packed
    sequences of odd lengths do not, and a micro-batch without a valid token divides by zero. Both are fixed here: the
    gradient is the same for every tp and cp.
    """

    load: Tensor | None = None
    """Sums for :func:`router_metrics` over this rank's tokens since its last call, [E + 2] float64: tokens per expert,
    Σ entropy in nats, tokens. Of training passes only; a pass that is recomputed counts once."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., E]. Where Transformer Engine is installed, Megatron computes them by its GEMM, which
        rounds fp32 inputs to TF32; bf16 inputs it multiplies exactly."""
        both_fp32 = input.dtype == self.weight.dtype == torch.float32
        if te_general_gemm is not None and both_fp32 and self.config.moe_router_dtype != "fp64":
            return torch.nn.functional.linear(input, self.weight, self.bias)
        logits: Tensor = super().gating(input)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as ``TopKRouter`` does, and count. ``padding_mask``, [sequence, batch], is True on padding."""
        if padding_mask is not None and padding_mask.numel() != logits.shape[:-1].numel():
            # Megatron gives each sequence-parallel rank its part on the first pipeline stage only
            # (megatron/core/models/gpt/gpt_model.py, _preprocess).
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        if self.training and torch.is_grad_enabled() and not self.is_mtp_layer:
            self._count(logits.detach().flatten(0, -2), routing_map, padding_mask)
        return probs, routing_map

    def _count(self, logits: Tensor, routing_map: Tensor, padding_mask: Tensor | None) -> None:
        scores = logits.softmax(-1) if self.score_function == "softmax" else logits.sigmoid()
        entropy = torch.special.entr(scores / scores.sum(-1, keepdim=True)).sum(-1)
        columns = torch.cat([routing_map, entropy[:, None], torch.ones_like(entropy)[:, None]], dim=1)
        if padding_mask is not None:
            columns = columns.masked_fill(padding_mask.reshape(-1, 1), 0.0)
        found = columns.sum(0, dtype=torch.float64)
        self.load = found if self.load is None else self.load + found

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Pass the mask as a column: Megatron combines it with a [tokens, experts] map."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        tokens_per_expert, _, total = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, topk=self.topk, with_padding_mask=with_padding_mask
        )
        total = torch.as_tensor(total, dtype=torch.float32, device=probs.device)
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=total.clamp(min=1.0),
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss,
            "load_balancing_loss",
            self.tp_cp_group,
            valid_token_count=total / self.tp_cp_group.size(),
        )
        return attached


class LogOddsRouter(TokenWeightedRouter):
    """Scores are softmax probabilities, and a bias takes part in the choice alone (ERNIE 4.5), which Megatron has for
    sigmoid scores only: the sigmoid of a probability's log-odds is the probability."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route by the softmax of ``logits`` [sequence, batch, E]."""
        return super().routing(log_odds(logits), padding_mask)


def log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of the softmax probabilities p over the last dimension, [.., E].

    1 − p is a sum over the others, which for the largest p cannot be had by a subtraction; all others are below 1/2.
    """
    largest = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.argmax(-1, keepdim=True), True)
    others = logits.masked_fill(largest, -torch.inf).logsumexp(-1, keepdim=True)
    logs = logits.log_softmax(-1)
    rest = torch.log1p(-logs.masked_fill(largest, -torch.inf).exp())
    return torch.where(largest, logits - others, logs - rest)


def router_class(model: MegatronModelConfig) -> type[TokenWeightedRouter]:
    """Return the router that computes a model's scores."""
    return LogOddsRouter if model.softmax_log_odds else TokenWeightedRouter


def routers_of(chunks: Iterable[torch.nn.Module]) -> list[TokenWeightedRouter]:
    """List the routers of some model chunks, in their order, without a draft head's."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, TokenWeightedRouter) and not module.is_mtp_layer]


def router_metrics(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, *, per_layer: bool
) -> tuple[dict[str, float], dict[int, Tensor]]:
    """Measure balance and entropy of the routers over all ranks' valid tokens since the last call, and count the
    tokens of each expert, [E] float64 by layer; both empty without experts.

    ``moe_load_imbalance``: the busiest expert's tokens over the mean of all (1 is even); ``moe_dead_experts``: the
    share of experts without a token; ``moe_router_entropy``: mean entropy of the routing distribution, in nats. With
    given routes also ``moe_routing_replayed``, the share of tokens that had some, and ``moe_routing_mismatch``, the
    share of these that the model would have sent to other experts. Means over layers; ``per_layer`` adds each layer
    as ``…/layer_N``.
    Collective over all ranks: with tp > 1 the sequence is split, so that each token is counted on one rank.
    """
    if not config.num_moe_experts:
        return {}, {}
    load = torch.zeros(config.num_layers, config.num_moe_experts + 4, dtype=torch.float64, device=device.device())
    for router in routers_of(chunks):
        if router.load is not None:
            load[router.layer_number - 1, :-2] += router.load
            router.load = None
        replay = router.router_replay
        if isinstance(replay, RoutingReplay) and replay.mismatch is not None:
            load[router.layer_number - 1, -2:] += replay.mismatch
            replay.mismatch = None
    dist.all_reduce(load)
    layers = load[:, -3].nonzero().flatten().tolist()
    if not layers:
        return {}, {}
    experts, (entropy, tokens, replayed, elsewhere) = load[layers, :-4], load[layers, -4:].unbind(1)
    found = {
        "moe_load_imbalance": (experts.amax(1) / experts.mean(1)).tolist(),
        "moe_dead_experts": (experts == 0).double().mean(1).tolist(),
        "moe_router_entropy": (entropy / tokens).tolist(),
    }
    if replayed.any():
        found |= {
            "moe_routing_replayed": (replayed / tokens).tolist(),
            "moe_routing_mismatch": (elsewhere / replayed.clamp(min=1.0)).tolist(),
        }
    metrics = {name: sum(values) / len(values) for name, values in found.items()}
    if per_layer:
        for name, values in found.items():
            metrics |= {f"{name}/layer_{layer}": value for layer, value in zip(layers, values, strict=True)}
    return metrics, dict(zip(layers, experts, strict=True))
