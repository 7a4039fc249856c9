"""What an engine takes of a GPU: weights, KV cache, a step at work. vLLM 0.32 (v1/worker/gpu_worker.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_megatron.config.hf_model import element_bytes, kv_bytes_per_token
from skyrl_megatron.config.rules.training import longest_sequence
from skyrl_megatron.entrypoints.memory.adapters import received_bytes, slot_bytes
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable
from skyrl_megatron.weight_sync.adapter_tensors import configured_pairs

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

GRAPH_BYTES = 1 << 30
"""CUDA graphs, which stay while an engine sleeps; none with ``enforce_eager``."""
SAMPLER_COPIES = 3
"""fp32 copies of the logits while tokens are drawn."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """Bytes of each rank of an engine."""

    weights: int
    at_work: int
    """Largest tensors of a step with ``max_num_batched_tokens`` and ``max_num_seqs``."""
    token: int
    """KV cache of a token."""
    longest: int
    """Tokens of the longest sequence."""
    graphs: int
    adapters: int = 0
    """Slots of adapters."""
    counters: int = 0
    """Counts of each token for penalties, of as many requests as run at once: always there, asleep with the weights
    (vllm/v1/worker/gpu/sample/penalties.py)."""
    received: int = 0
    """Adapters that lie beside those in the slots during a sync."""

    @property
    def least(self) -> int:
        """What it needs to start: weights, adapters, a step, and the cache of one sequence of full length."""
        return self.weights + self.adapters + self.counters + self.at_work + self.token * self.longest

    def cache(self, budget: int) -> int:
        """Return the KV cache that fits into ``budget`` bytes; negative where not even the weights do."""
        return budget - self.weights - self.adapters - self.counters - self.at_work


def engine_bytes(cfg: SkyRLTrainConfig, table: ParameterTable) -> EngineBytes:
    """Return what each rank of an engine of ``cfg`` takes for the model of ``table``."""
    engine, plan = cfg.generator.inference_engine, table.plan
    hf = table.hf_config
    width = element_bytes(engine.model_dtype, hf)
    tp, pp, dims = engine.tensor_parallel_size, engine.pipeline_parallel_size, plan.shape.dims
    weights = table.engine_rank(tp, pp, engine.expert_parallel_size) * width
    routed = dims.get("M", 0) * table.top_k
    widest = max(3 * dims.get("F", 0) / tp, 3 * routed / tp + 2 * dims["H"]) + 2 * dims["H"]
    at_work = engine.max_num_batched_tokens * widest * width + engine.max_num_seqs * dims["V"] * 4 * SAMPLER_COPIES
    pairs = configured_pairs(cfg, hf)
    return EngineBytes(
        weights,
        int(at_work),
        kv_bytes_per_token(hf, engine.model_dtype, tp=tp, pp=pp),
        longest_sequence(cfg),
        0 if engine.enforce_eager else GRAPH_BYTES,
        0 if pairs is None else slot_bytes(cfg, plan, pairs, width),
        counters=engine.max_num_seqs * (dims["V"] * 4 + dims["V"] // 8),
        received=0 if pairs is None else received_bytes(pairs, width),
    )
