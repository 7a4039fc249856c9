"""What vLLM 0.32 lacks of experts on CPU. Kernels for adapters: started with LoRA, it chooses those of Triton for all
models with experts, and ends at the first token. Choice with a correction bias but without groups of experts: sigmoid
scores end the worker, and of softmax scores the bias is left out without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter


class AdaptedExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Experts one after the other, each on its tokens, with the adapters of the requests that the tokens are of.

    Weights stay as they are loaded: gate and up [E, 2 · inner, H], down [E, H, inner].
    """

    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> tuple[bool, str | None]:  # as vLLM has it
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation is MoEActivation.SILU

    def supports_expert_map(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack nothing."""

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
        if activation is not MoEActivation.SILU:
            raise NotImplementedError(f"experts with {activation} take no adapters on CPU: exclude them")
        local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        slots = token_slots(self._lora_context, len(hidden_states))
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert, tokens, choice in _by_expert(local):
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
    """Return the slot of each token's adapter, [tokens]; −1: none."""
    if context is None:
        return torch.full((tokens,), -1)
    mapping: Tensor | None = context.local_token_lora_mapping
    slots: Tensor = context.punica_wrapper.token_lora_indices if mapping is None else mapping
    return slots[:tokens]


def _by_expert(choices: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, tokens that chose it, which of their choices it is). ``choices`` [tokens, K]; −1: not here."""
    flat = choices.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    for expert, places in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        if expert >= 0:
            yield expert, places // choices.shape[1], places % choices.shape[1]


def _pairs(context: MoELoRAContext | None, slots: Tensor, expert: int) -> list[tuple[Tensor, list[Any]]]:
    """List, for each adapter among ``slots``, its rows and an expert's factors (A, B) of gate, up and down."""
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


def choose_experts_with_bias() -> None:
    """Let vLLM's router on CPU see a bias where experts have no groups, which are then one group."""
    original = CPURouter.__init__
    if getattr(original, "sees_bias", False):
        return

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        plain = not self.use_grouped_topk and self.custom_routing_function is None
        if plain and self.e_score_correction_bias is not None and self.scoring_func in ("softmax", "sigmoid"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    init.sees_bias = True  # type: ignore[attr-defined]
    CPURouter.__init__ = init


def choose_experts_with_adapters() -> None:
    """Let vLLM choose these experts where adapters are for experts, and its own CPU kernel where they are not."""
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
