"""The router of our MoE layers: Megatron's, with a load-balancing loss that counts valid tokens exactly."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class TokenWeightedRouter(TopKRouter):
    """``TopKRouter`` whose auxiliary loss is weighted by the valid tokens of its micro-batch over tp·cp.

    Megatron multiplies the loss by the *local* count of valid tokens times the ranks (megatron/core/transformer/moe/
    router.py, ``attach_and_log_load_balancing_loss``): right only when all tp·cp ranks hold equally many. Packed
    sequences of odd lengths do not, and a micro-batch without a valid token divides by zero. Both are mended here; the
    gradient is then the same for every tp and cp.
    """

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
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss,
            "load_balancing_loss",
            self.tp_cp_group,
            valid_token_count=total / self.tp_cp_group.size(),
        )
