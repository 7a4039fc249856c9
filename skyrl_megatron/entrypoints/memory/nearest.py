"""The nearest setting that fits, found by trying: the cheapest change, or pair or triple of changes, that is valid."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import get_path, owner_of
from skyrl_megatron.config.rules.placement import placement_problems
from skyrl_megatron.config.rules.training import longest_sequence, training_problems
from skyrl_megatron.entrypoints.memory.budget import Budget
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware

TRIES = 3000
"""Settings that it tries, the cheapest first."""
CHANGES = 4
"""Settings that it changes at most."""

_M = "trainer.policy.megatron_config."
_E = "generator.inference_engine."


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One thing that may be set otherwise, with what it costs: speed, then exactness."""

    settings: Mapping[str, Any]
    cost: int

    def __str__(self) -> str:
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.settings.items()
        )


def nearest(
    cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware
) -> tuple[Adjustment, ...] | None:
    """Return the cheapest changes under which the run fits; None where none of those tried does."""
    knobs = [list(knob) for knob in _knobs(cfg, tables, hardware)]
    knobs = [knob for knob in knobs if knob]
    tries = sorted(_combinations(knobs), key=lambda changes: sum(change.cost for change in changes))
    original = pickle.dumps(cfg)  # read back ten times as fast as copied
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
    """Yield for each thing that can be changed its other values."""
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


def _recomputation(cfg: SkyRLTrainConfig) -> Iterator[Adjustment]:
    kwargs = cfg.trainer.policy.megatron_config.transformer_config_kwargs
    if cfg.trainer.gradient_checkpointing and kwargs.get("recompute_granularity") == "full":
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
    """Engines of more GPUs, as many GPUs in all."""
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
    """Adam on the host, or with a smaller state."""
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
    """Write checkpoints from the GPUs instead of from a copy on the host."""
    key = f"{_M}async_dist_ckpt_save"
    if get_path(cfg, key):
        yield Adjustment({key: False}, 1)
