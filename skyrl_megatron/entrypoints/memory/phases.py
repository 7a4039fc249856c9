"""What lies on each GPU in each phase of a run.

With ``colocate_all`` trainer and engines take turns (ARCHITECTURE.md, decision 14); otherwise each GPU has the phases
of those who live on it. What a role keeps on the GPU in a phase is :func:`resident`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_megatron.config.rules.role_layout import (
    is_frozen,
    rank_position,
    role_world_size,
    shares_policy_gpus,
    weight_bucket_sizes,
)
from skyrl_megatron.entrypoints.memory.engines import EngineBytes, engine_bytes
from skyrl_megatron.entrypoints.memory.roles import RoleModel
from skyrl_megatron.weight_sync.metadata import FUSED_EXPERTS

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

CONTEXT_BYTES = 450 * 10**6
"""A process's CUDA context. Workers that read other GPUs' memory (CUDA IPC) map it into the one they have."""
LIBRARY_BYTES = 500 * 10**6
"""cuBLAS and Transformer Engine workspaces of a process."""
COMMUNICATOR_BYTES = 200 * 10**6
"""Buffers of an NCCL communicator."""
FRAGMENTATION = 0.1
"""Of activations: what the caching allocator cannot use again."""

TRAINING, LOGPROBS, SYNC, GENERATION, START = "training", "log-probs", "weight sync", "generation", "engine start"


@dataclass(frozen=True, slots=True)
class Part:
    """Something in memory."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What one GPU, or one node, holds at the fullest moment of a phase."""

    where: str
    """Such as ``rank 3``."""
    name: str
    parts: tuple[Part, ...]
    limit: int | None = None
    """Bytes that it may take where that is not the whole of the GPU."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def resident(cfg: SkyRLTrainConfig, role: str, phase: str, worker: str | None = None) -> frozenset[str]:
    """Return what of ``weights``, ``gradients``, ``optimizer`` a role's rank has on its GPU in a phase.

    ``worker``: the role that trains or scores. With ``colocate_all`` everything leaves before engines generate and
    comes back where it is needed (``runtime/offload.py``); a reference or teacher on the policy's GPUs leaves once it
    has scored. The optimizer's state stays without ``offload_after_step``.
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


def gpu_phases(cfg: SkyRLTrainConfig, models: dict[str, RoleModel], gpu: int | None) -> Iterator[Phase]:
    """Yield the phases of every GPU that differs from others. ``gpu``: its bytes, which an engine takes a share of."""
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
    """Return the bytes that an engine takes of a GPU of ``gpu`` bytes."""
    return int(cfg.generator.inference_engine.gpu_memory_utilization * gpu)


