"""Seconds that engines sample on paper: prefill and decode of a step's responses.

A decode step reads the weights and the KV cache of the running sequences, whichever of that and of its products takes
longer, sums activations over tp, and waits for the engine's process. Engines run as many sequences at once as
``max_num_seqs`` and the KV cache allow, and start the next sequence when one ends; the batch shrinks until the longest
response of the engine has ended, and the step waits for the slowest engine.
"""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skyrl_megatron.config.hf_model import element_bytes
from skyrl_megatron.config.roles import engine_ranks
from skyrl_megatron_observe.estimate.machine_rates import NONE, Machine, Seconds
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


HELD = 0.75
"""Share of a response that a running sequence has sampled, on average when the cache is full."""
MOMENTS = 64
"""Moments of an engine's sampling at which its batch is counted."""


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
    sizes, replicas = engine_bytes(cfg, table), engine.num_engines * engine.data_parallel_size
    slots = min(engine.max_num_seqs, _cached(cfg, sizes, gpu_bytes, float((prompts + HELD * responses).mean())))
    cost = _DecodeCost(cfg, table, flops, machine, sizes.token)
    shuffled = np.random.default_rng(0).permutation(len(responses))
    parts = np.array_split(shuffled, min(replicas, len(responses)))
    # the slowest is the engine with the most tokens or with the longest response
    chosen = {max(range(len(parts)), key=lambda part: by(responses[parts[part]])) for by in (np.sum, np.max)}
    slowest = max(
        (cost.decode(prompts[parts[part]], responses[parts[part]], max(int(slots), 1)) for part in sorted(chosen)),
        key=lambda sampled: sampled.decode.likely,
    )
    shared = cfg.generator.n_samples_per_prompt if engine.enable_prefix_caching else 1
    prefill = cost.prefill(float(flops.forward(prompts).sum()) / shared, float(prompts.sum()) / shared, replicas)
    requests = machine.request_overhead.times(len(responses) / replicas)
    return SamplingTime(prefill + requests, *slowest)


class _Decoded(NamedTuple):
    """The decode of one engine: the fields of :class:`SamplingTime` after its first."""

    decode: Seconds
    concurrent: float
    steps: float
    weights: float
    cache: float


