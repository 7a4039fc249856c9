"""Memory of each GPU and each node in each phase of a run: roles, engines, offloaded states.

With ``colocate_all`` trainer and engines take turns (docs/decisions/0007); otherwise each GPU has only the phases of
the roles or the engine on it. :func:`resident` alone decides what a role keeps on the GPU in a phase.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.quantized import BAND
from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.hf_model import element_bytes, kv_bytes_per_token
from skyrl_megatron.config.layout import ParallelConfig
from skyrl_megatron.config.resolve import longest_sequence
from skyrl_megatron.config.roles import (
    active_roles,
    engine_ranks,
    has_value_head,
    is_frozen,
    rank_position,
    role_layout,
    role_world_size,
    shares_policy_gpus,
    weight_bucket_sizes,
)
from skyrl_megatron.weight_sync.tensors import FUSED_EXPERTS
from skyrl_megatron_lora.tensors import configured_pairs
from skyrl_megatron_observe.estimate.memory_activations import (
    HeadMemory,
    Kernels,
    LayerActivations,
    Recompute,
    activations_in_flight,
    forward_set,
    logits,
    working_set,
)
from skyrl_megatron_observe.estimate.memory_parameters import (
    AdapterTable,
    Factors,
    ParameterTable,
    RankBytes,
    StageParameters,
    rank_bytes,
    received_bytes,
    slot_bytes,
)

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


LOCAL_LAYERS = frozenset(
    {
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "mimo_v2_flash",
        "minimax_m2",
        "olmoe",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
)
"""Families that Transformer Engine's layers do not support. They use this package's layers on GPUs too."""


@dataclass(frozen=True, eq=False)
class RoleModel:
    """One role's model in its layout."""

    cfg: SkyRLTrainConfig
    role: str
    table: ParameterTable
    parallel: ParallelConfig
    kernels: Kernels

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, role: str, table: ParameterTable, *, on_cpu: bool = False) -> RoleModel:
        """Build from the role's section of ``cfg``, with the kernels of a GPU or a CPU."""
        asked = getattr(cfg.trainer, role).megatron_config.transformer_config_kwargs.get("transformer_impl")
        fused = not on_cpu and table.plan.family.model_type not in LOCAL_LAYERS and asked != "local"
        kernels = Kernels(2 if cfg.trainer.bf16 and not on_cpu else 4, fused, on_cpu=on_cpu)
        return cls(cfg, role, table, role_layout(cfg, role), kernels)

    @property
    def trained(self) -> bool:
        """Whether the role has gradients and an optimizer."""
        return not is_frozen(self.role)

    @property
    def settings(self) -> Any:
        """The role's section of the configuration."""
        return getattr(self.cfg.trainer, self.role)

    @functools.cached_property
    def layers(self) -> LayerActivations:
        """Activation bytes per token of the model's layers."""
        longest = longest_sequence(self.cfg)
        return LayerActivations(self.table, self.parallel, self.kernels, longest=longest, adapters=self.adapters)

    @functools.cached_property
    def recompute(self) -> Recompute:
        """Which activations are recomputed."""
        kwargs = self.settings.megatron_config.transformer_config_kwargs
        return Recompute.of(kwargs, enabled=self.cfg.trainer.gradient_checkpointing and self.trained)

    def parameters(self, stage: int) -> StageParameters:
        """Count the parameters on a rank of a stage."""
        head, frozen = has_value_head(self.cfg, self.role), self.adapters is not None
        return self.table.stage(self.parallel, stage, value_head=head, te=self.kernels.fused, frozen=frozen)

    def state(self, stage: int) -> RankBytes:
        """Return the memory that a rank of a stage keeps between steps."""
        return self._states[stage]

    @functools.cached_property
    def _states(self) -> list[RankBytes]:
        megatron, bf16 = self.settings.megatron_config, self.kernels.width == 2
        return [
            rank_bytes(
                self.parameters(stage),
                self.parallel,
                megatron,
                bf16=bf16,
                trained=self.trained,
                adapters=self.factors(stage),
                muon=self.trained and self.settings.optimizer_config.optimizer == "muon",
            )
            for stage in range(self.parallel.pp)
        ]

    @property
    def adapters(self) -> AdapterTable | None:
        """The adapter that a pass computes with, the largest of several; None without adapters."""
        tables = self.table.adapters if self.role == "policy" else ()
        return max(tables, key=lambda table: self._factors(table, 0).parameters, default=None)

    def factors(self, stage: int) -> Factors | None:
        """Count the elements of all adapters on a rank of a stage; None without adapters."""
        tables = self.table.adapters if self.role == "policy" else ()
        return sum((self._factors(table, stage) for table in tables), Factors(0, 0, 0)) if tables else None

    def _factors(self, table: AdapterTable, stage: int) -> Factors:
        return table.stage(self.parallel, stage, te=self.kernels.fused)

    def tokens(self, *, training: bool) -> int:
        """Return the maximum number of tokens of a micro-batch on a rank."""
        trainer = self.cfg.trainer
        rows = trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu
        longest = self.parallel.alignment * -(-longest_sequence(self.cfg) // self.parallel.alignment)
        most = trainer.max_tokens_per_microbatch if trainer.max_tokens_per_microbatch > 0 else rows * longest
        return -(-most // self.parallel.cp)

    def micro_batches(self) -> int:
        """Return the minimum number of micro-batches of an optimizer step on a replica."""
        trainer = self.cfg.trainer
        mini = trainer.critic_mini_batch_size if self.role == "critic" else trainer.policy_mini_batch_size
        rows = mini * self.cfg.generator.n_samples_per_prompt // max(self.parallel.dp, 1)
        most = trainer.max_tokens_per_microbatch
        if most > 0:
            return max(1, -(-rows * longest_sequence(self.cfg) // most))
        return max(1, rows // trainer.micro_train_batch_size_per_gpu)

    def training(self, stage: int, tokens: int | None = None) -> int:
        """Return the bytes of a training pass in addition to the state: saved activations, and the larger of a running
        layer and the head. ``tokens``: of a micro-batch, by default the maximum."""
        tokens = self.tokens(training=True) if tokens is None else -(-tokens // self.parallel.cp)
        kept = activations_in_flight(self.layers, tokens, stage, self.recompute, self.micro_batches())
        layer = working_set(self.layers, tokens, self.recompute) + self._made(stage)
        return int(kept + max(layer, self._head(stage, tokens, True)))

    def forward(self, stage: int) -> int:
        """Return the bytes of a pass without gradients, in addition to the weights."""
        tokens = self.tokens(training=False)
        return int(max(forward_set(self.layers, tokens) + self._made(stage), self._head(stage, tokens, False)))

    def _made(self, stage: int) -> int:
        """Return the bytes of a weight dequantised from 8 bits, and of the temporary tensors for it."""
        made = self.parameters(stage).made
        return made * self.kernels.width + 2 * 4 * min(made, BAND)

    def _head(self, stage: int, tokens: int, training: bool) -> float:
        if stage != self.parallel.pp - 1 or has_value_head(self.cfg, self.role):
            return 0.0
        head = HeadMemory(self.cfg.trainer.logprobs_chunk_size, self.cfg.trainer.fused_lm_head_logprob)
        return logits(self.layers, tokens, head, training=training)


def role_models(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable]) -> dict[str, RoleModel]:
    """Return role → model in its layout. ``tables``: role → its parameters."""
    return {role: RoleModel.of(cfg, role, tables[role]) for role in active_roles(cfg)}


GRAPH_BYTES = 1 << 30
"""CUDA graphs of an engine, also while it sleeps; none with ``enforce_eager``."""
SAMPLER_COPIES = 3
"""Number of fp32 copies of the logits while tokens are sampled."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """Bytes on each rank of an engine."""

    weights: int
    at_work: int
    """Largest temporary tensors of a step with ``max_num_batched_tokens`` and ``max_num_seqs``."""
    token: int
    """KV cache per token."""
    longest: int
    """Tokens of the longest sequence."""
    graphs: int
    adapters: int = 0
    """Adapter slots."""
    counters: int = 0
    """Token counts for penalties, for ``max_num_seqs`` requests. They are always allocated, and offloaded with the
    weights (vllm/v1/worker/gpu/sample/penalties.py)."""
    received: int = 0
    """Received adapters during a weight sync, in addition to those in the slots."""

    @property
    def least(self) -> int:
        """Minimum bytes to start: weights, adapters, a step, and the KV cache of one longest sequence."""
        return self.weights + self.adapters + self.counters + self.at_work + self.token * self.longest

    def cache(self, budget: int) -> int:
        """Return the bytes of KV cache that fit into ``budget``; negative if the weights do not fit."""
        return budget - self.weights - self.adapters - self.counters - self.at_work


def engine_bytes(cfg: SkyRLTrainConfig, table: ParameterTable) -> EngineBytes:
    """Return the memory of each rank of an engine for the model of ``table``."""
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


CONTEXT_BYTES = 450 * 10**6
"""CUDA context of a process. Workers that open memory of other GPUs by CUDA IPC need no additional context."""
LIBRARY_BYTES = 500 * 10**6
"""cuBLAS and Transformer Engine workspaces of a process."""
COMMUNICATOR_BYTES = 200 * 10**6
"""Buffers of an NCCL communicator."""
FRAGMENTATION = 0.1
"""Share of activations that fragmentation of the caching allocator adds."""

TRAINING, LOGPROBS, SYNC, GENERATION, START = "training", "log-probs", "weight sync", "generation", "engine start"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """An item of a phase's memory."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Peak memory of one GPU or one node in a phase."""

    where: str
    """The GPU or node, such as ``rank 3``."""
    name: str
    parts: tuple[MemoryItem, ...]
    limit: int | None = None
    """Available bytes, if not the whole GPU."""

    @property
    def total(self) -> int:
        """Sum of all items in bytes."""
        return sum(part.nbytes for part in self.parts)


def resident(cfg: SkyRLTrainConfig, role: str, phase: str, worker: str | None = None) -> frozenset[str]:
    """Return which of ``weights``, ``gradients``, ``optimizer`` a role's rank has on its GPU in a phase.

    ``worker``: the role that trains or computes log-probs. With ``colocate_all`` everything is offloaded before
    engines generate, and loaded when it is needed (``runtime/offload.py``). A reference or teacher on the policy's
    GPUs is offloaded after it has computed its log-probs. Without ``offload_after_step`` the optimizer state stays on
    the GPU.
    """
    if is_frozen(role):
        alone = not shares_policy_gpus(cfg, role)
        return frozenset({"weights"}) if alone or worker == role else frozenset()
    everything = frozenset({"weights", "gradients", "optimizer"})
    if not cfg.trainer.placement.colocate_all or (phase == TRAINING and worker == role):
        return everything
    leaves = {"gradients"}
    if getattr(cfg.trainer, role).optimizer_config.offload_after_step:
        leaves.add("optimizer")
    if worker != role:
        leaves.add("weights")
    return everything - leaves


def gpu_phases(cfg: SkyRLTrainConfig, models: dict[str, RoleModel], gpu: int | None) -> Iterator[PhaseMemory]:
    """Yield the phases of every GPU with distinct contents. ``gpu``: its memory in bytes, of which an engine takes a
    share; None: unknown."""
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    engines = engine_bytes(cfg, models["policy"].table) if engine.run_engines_locally else None
    shared = {"policy", "ref"} if placement.colocate_policy_ref else {"policy"}
    shared = set(models) if placement.colocate_all else shared & set(models)
    for roles in [[role for role in models if role in shared], *([role] for role in models if role not in shared)]:
        together = {role: models[role] for role in roles}
        seen: set[tuple[int, ...]] = set()
        for rank in range(role_world_size(placement, roles[0])):
            stages = tuple(rank_position(model.parallel, rank).pp for model in together.values())
            if stages not in seen:
                seen.add(stages)
                yield from _Gpu(cfg, rank, together, stages, engines if placement.colocate_all else None, gpu).phases()
    if engines is not None and not placement.colocate_all:
        yield from _engine_phases(cfg, engines, models["policy"], gpu)


def budget_of_engine(cfg: SkyRLTrainConfig, gpu: int) -> int:
    """Return the bytes that an engine may use on a GPU of ``gpu`` bytes."""
    return int(cfg.generator.inference_engine.gpu_memory_utilization * gpu)


@dataclass(frozen=True)
class _Gpu:
    """A GPU that ranks of one or several roles, and possibly an engine, share."""

    cfg: SkyRLTrainConfig
    rank: int
    models: dict[str, RoleModel]
    stages: tuple[int, ...]
    engine: EngineBytes | None
    gpu: int | None

    def phases(self) -> Iterator[PhaseMemory]:
        """Yield the phases of this GPU."""
        for role, model in self.models.items():
            yield self._phase(f"{role} {LOGPROBS}", [*self._states(LOGPROBS, role), self._forward(role)])
            if model.trained:
                yield self._phase(f"{role} {TRAINING}", [*self._states(TRAINING, role), self._training(role)])
        if "policy" in self.models and supervised(self.cfg) is None:
            yield self._phase(SYNC, self._states(SYNC, "policy") + self._sync())
        if self.engine is not None:
            yield from _start(self.cfg, self.engine, self.gpu, f"rank {self.rank}")
            if self.gpu is not None:
                share = MemoryItem(f"engine ({_utilization(self.cfg)})", budget_of_engine(self.cfg, self.gpu))
                yield self._phase(GENERATION, [*self._states(GENERATION), share])

    def _phase(self, name: str, parts: list[MemoryItem]) -> PhaseMemory:
        own = [MemoryItem("CUDA contexts and libraries", self._processes()), *parts]
        return PhaseMemory(f"rank {self.rank}", name, tuple(part for part in own if part.nbytes))

    def _processes(self) -> int:
        """Return the bytes of the idle processes on this GPU: contexts, libraries, communicators."""
        size = 0
        for model in self.models.values():
            p = model.parallel
            groups = sum(degree > 1 for degree in (p.world_size, p.tp, p.pp, p.cp, p.dp_cp, p.ep, p.etp, p.edp))
            size += CONTEXT_BYTES + LIBRARY_BYTES + groups * COMMUNICATOR_BYTES
        if self.engine is not None:
            size += _engine_process(self.cfg, self.engine)
        return size

    def _states(self, phase: str, worker: str | None = None) -> list[MemoryItem]:
        """Return the states of all roles on this GPU while ``worker`` runs."""
        parts = []
        for (role, model), stage in zip(self.models.items(), self.stages, strict=True):
            state, here = model.state(stage), resident(self.cfg, role, phase, worker)
            sizes = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
            parts += [MemoryItem(f"{role} {what}", size) for what, size in sizes.items() if what in here]
            parts.append(MemoryItem(f"{role} buffers", state.buffers))
        return parts

    def _training(self, role: str) -> MemoryItem:
        model, stage = self.models[role], self._stage(role)
        tokens = model.tokens(training=True)
        work = max(round(model.training(stage) * (1 + FRAGMENTATION)), model.state(stage).step)
        return MemoryItem(f"{role} activations ({tokens} tokens a micro-batch)", work)

    def _forward(self, role: str) -> MemoryItem:
        model = self.models[role]
        tokens, work = model.tokens(training=False), model.forward(self._stage(role))
        return MemoryItem(f"{role} activations ({tokens} tokens a micro-batch)", round(work * (1 + FRAGMENTATION)))

    def _stage(self, role: str) -> int:
        return self.stages[list(self.models).index(role)]

    def _sync(self) -> list[MemoryItem]:
        buckets = 3 * weight_bucket_sizes(self.cfg)[-1]
        parts = [MemoryItem("buckets of the sender", buckets)]
        policy = self.models["policy"]
        factors = policy.factors(self._stage("policy"))
        if factors is not None and policy.settings.model.lora.sync_mode != "memory":
            # fp32: A and B of the weights that this rank sends, their scaled product, and the rows that it is added to
            merged = buckets * 4 // policy.kernels.width
            parts.append(MemoryItem("adapters being merged", factors.gathered * 4 + merged))
        if self.engine is not None:
            parts.append(MemoryItem("engine weights", self.engine.weights))
            parts.append(MemoryItem("engine adapter slots", self.engine.adapters))
            parts.append(MemoryItem("engine penalty counters", self.engine.counters))
            parts += _received(self.cfg, self.models["policy"], self.engine)
        return parts


def _engine_phases(
    cfg: SkyRLTrainConfig, engine: EngineBytes, policy: RoleModel, gpu: int | None
) -> Iterator[PhaseMemory]:
    """Yield the phases of a GPU that only an engine uses."""
    yield from _start(cfg, engine, gpu, "engine GPU")
    process = MemoryItem("CUDA context and libraries", _engine_process(cfg, engine))
    if gpu is not None:
        share = MemoryItem(f"engine ({_utilization(cfg)})", budget_of_engine(cfg, gpu))
        yield PhaseMemory("engine GPU", SYNC, (process, share, *_received(cfg, policy, engine)))


def _start(cfg: SkyRLTrainConfig, engine: EngineBytes, gpu: int | None, where: str) -> Iterator[PhaseMemory]:
    if gpu is None or cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes"):
        return
    parts = (
        MemoryItem("engine weights", engine.weights),
        MemoryItem("engine adapter slots", engine.adapters),
        MemoryItem("engine penalty counters", engine.counters),
        MemoryItem("temporary tensors of an engine step", engine.at_work),
        MemoryItem(f"KV cache of one sequence of {engine.longest} tokens", engine.token * engine.longest),
    )
    yield PhaseMemory(where, START, tuple(part for part in parts if part.nbytes), limit=budget_of_engine(cfg, gpu))


def _received(cfg: SkyRLTrainConfig, policy: RoleModel, engine: EngineBytes) -> list[MemoryItem]:
    """Return the receiver's buckets, and the tensors that it collects before the engine loads them: the experts of a
    layer, or all adapters if only adapters are sent."""
    buckets = MemoryItem("buckets of the receiver", 3 * weight_bucket_sizes(cfg)[-1])
    if engine.received:
        return [buckets, MemoryItem("received adapters", engine.received)]
    width, table = policy.kernels.width, policy.table
    fused = table.plan.family.model_type in FUSED_EXPERTS
    held = table.experts_of_a_layer() * width
    what = "fused experts of a layer" if fused else "experts of a layer being received"
    return [buckets, MemoryItem(what, held)]


def _engine_process(cfg: SkyRLTrainConfig, engine: EngineBytes) -> int:
    degrees = (cfg.generator.inference_engine.tensor_parallel_size, cfg.generator.inference_engine.data_parallel_size)
    groups = sum(degree > 1 for degree in degrees) + 1
    return CONTEXT_BYTES + LIBRARY_BYTES + groups * COMMUNICATOR_BYTES + engine.graphs


def _utilization(cfg: SkyRLTrainConfig) -> str:
    return f"gpu_memory_utilization={cfg.generator.inference_engine.gpu_memory_utilization:g}"


BLOCK_BYTES = 1 << 28
"""Size of the pinned host blocks into which states are offloaded (``runtime/offload.py``)."""
RANK_PROCESS_BYTES = 4 * 10**9
"""Host memory of a trainer rank: libraries, staging buffers, batches."""
ENGINE_PROCESS_BYTES = 5 * 10**9
"""Host memory of an engine rank."""
DRIVER_BYTES = 12 * 10**9
"""Host memory of the driver, Ray and its object store."""


def node_phase(cfg: SkyRLTrainConfig, models: dict[str, RoleModel]) -> PhaseMemory:
    """Return the memory of the fullest node while engines generate, when most states are offloaded."""
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    parts = [MemoryItem("driver, Ray and its object store", DRIVER_BYTES)]
    for role, model in models.items():
        here: int = getattr(placement, f"{role}_num_gpus_per_node")
        parts.append(MemoryItem(f"{here} {role} processes", here * RANK_PROCESS_BYTES))
        parts += _of_ranks(cfg, role, model, here)
    if engine.run_engines_locally:
        ranks = engine.num_engines * engine_ranks(cfg)
        if placement.colocate_all:
            ranks = min(ranks, placement.policy_num_gpus_per_node)
        parts.append(MemoryItem(f"{ranks} engine processes", ranks * ENGINE_PROCESS_BYTES))
    return PhaseMemory("a node", "host memory", tuple(part for part in parts if part.nbytes))


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def copied_bytes(model: RoleModel, stage: int) -> int:
    """Return the bytes of a peer checkpoint of a rank: its trained state, without the frozen base model of
    adapters."""
    state, factors = model.state(stage), model.factors(stage)
    weights = state.weights + state.buffers if factors is None else factors.parameters * model.kernels.width
    return weights + state.optimizer + state.host_optimizer * 3 // 4


def _of_ranks(cfg: SkyRLTrainConfig, role: str, model: RoleModel, here: int) -> list[MemoryItem]:
    """Return the maximum host memory of ``here`` consecutive ranks."""
    away = resident(cfg, role, TRAINING, role) - resident(cfg, role, GENERATION) - {"gradients"}
    per_stage = role_world_size(cfg.trainer.placement, role) // model.parallel.pp
    stages = range(-(-here // per_stage))
    most = max(range(model.parallel.pp), key=lambda stage: model.state(stage).device)
    chosen = [most] if len(stages) == 1 else list(stages)
    states = [model.state(stage) for stage in chosen]
    share = here / len(states)

    def total(size: float) -> int:
        return round(size * share)

    offloaded = sum(_blocks(getattr(state, what)) for state in states for what in away)
    parts = [
        MemoryItem(f"{role} {' and '.join(sorted(away, reverse=True))} off the GPU", total(offloaded)),
        MemoryItem(f"{role} optimizer of optimizer_cpu_offload", total(sum(state.host_optimizer for state in states))),
    ]
    unscaled = sum(state.unscaled for state in states)
    parts.append(MemoryItem(f"{role} optimizer unscaled for a checkpoint", total(unscaled)))
    if model.trained and model.settings.megatron_config.async_dist_ckpt_save:
        copied = sum(state.weights / max(model.parallel.dp_cp, 1) + state.optimizer for state in states) + unscaled
        copied += sum(state.host_optimizer * 3 / 4 for state in states)  # without the gradients
        parts.append(MemoryItem(f"{role} checkpoint while it is written", total(copied)))
    healing = cfg.trainer.healing
    if healing.enabled and healing.copies == "neighbour" and model.trained:
        kept = sum(2 * _blocks(copied_bytes(model, stage)) for stage in chosen)
        parts.append(MemoryItem(f"{role} peer checkpoints, two per rank", total(kept)))
    return [part for part in parts if part.nbytes]
