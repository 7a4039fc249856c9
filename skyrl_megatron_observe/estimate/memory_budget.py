"""The memory budget of every GPU and node, its report, and the nearest settings that fit.

``memory_parameters.py`` counts the parameters, gradients, optimizer states and adapters of each rank,
``memory_activations.py`` the memory of a micro-batch, and ``memory_phases.py`` combines both with the engines for each
phase of a run. This file compares the result with the available memory. Everything is computed from ``config.json``
and the configuration; no model is built.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.plan import Plan
from skyrl_megatron.checks import GPU_MEMORY, HOST_MEMORY
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import get_path, owner_of
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.resolve import longest_sequence
from skyrl_megatron.config.roles import active_roles, adapter_configs, trains_draft
from skyrl_megatron.config.rules.placement_rules import placement_problems
from skyrl_megatron.config.rules.training_rules import training_problems
from skyrl_megatron.config.schema.models import AUTO
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron_observe.estimate.memory_activations import IMBALANCE
from skyrl_megatron_observe.estimate.memory_parameters import AdapterTable, ParameterTable
from skyrl_megatron_observe.estimate.memory_phases import (
    FRAGMENTATION,
    TRAINING,
    PhaseMemory,
    RoleModel,
    gpu_phases,
    node_phase,
    role_models,
)

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware


@dataclass(frozen=True)
class Budget:
    """Memory of a run on each GPU and each node."""

    models: dict[str, RoleModel]
    gpus: tuple[PhaseMemory, ...]
    node: PhaseMemory
    hardware: Hardware

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware) -> Budget:
        """Compute the budget. ``cfg`` must be valid except for its memory; ``tables``: role → its parameters."""
        models = role_models(cfg, tables)
        return cls(
            models,
            tuple(gpu_phases(cfg, models, hardware.gpu_bytes)),
            node_phase(cfg, models),
            hardware,
        )

    def limit(self, phase: PhaseMemory) -> int | None:
        """Return the bytes available to a phase; None if unknown."""
        whole = self.hardware.host_bytes if phase is self.node else self.hardware.gpu_bytes
        return whole if phase.limit is None else phase.limit

    def excess(self, phase: PhaseMemory) -> int:
        """Return the bytes by which a phase is too large; 0 or less if it fits or the limit is unknown."""
        limit = self.limit(phase)
        return 0 if limit is None else phase.total - limit

    def fullest(self) -> list[PhaseMemory]:
        """Return the fullest GPU of each phase, in the order of a step, and the node."""
        found: dict[tuple[str, bool], PhaseMemory] = {}
        for phase in self.gpus:
            key = (phase.name, phase.where.startswith("rank"))
            if key not in found or phase.total > found[key].total:
                found[key] = phase
        return [*found.values(), self.node]

    def tightest(self) -> PhaseMemory:
        """Return the phase that comes closest to its limit; the largest one of a GPU if no limit is known."""

        def share(phase: PhaseMemory) -> float:
            return phase.total / (self.limit(phase) or float("inf"))

        phases = self.fullest()
        limited = [phase for phase in phases if self.limit(phase) is not None]
        return max(limited, key=share) if limited else max(phases[:-1], key=lambda phase: phase.total)

    def too_large(self) -> list[PhaseMemory]:
        """Return the phases that do not fit, the worst of each kind first."""
        return sorted((p for p in self.fullest() if self.excess(p) > 0), key=self.excess, reverse=True)


@functools.lru_cache(maxsize=4)
def _plan(config: str, draft: bool) -> Plan:
    """Return the plan of a ``config.json``, which checks and reports of one run read several times."""
    return Plan.of(json.loads(config), draft=draft)


def parameter_tables(cfg: SkyRLTrainConfig) -> dict[str, ParameterTable]:
    """Return role → parameters of its model. A hub model whose ``config.json`` is not in the cache is left out. Raises
    ConfigError for an unsupported model."""
    tables: dict[str, ParameterTable] = {}
    read: dict[str, ParameterTable] = {}
    for role in active_roles(cfg):
        section = getattr(cfg.trainer, role)
        key, path = f"trainer.{role}.model.path", section.model.path
        hf = read_hf_config(cfg, role) if path else None
        if hf is None:
            continue
        hf = {**hf, **section.model_config_kwargs, **section.megatron_config.model_config_kwargs}
        draft = trains_draft(cfg, role)
        changes = section.model_config_kwargs, section.megatron_config.model_config_kwargs
        name = repr((path, section.model.revision, changes, draft))
        try:
            if name not in read:
                read[name] = ParameterTable(_plan(json.dumps(hf), draft))
        except BridgeError as error:
            raise ConfigError([Problem(key, path, str(error))]) from None
        tables[role] = read[name]
    if "policy" in tables and cfg.trainer.policy.model.lora.rank:
        table = tables["policy"]
        table.adapters = [
            AdapterTable.of(adapter_cfg, table.plan, table.top_k) for adapter_cfg in adapter_configs(cfg).values()
        ]
    return tables


TRIES = 3000
"""Maximum number of combinations that :func:`nearest` tries, the cheapest first."""
CHANGES = 4
"""Maximum number of settings that :func:`nearest` changes at a time."""

_M = "trainer.policy.megatron_config."
_E = "generator.inference_engine."


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A change of one or several settings, and its relative cost in speed and exactness."""

    settings: Mapping[str, Any]
    cost: int

    def __str__(self) -> str:
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.settings.items()
        )


