"""vLLM's layers on CPU, computed by ``algorithms/exact_ops.py`` as the trainer computes them.

The module of ``worker_extension_cls`` in a run with ``trainer.exact_rollouts``: each worker process imports it before
the model is built, and the import replaces the layers' functions. Weights are not packed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.inference.vllm import compat
from skyrl_megatron.inference.vllm.cpu import experts_with_tokens


class ExactExtension(compat.WorkerExtension):
    """The worker's methods; a class of this module, so that workers import it."""


# ------------------------------------------------------------------ linear layers, norms, activations
def _keep_weight(layer: nn.Module, remove_weight: bool) -> None:
    known = get_current_vllm_config().additional_config
    parts = known[compat.EXACT_PARTS] if isinstance(layer, RowParallelLinear) else 1
    layer.cpu_linear = partial(exact_ops.linear, parts=parts)  # type: ignore[assignment]


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if self.variance_size_override is not None or not self.has_weight:
        raise NotImplementedError("trainer.exact_rollouts=true: this RMSNorm is not supported; set it to false")
    if residual is None:
        return exact_ops.rms_norm(x, self.weight, self.variance_epsilon)
    total = x + residual
    return exact_ops.rms_norm(total, self.weight, self.variance_epsilon), total


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return exact_ops.silu(gate) * up


def _rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, -1)

    def rotated(x: Tensor) -> Tensor:
        heads = x.view(len(cos), -1, self.head_size)
        return exact_ops.rotate(heads, cos, sin, interleaved=not self.is_neox_style).view(x.shape)

    return rotated(query), None if key is None else rotated(key)


# ------------------------------------------------------------------ experts
def _route(self: Any, hidden_states: Tensor, router_logits: Tensor, *_: Any, **unused: Any) -> tuple[Tensor, Tensor]:
    plain = self.custom_routing_function is None and self.scoring_func in ("softmax", "sigmoid")
    if not plain or (self.use_grouped_topk and self.num_expert_group != 1):
        raise NotImplementedError("trainer.exact_rollouts=true: this router is not supported; set it to false")
    scores = exact_ops.expert_scores(router_logits.float(), softmax=self.scoring_func == "softmax")
    bias = self.e_score_correction_bias
    experts = exact_ops.best_experts(scores if bias is None else scores + bias, self.top_k)
    scale = None if self.routed_scaling_factor == 1.0 else self.routed_scaling_factor
    weights, experts = exact_ops.expert_weights(scores, experts, normalise=self.renormalize, scale=scale)
    return weights, experts.to(torch.int32)


class ExactExperts(CPUUnquantizedExperts):
    """Experts one after another, as the trainer computes them.

    Weights are not packed: gate and up [E, 2 · inner, H], down [E, H, inner].
    """

    @staticmethod
    def is_supported_config(cls: Any, *arguments: Any) -> tuple[bool, str | None]:  # the signature in vLLM
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
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
        *unused: Any,
        **options: Any,
    ) -> None:
        """Compute the experts of each token into ``output`` [tokens, H] float32, from ``hidden_states`` [tokens, H]
        float32.

        ``w1`` [E, 2 · inner, H], ``w2`` [E, H, inner]: float32 weights of the experts. ``topk_ids`` [tokens, K] int32:
        experts, ``topk_weights`` [tokens, K] float32: their factors, without unit.
        """
        if activation is not MoEActivation.SILU or self.w1_bias is not None or self.w2_bias is not None:
            raise NotImplementedError("trainer.exact_rollouts=true: these experts are not supported; set it to false")
        output.zero_()
        for expert, tokens, choice in experts_with_tokens(topk_ids):
            inner = _silu_and_mul(exact_ops.product(hidden_states[tokens], w1[expert]))
            inner = inner * topk_weights[tokens, choice].unsqueeze(1)
            output.index_add_(0, tokens, exact_ops.product(inner, w2[expert]))


def _scale_weights(self: Any, *arguments: Any, **options: Any) -> None:
    """Let the router scale the weights of experts, as the trainer's does, and not the runner their sum."""
    _make_runner(self, *arguments, **options)
    if self.routed_scaling_factor != 1.0:
        self.router.routed_scaling_factor, self.routed_scaling_factor = self.routed_scaling_factor, 1.0


# ------------------------------------------------------------------ attention
def _caches(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of all blocks, [blocks, heads, tokens, size] each."""
    blocks, heads, tokens, _ = kv_cache.size()
    keys, values = kv_cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return keys, values


def _store(self: Any, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    slots = slot_mapping.long()
    kept = slots >= 0
    slots = slots[kept]
    keys, values = _caches(kv_cache)
    size = keys.shape[2]
    for cache, new in ((keys, key), (values, value)):
        cache[slots // size, :, slots % size] = new[: len(kept)][kept]


def _attend(
    self: Any,
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: CPUAttentionMetadata | None,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    if attn_metadata is None:  # vLLM's memory profiling run
        return output
    if self.sliding_window != -1 or self.sinks is not None or self.logits_soft_cap or not attn_metadata.causal:
        raise NotImplementedError("trainer.exact_rollouts=true: this attention is not supported; set it to false")
    lengths = attn_metadata.seq_lens.tolist()
    queries = attn_metadata.query_start_loc.diff().tolist()
    keys, values = _caches(kv_cache)
    size = keys.shape[2]
    places = [torch.arange(length) for length in lengths]
    blocks = torch.cat([attn_metadata.block_table[i, at // size] for i, at in enumerate(places)]).long()
    offsets = torch.cat(places) % size
    count = attn_metadata.num_actual_tokens
    attended = exact_ops.attention(
        query[:count], keys[blocks, :, offsets], values[blocks, :, offsets], queries, lengths, self.scale
    )
    output[:count] = attended.view(output[:count].shape)
    return output


# ------------------------------------------------------------------ log-probs
def _sample_top(self: Any, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> Any:
    before = logits.clone()
    sampled, logprobs = _sample(self, logits, generators, k, p)
    if logprobs is not None and self.logprobs_mode == "processed_logprobs":
        logprobs = exact_ops.log_softmax(before.masked_fill(logprobs == -torch.inf, -torch.inf))
    return sampled, logprobs


def _choose_backend(moe_config: Any) -> Any:
    return UnquantizedMoeBackend.CPU, ExactExperts


_sample, _make_runner = TopKTopPSampler.forward_cpu, MoERunner.__init__
layer_utils.dispatch_cpu_unquantized_gemm = _keep_weight
RMSNorm.forward_native = _norm
SiluAndMul.forward_native = staticmethod(_silu_and_mul)
RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native = _rotate
CPUAttentionBackendImpl.do_kv_cache_update, CPUAttentionBackendImpl.forward = _store, _attend
TopKTopPSampler.forward_cpu = _sample_top
Sampler.compute_logprobs = staticmethod(lambda logits: exact_ops.log_softmax(logits.float()))
CPURouter._compute_routing, MoERunner.__init__ = _route, _scale_weights
unquantized_fused_moe_method.select_unquantized_moe_backend = _choose_backend
exact_ops.check()