@dataclass(frozen=True)
class _DecodeCost:
    """The seconds of an engine's steps. ``token``: bytes of KV cache of a token on a rank."""

    cfg: SkyRLTrainConfig
    table: ParameterTable
    flops: ModelFlops
    machine: Machine
    token: int

    def decode(self, prompts: np.ndarray, responses: np.ndarray, slots: int) -> _Decoded:
        """Return the decode of an engine that samples ``responses`` [b] after ``prompts`` [b], ``slots`` at once."""
        engine = self.cfg.generator.inference_engine
        begun = _begun(responses, slots)
        steps = float((begun + responses).max(initial=1))
        moments = (np.arange(MOMENTS)[:, None] + 0.5) * steps / MOMENTS  # [moments, b]
        running = (begun <= moments) & (moments < begun + responses)
        batch = running.sum(1)
        held = np.where(running, prompts + moments - begun, 0).sum(1)
        # pipeline stages work on different sequences: a stage has its share of them in each of its steps
        stages = engine.pipeline_parallel_size
        per_step, weights = self._steps(np.maximum(batch / stages, 1.0), held / stages)
        seconds = (float(bound.mean()) * steps * stages for bound in per_step)
        concurrent = float(responses.sum()) / steps
        return _Decoded(
            Seconds(*seconds), concurrent, steps, float(weights.mean()), self.token * float(held.mean()) / stages
        )

    def _steps(self, batch: np.ndarray, held: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return low, likely and high seconds of a step of ``batch`` [moments] sequences with ``held`` [moments]
        tokens of cache, and the bytes of weights that it reads, [moments]."""
        engine, machine, table = self.cfg.generator.inference_engine, self.machine, self.table
        tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
        layers, width = table.layers / pp, element_bytes(engine.model_dtype, table.plan.hf_config)
        weights = _weights_read(self.cfg, table, batch)
        pairs = self.flops.full_attention + self.flops.window_attention
        products = (batch * self.flops.linear + held * pairs) / tp / pp
        summed = 4 * layers * batch * table.plan.shape.dims["H"] * width * (tp - 1) / tp
        read, compute, link = machine.read(1.0), machine.decode(1.0, width), machine.across(tp, 1.0)
        waits = (machine.latency(tp).times(2) + machine.layer_step).times(layers)
        overhead = machine.step_overhead
        launches = machine.launch.times(layers) if engine.enforce_eager else NONE
        bounds = []
        for bound in ("low", "likely", "high"):
            of = operator.attrgetter(bound)
            work = np.maximum((weights + self.token * held) * of(read), products * of(compute))
            work = np.maximum(work + summed * of(link) + of(waits), of(launches))
            bounds.append(work + of(overhead) + of(machine.token_overhead) * batch)
        return bounds, weights

    def prefill(self, flops: float, tokens: float, replicas: int) -> Seconds:
        """Return the seconds of prompts of ``flops`` and ``tokens`` in all."""
        engine, table = self.cfg.generator.inference_engine, self.table
        tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
        width = element_bytes(engine.model_dtype, table.plan.hf_config)
        summed = 4 * table.layers / pp * tokens / replicas * table.plan.shape.dims["H"] * width
        return self.machine.prefill(flops / replicas / tp / pp, width) + self.machine.across(tp, summed)


def _begun(responses: np.ndarray, slots: int) -> np.ndarray:
    """Return the step in which an engine with ``slots`` begins each of ``responses`` [b], in their order, [b]."""
    begun = np.zeros(len(responses))
    ends = sorted(responses[:slots].tolist())
    for row in range(slots, len(responses)):
        begun[row] = ends[0]
        heapq.heapreplace(ends, begun[row] + float(responses[row]))
    return begun


def _cached(cfg: SkyRLTrainConfig, sizes: EngineBytes, gpu_bytes: int | None, tokens: float) -> float:
    """Return how many sequences of ``tokens`` the KV cache of an engine holds."""
    given = cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes")
    if given is None and gpu_bytes is None:
        return float("inf")
    cache = int(given) if given is not None else sizes.cache(budget_of_engine(cfg, gpu_bytes or 0))
    return max(cache / (sizes.token * max(tokens, 1.0)), 1.0)


def _weights_read(cfg: SkyRLTrainConfig, table: ParameterTable, batch: np.ndarray) -> np.ndarray:
    """Return the bytes of weights that a rank reads for ``batch`` [n] tokens: all but the embedding and the experts
    that no token chose, if tokens choose experts at random, [n]."""
    engine, dims = cfg.generator.inference_engine, table.plan.shape.dims
    tp, pp, ep = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size
    width = element_bytes(engine.model_dtype, table.plan.hf_config)
    elements = table.engine_rank(tp, pp, ep)
    experts = table.experts_of_a_layer() * sum(table.plan.shape.moe) / pp / (ep if ep > 1 else tp)
    chosen = np.ones(len(batch))
    if table.experts:
        # with expert parallelism, the tokens of all ranks reach an expert
        of_all = batch * (engine.data_parallel_size if ep > 1 else 1)
        chosen = 1 - max(1 - table.top_k / table.experts, 0.0) ** of_all
    embedding = dims["V"] * dims["H"] / tp if "untied" in table.plan.shape.flags and pp == 1 else 0.0
    read: np.ndarray = (elements - embedding - experts * (1 - chosen)) * width
    return read


def engine_gpus(cfg: SkyRLTrainConfig) -> int:
    """Count the ranks of all engines."""
    return cfg.generator.inference_engine.num_engines * engine_ranks(cfg)