def nearest(
    cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware
) -> tuple[Adjustment, ...] | None:
    """Return the cheapest changes with which the run fits; None if no tried combination fits."""
    knobs = [list(knob) for knob in _knobs(cfg, tables, hardware)]
    knobs = [knob for knob in knobs if knob]
    tries = sorted(_combinations(knobs), key=lambda changes: sum(change.cost for change in changes))
    original = pickle.dumps(cfg)  # unpickling is ten times as fast as copy.deepcopy
    for changes in tries[:TRIES]:
        changed = _changed(pickle.loads(original), changes)
        if _is_valid(changed, tables, hardware) and not Budget.of(changed, tables, hardware).too_large():
            return changes
    return None


def _combinations(knobs: list[list[Adjustment]]) -> Iterator[tuple[Adjustment, ...]]:
    for count in range(1, CHANGES + 1):
        for chosen in itertools.combinations(knobs, count):
            yield from itertools.product(*chosen)


def _changed(changed: SkyRLTrainConfig, changes: tuple[Adjustment, ...]) -> SkyRLTrainConfig:
    for change in changes:
        for key, value in change.settings.items():
            section, _, name = key.rpartition(".")
            if section.endswith("_kwargs"):
                get_path(changed, section)[name] = value
            else:
                owner, name = owner_of(changed, key)
                setattr(owner, name, value)
    derive(changed)
    return changed


def _is_valid(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware) -> bool:
    configs = {role: table.plan.hf_config for role, table in tables.items()}
    problems = itertools.chain(placement_problems(cfg, hardware, configs), training_problems(cfg))
    return next(problems, None) is None


def _knobs(
    cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware
) -> Iterator[Iterator[Adjustment]]:
    """Yield the possible adjustments of each setting."""
    yield _recomputation(cfg)
    yield _tokens(cfg)
    yield _engine_share(cfg)
    yield _engine_width(cfg)
    yield _degree(cfg, "expert_model_parallel_size", tables["policy"].experts, 2)
    yield _degree(cfg, "tensor_model_parallel_size", 8, 3)
    yield _degree(cfg, "pipeline_model_parallel_size", tables["policy"].layers, 4)
    yield _optimizer(cfg, hardware)
    yield _offload(cfg)
    yield _checkpoints(cfg)
    yield _graphs(cfg)


