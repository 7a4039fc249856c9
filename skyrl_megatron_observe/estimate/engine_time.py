"""Seconds that engines sample on paper: prefill and decode of a step's responses.

A decode step reads the weights and the KV cache of the running sequences, whichever of that and of its products takes
longer, sums activations over tp, and waits for kernel launches. Engines run as many sequences at once as
``max_num_seqs`` and the KV cache allow, and start the next sequence when one ends, so the last ones run with fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skyrl_megatron.config.hf_model import element_bytes
from skyrl_megatron.config.roles import engine_ranks
from skyrl_megatron_observe.estimate.machine_rates import Machine, Seconds
from skyrl_megatron_observe.estimate.memory_phases import EngineBytes, budget_of_engine, engine_bytes

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable


@dataclass(frozen=True, slots=True)
class SamplingTime:
    """Seconds of sampling and what they come from."""

    prefill: Seconds
    decode: Seconds
    concurrent: float
    """Sequences that an engine decodes at once, on average."""
    steps: float
    """Decode steps of an engine."""
    weights: float
    """Bytes of weights that a rank reads in a decode step."""
    cache: float
    """Bytes of KV cache that a rank reads in a decode step."""


def sampling_time(
    cfg: SkyRLTrainConfig,
    table: ParameterTable,
    flops: ModelFlops,
    machine: Machine,
    prompts: np.ndarray,
    responses: np.ndarray,
    gpu_bytes: int | None,
) -> SamplingTime:
    """Return the seconds of sampling ``responses`` [B] tokens after ``prompts`` [B] tokens. ``flops``: of the model.

    ``gpu_bytes``: memory of a GPU, which limits the sequences at once; None: only ``max_num_seqs`` does.
    """
    engine = cfg.generator.inference_engine
    tp, pp, dp = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size
    sizes, replicas = engine_bytes(cfg, table), engine.num_engines * dp
    context = float((prompts + responses / 2).mean())
    most = len(responses) / replicas
    at_once = min(most, engine.max_num_seqs, _cached(cfg, sizes, gpu_bytes, float((prompts + responses).mean())))
    at_once = max(at_once, 1.0)
    tokens = float(responses.sum()) / replicas
    steps = max(tokens / at_once, float(responses.max(initial=1)))
    running = tokens / steps
    # pipeline stages work on different sequences: a stage has its share of them in each of its steps
    batch = max(running / pp, 1.0)
    weights, cache = _weights_read(cfg, table, batch), sizes.token * context * batch
    width = element_bytes(engine.model_dtype, table.plan.hf_config)
    per_token = flops.linear + (flops.full_attention + flops.window_attention) * context
    layers = table.layers / pp
    summed = 4 * layers * batch * table.plan.shape.dims["H"] * width * (tp - 1) / tp
    wire = machine.across(tp, summed) + machine.latency(tp).times(2 * layers)
    work = machine.read(weights + cache).or_longer(machine.decode(batch * per_token / tp / pp, width))
    launches = machine.step_overhead(layers, graphs=not engine.enforce_eager)
    step = (work + wire).or_longer(launches) + machine.token_overhead.times(batch)
    rows = len(prompts) / cfg.generator.n_samples_per_prompt if engine.enable_prefix_caching else len(prompts)
    share = float(rows) / max(len(prompts), 1)
    read = float(flops.forward(prompts).sum()) * share
    prefill = machine.prefill(read / replicas / tp / pp, width)
    prefill += machine.across(
        tp, 4 * layers * float(prompts.sum()) * share / replicas * table.plan.shape.dims["H"] * width
    )
    return SamplingTime(
        prefill + machine.request_overhead.times(most),
        step.times(steps * pp),
        running,
        steps,
        weights,
        cache,
    )


def _cached(cfg: SkyRLTrainConfig, sizes: EngineBytes, gpu_bytes: int | None, tokens: float) -> float:
    """Return how many sequences of ``tokens`` the KV cache of an engine holds."""
    given = cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes")
    if given is None and gpu_bytes is None:
        return float("inf")
    cache = int(given) if given is not None else sizes.cache(budget_of_engine(cfg, gpu_bytes or 0))
    return max(cache / (sizes.token * max(tokens, 1.0)), 1.0)


def _weights_read(cfg: SkyRLTrainConfig, table: ParameterTable, batch: float) -> float:
    """Return the bytes of weights that a rank reads for ``batch`` tokens: all but the embedding and the experts that
    no token chose, if tokens choose experts at random."""
    engine, dims = cfg.generator.inference_engine, table.plan.shape.dims
    tp, pp, ep = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size
    width = element_bytes(engine.model_dtype, table.plan.hf_config)
    elements = table.engine_rank(tp, pp, ep)
    experts = table.experts_of_a_layer() * sum(table.plan.shape.moe) / pp / (ep if ep > 1 else tp)
    chosen = 1.0
    if table.experts:
        # with expert parallelism, the tokens of all ranks reach an expert
        of_all = batch * (engine.data_parallel_size if ep > 1 else 1)
        chosen = 1 - max(1 - table.top_k / table.experts, 0.0) ** of_all
    embedding = dims["V"] * dims["H"] / tp if "untied" in table.plan.shape.flags and pp == 1 else 0.0
    return (elements - embedding - experts * (1 - chosen)) * width


def engine_gpus(cfg: SkyRLTrainConfig) -> int:
    """Count the ranks of all engines."""
    return cfg.generator.inference_engine.num_engines * engine_ranks(cfg)