@dataclass(frozen=True)
class _Gpu:
    """A GPU that ranks of some roles, and perhaps an engine, share."""

    cfg: SkyRLTrainConfig
    rank: int
    models: dict[str, RoleModel]
    stages: tuple[int, ...]
    engine: EngineBytes | None
    gpu: int | None

    def phases(self) -> Iterator[Phase]:
        """Yield the phases of this GPU."""
        for role, model in self.models.items():
            yield self._phase(f"{role} {LOGPROBS}", [*self._states(LOGPROBS, role), self._forward(role)])
            if model.trained:
                yield self._phase(f"{role} {TRAINING}", [*self._states(TRAINING, role), self._training(role)])
        if "policy" in self.models:
            yield self._phase(SYNC, self._states(SYNC, "policy") + self._sync())
        if self.engine is not None:
            yield from _start(self.cfg, self.engine, self.gpu, f"rank {self.rank}")
            if self.gpu is not None:
                share = Part(f"engine ({_utilization(self.cfg)})", budget_of_engine(self.cfg, self.gpu))
                yield self._phase(GENERATION, [*self._states(GENERATION), share])

    def _phase(self, name: str, parts: list[Part]) -> Phase:
        own = [Part("CUDA contexts and libraries", self._processes()), *parts]
        return Phase(f"rank {self.rank}", name, tuple(part for part in own if part.nbytes))

    def _processes(self) -> int:
        """Return what the processes on this GPU take without doing anything."""
        size = 0
        for model in self.models.values():
            p = model.parallel
            groups = sum(degree > 1 for degree in (p.world_size, p.tp, p.pp, p.cp, p.dp_cp, p.ep, p.etp, p.edp))
            size += CONTEXT_BYTES + LIBRARY_BYTES + groups * COMMUNICATOR_BYTES
        if self.engine is not None:
            size += _engine_process(self.cfg, self.engine)
        return size

    def _states(self, phase: str, worker: str | None = None) -> list[Part]:
        """Return what all roles have here while ``worker`` works."""
        parts = []
        for (role, model), stage in zip(self.models.items(), self.stages, strict=True):
            state, here = model.state(stage), resident(self.cfg, role, phase, worker)
            sizes = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
            parts += [Part(f"{role} {what}", size) for what, size in sizes.items() if what in here]
            parts.append(Part(f"{role} buffers", state.buffers))
        return parts

    def _training(self, role: str) -> Part:
        model, stage = self.models[role], self._stage(role)
        tokens = model.tokens(training=True)
        work = max(round(model.training(stage) * (1 + FRAGMENTATION)), model.state(stage).step)
        return Part(f"{role} activations ({tokens} tokens a micro-batch)", work)

    def _forward(self, role: str) -> Part:
        model = self.models[role]
        tokens, work = model.tokens(training=False), model.forward(self._stage(role))
        return Part(f"{role} activations ({tokens} tokens a micro-batch)", round(work * (1 + FRAGMENTATION)))

    def _stage(self, role: str) -> int:
        return self.stages[list(self.models).index(role)]

    def _sync(self) -> list[Part]:
        buckets = 3 * weight_bucket_sizes(self.cfg)[-1]
        parts = [Part("buckets of the sender", buckets)]
        policy = self.models["policy"]
        factors = policy.factors(self._stage("policy"))
        if factors is not None and policy.settings.model.lora.sync_mode != "memory":
            # fp32: factors of what this rank sends, their product, scaled, and the rows it joins
            merged = buckets * 4 // policy.kernels.width
            parts.append(Part("adapters that are merged", factors.gathered * 4 + merged))
        if self.engine is not None:
            parts.append(Part("engine weights", self.engine.weights))
            parts.append(Part("engine slots of adapters", self.engine.adapters))
            parts.append(Part("engine counters of penalties", self.engine.counters))
            parts += _received(self.cfg, self.models["policy"], self.engine)
        return parts


def _engine_phases(cfg: SkyRLTrainConfig, engine: EngineBytes, policy: RoleModel, gpu: int | None) -> Iterator[Phase]:
    """Yield the phases of a GPU that only an engine uses."""
    yield from _start(cfg, engine, gpu, "engine GPU")
    process = Part("CUDA context and libraries", _engine_process(cfg, engine))
    if gpu is not None:
        share = Part(f"engine ({_utilization(cfg)})", budget_of_engine(cfg, gpu))
        yield Phase("engine GPU", SYNC, (process, share, *_received(cfg, policy, engine)))


def _start(cfg: SkyRLTrainConfig, engine: EngineBytes, gpu: int | None, where: str) -> Iterator[Phase]:
    if gpu is None or cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes"):
        return
    parts = (
        Part("engine weights", engine.weights),
        Part("engine slots of adapters", engine.adapters),
        Part("engine counters of penalties", engine.counters),
        Part("a step of the engine", engine.at_work),
        Part(f"KV cache of one sequence of {engine.longest} tokens", engine.token * engine.longest),
    )
    yield Phase(where, START, tuple(part for part in parts if part.nbytes), limit=budget_of_engine(cfg, gpu))


def _received(cfg: SkyRLTrainConfig, policy: RoleModel, engine: EngineBytes) -> list[Part]:
    """Return the receiver's buckets, and what is put together of a layer, or all of adapters that travel alone, before
    the engine takes it."""
    buckets = Part("buckets of the receiver", 3 * weight_bucket_sizes(cfg)[-1])
    if engine.received:
        return [buckets, Part("adapters that are received", engine.received)]
    width, table = policy.kernels.width, policy.table
    fused = table.plan.family.model_type in FUSED_EXPERTS
    held = table.experts_of_a_layer() * width
    what = "fused experts of a layer" if fused else "experts of a layer until it is whole"
    return [buckets, Part(what, held)]


def _engine_process(cfg: SkyRLTrainConfig, engine: EngineBytes) -> int:
    degrees = (cfg.generator.inference_engine.tensor_parallel_size, cfg.generator.inference_engine.data_parallel_size)
    groups = sum(degree > 1 for degree in degrees) + 1
    return CONTEXT_BYTES + LIBRARY_BYTES + groups * COMMUNICATOR_BYTES + engine.graphs


def _utilization(cfg: SkyRLTrainConfig) -> str:
    return f"gpu_memory_utilization={cfg.generator.inference_engine.gpu_memory_utilization:g}"