def _recomputation(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    kwargs = cfg.trainer.policy.megatron_config.transformer_config_kwargs
    uniform = kwargs.get("recompute_granularity") == "full" and kwargs.get("recompute_method") == "uniform"
    if cfg.trainer.gradient_checkpointing and (uniform or kwargs.get("recompute_granularity") == AUTO):
        return
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    settings: dict[str, Any] = {f"{_M}transformer_config_kwargs.recompute_{name}": v for name, v in full.items()}
    yield Adjustment({"trainer.gradient_checkpointing": True} | settings, 2)


def _tokens(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    """Fewer tokens in a micro-batch; logits a chunk at a time."""
    trainer, longest = cfg.trainer, longest_sequence(cfg)
    head = {} if trainer.fused_lm_head_logprob else {"trainer.fused_lm_head_logprob": True}
    if head:
        yield Adjustment(head, 1)
    most = trainer.max_tokens_per_microbatch
    if most < 0 and trainer.micro_train_batch_size_per_gpu > 1:
        least = {"trainer.micro_train_batch_size_per_gpu": 1, "trainer.micro_forward_batch_size_per_gpu": 1}
        yield Adjustment(least, 2)
        yield Adjustment(least | head, 3)
    while most >= 2 * longest:
        most //= 2
        yield Adjustment({"trainer.max_tokens_per_microbatch": most}, 2)
        yield Adjustment({"trainer.max_tokens_per_microbatch": most} | head, 3)


def _engine_share(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    now = cfg.generator.inference_engine.gpu_memory_utilization
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        if abs(share - now) > 0.01:
            yield Adjustment({f"{_E}gpu_memory_utilization": share}, 1 + round(abs(share - now) * 10))


def _engine_width(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    """Fewer engines with more GPUs each; the number of GPUs is unchanged."""
    engine = cfg.generator.inference_engine
    tp, count, cost = engine.tensor_parallel_size, engine.num_engines, 2
    while engine.run_engines_locally and count % 2 == 0 and tp < 16:
        tp, count, cost = tp * 2, count // 2, cost + 1
        settings: dict[str, Any] = {f"{_E}tensor_parallel_size": tp, f"{_E}num_engines": count}
        if engine.expert_parallel_size > 1:
            settings[f"{_E}expert_parallel_size"] = tp * engine.data_parallel_size
        yield Adjustment(settings, cost)


def _degree(cfg: SkyRLTrainConfig, name: str, most: int, cost: int) -> Iterator[Adjustment]:
    degree = getattr(cfg.trainer.policy.megatron_config, name) * 2
    while degree <= most:
        yield Adjustment({f"{_M}{name}": degree}, cost)
        degree, cost = degree * 2, cost + 1


def _optimizer(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Adjustment]:
    """Adam on the host, or with a smaller optimizer state."""
    kwargs = cfg.trainer.policy.megatron_config.optimizer_config_kwargs
    key = f"{_M}optimizer_config_kwargs."
    now = float(kwargs.get("optimizer_offload_fraction") or 0) if kwargs.get("optimizer_cpu_offload") else 0.0
    if not cfg.trainer.bf16:
        return
    has_te = hardware.elsewhere or importlib.util.find_spec("transformer_engine") is not None
    narrower = has_te and not kwargs.get("use_precision_aware_optimizer")
    if narrower and not now:
        yield Adjustment({f"{key}use_precision_aware_optimizer": True}, 1)
    if now:
        yield Adjustment({f"{key}optimizer_cpu_offload": False}, 3)
    for share in (0.5, 1.0):
        if share != now:
            host = {f"{key}optimizer_cpu_offload": True, f"{key}optimizer_offload_fraction": share}
            yield Adjustment(host, 4 if share == 0.5 else 5)
            if narrower:
                yield Adjustment({f"{key}use_precision_aware_optimizer": True} | host, 5 if share == 0.5 else 6)


def _offload(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    key = "trainer.policy.optimizer_config.offload_after_step"
    if cfg.trainer.placement.colocate_all:
        yield Adjustment({key: not get_path(cfg, key)}, 1)


def _checkpoints(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    """Write checkpoints from GPU memory instead of from a copy in host memory."""
    key = f"{_M}async_dist_ckpt_save"
    if get_path(cfg, key):
        yield Adjustment({key: False}, 1)


def _graphs(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    """No CUDA graphs in the engines."""
    key = f"{_E}enforce_eager"
    if not get_path(cfg, key):
        yield Adjustment({key: True}, 3)


NAMED_IN_MESSAGES = 4
MIN_HEADROOM = 4 * 10**9
"""Minimum free bytes in a training phase. With less, fragmentation of the caching allocator or an expert imbalance
above the estimate can exhaust memory."""


def gigabytes(count: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def report_lines(budget: Budget) -> Iterator[str]:
    """Yield the memory of the tightest phase item by item, and the free memory of the fullest training phase."""
    yield from _phase_lines(budget, budget.tightest())
    yield from _headroom(budget)


def other_lines(budget: Budget) -> Iterator[str]:
    """Yield the memory of the other phases: of the fullest GPU of each, and of the fullest node."""
    for phase in budget.fullest():
        if phase is not budget.tightest():
            yield from _phase_lines(budget, phase)


def _phase_lines(budget: Budget, phase: PhaseMemory) -> Iterator[str]:
    limit = budget.limit(phase)
    left = 0 if limit is None else limit - phase.total
    balance = f"{gigabytes(left)} free" if left >= 0 else f"{gigabytes(-left)} too much"
    of = "" if limit is None else f" of {gigabytes(limit)}, {balance}"
    yield f"{phase.name}, {phase.where}: {gigabytes(phase.total)}{of}"
    for part in sorted(phase.parts, key=lambda part: -part.nbytes):
        yield f"  {gigabytes(part.nbytes):>11}  {part.what}"


def _headroom(budget: Budget) -> Iterator[str]:
    """Yield the free memory of the fullest training phase, and a warning with a fix if it is small."""
    training = [phase for phase in budget.fullest() if phase.name.endswith(TRAINING)]
    fullest = max(training, key=budget.excess, default=None)
    if fullest is None or (limit := budget.limit(fullest)) is None:
        return
    headroom, trainer = limit - fullest.total, next(iter(budget.models.values())).cfg.trainer
    if headroom < 0:  # reported as a problem
        return
    included = f"{FRAGMENTATION:.0%} of activations for fragmentation"
    if any(model.parallel.ep > 1 for model in budget.models.values()):
        included += f", {IMBALANCE:g} times the average tokens per expert rank"
    yield (
        f"headroom beyond the estimate (which includes {included}): {gigabytes(headroom)}, in "
        f"{fullest.name}, {fullest.where}"
    )
    if headroom < MIN_HEADROOM:
        key = (
            "max_tokens_per_microbatch" if trainer.max_tokens_per_microbatch > 0 else "micro_train_batch_size_per_gpu"
        )
        yield (
            f"warning: the headroom is below {gigabytes(MIN_HEADROOM)}, so a step with imbalanced experts may run out "
            f"of memory: lower trainer.{key} ({getattr(trainer, key)})"
        )


def memory_problems(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], budget: Budget) -> Iterator[Problem]:
    """Yield a problem for each phase that does not fit. The worst one names the nearest setting that fits."""
    phases = budget.too_large()
    if not phases:
        return
    changes = nearest(cfg, tables, budget.hardware)
    if changes is None:
        larger = (
            f"nodes with {gigabytes(budget.node.total)}" if phases == [budget.node] else "more GPUs, or larger ones"
        )
        fix = f"no other setting was found that fits: use {larger}"
    else:
        fix = "the nearest setting that fits: " + " ".join(str(change) for change in changes)
    for number, phase in enumerate(phases):
        limit = budget.limit(phase)
        assert limit is not None
        key = HOST_MEMORY if phase is budget.node else GPU_MEMORY
        yield Problem(key, gigabytes(limit), _needs(phase, limit) + (f"; {fix}" if number == 0 else ""))


def _needs(phase: PhaseMemory, limit: int) -> str:
    largest = sorted(phase.parts, key=lambda part: -part.nbytes)[:NAMED_IN_MESSAGES]
    named = ", ".join(f"{part.what} {gigabytes(part.nbytes)}" for part in largest)
    more = " …" if len(phase.parts) > len(largest) else ""
    return (
        f"{phase.where} needs {gigabytes(phase.total)} in {phase.name}, {gigabytes(phase.total - limit)} too much "
        f"({named}{more})"
    )
