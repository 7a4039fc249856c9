"""Experts with adapters for vLLM 0.32 on CPU, whose kernel has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from skyrl_megatron.inference.vllm.cpu import experts_with_tokens


class AdaptedExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Experts with the LoRA adapters of each token's request, computed one expert after another.

    Weights are not packed: gate and up [E, 2 · inner, H], down [E, H, inner].
    """

    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> tuple[bool, str | None]:  # the signature in vLLM
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation is MoEActivation.SILU

    def supports_expert_map(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: weights are not packed."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        *,
        apply_router_weight_on_input: bool,
        **unused: Any,
    ) -> None:
        """Compute the experts of each token into ``output`` [tokens, H], in its dtype, from ``hidden_states`` [tokens,
        H]. The sum over a token's experts is fp32.

        ``w1`` [E, 2 · inner, H], ``w2`` [E, H, inner]: weights of this rank's experts. ``topk_ids`` [tokens, K] int:
        experts, ``topk_weights`` [tokens, K]: their factors, without unit. ``expert_map`` [all experts] int: number
        of an expert on this rank, −1 if it is on another.
        """
        if activation is not MoEActivation.SILU:
            raise NotImplementedError(f"adapters of experts with {activation} are not supported on CPU: exclude them")
        local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        slots = token_slots(self._lora_context, len(hidden_states))
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert, tokens, choice in experts_with_tokens(local):
            x = hidden_states[tokens]
            adapters = _pairs(self._lora_context, slots[tokens], expert)
            both = x @ w1[expert].T
            gate, up = both.chunk(2, dim=-1)
            for rows, (gate_pair, up_pair, _) in adapters:
                gate[rows] += low_rank(x[rows], *gate_pair)
                up[rows] += low_rank(x[rows], *up_pair)
            inner = F.silu(gate) * up
            y = inner @ w2[expert].T
            for rows, (_, _, down_pair) in adapters:
                y[rows] += low_rank(inner[rows], *down_pair)
            weight = 1.0 if apply_router_weight_on_input else topk_weights[tokens, choice].float().unsqueeze(1)
            total.index_add_(0, tokens, y.float() * weight)
        output.copy_(total)


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x · Aᵀ · Bᵀ, [rows, out]; ``a`` [rank, in], ``b`` [out, rank]."""
    return (x @ a.T) @ b.T


def token_slots(context: MoELoRAContext | None, tokens: int) -> Tensor:
    """Return the adapter slot of each token, [tokens]; −1: no adapter."""
    if context is None:
        return torch.full((tokens,), -1)
    mapping: Tensor | None = context.local_token_lora_mapping
    slots: Tensor = context.punica_wrapper.token_lora_indices if mapping is None else mapping
    return slots[:tokens]


def _pairs(context: MoELoRAContext | None, slots: Tensor, expert: int) -> list[tuple[Tensor, list[Any]]]:
    """List (rows, factors (A, B) of gate, up and down of an expert) for each adapter in ``slots``."""
    if context is None:
        return []
    stacked = [
        *zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True),
        (context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]),
    ]
    return [
        ((slots == slot).nonzero().squeeze(1), [(a[slot, expert], b[slot, expert]) for a, b in stacked])
        for slot in slots.unique().tolist()
        if slot >= 0 and context.adapter_enabled[slot]
    ]


def choose_experts_with_adapters() -> None:
    """Patch vLLM to use :class:`AdaptedExperts` if adapters include experts, and its CPU kernel otherwise."""
    original: Callable[..., Any] = unquantized_fused_moe_method.select_unquantized_moe_backend
    if getattr(original, "knows_adapters", False):
        return

    def select(moe_config: Any) -> Any:
        lora = get_current_vllm_config().lora_config
        if lora is not None and lora.target_modules is not None and "experts" not in lora.target_modules:
            moe_config.is_lora_enabled = False
        if moe_config.is_lora_enabled:
            return UnquantizedMoeBackend.CPU, AdaptedExperts
        return original(moe_config)

    select.knows_adapters = True  # type: ignore[attr-defined]
    unquantized_fused_moe_method.select_unquantized_moe_backend = select
