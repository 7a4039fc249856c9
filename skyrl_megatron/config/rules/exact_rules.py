"""What ``trainer.exact_rollouts`` needs, so that engine and trainer compute a token's log-prob with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import EXPERT_COUNTS, rope_parameters
from skyrl_megatron.errors import Problem, set_up

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.models import MegatronConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

KEY = "trainer.exact_rollouts"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "hy_v3")
"""Families whose layers all have exact operations on both sides (``tests/inference/test_exact_rollouts.py``)."""
_M = "trainer.policy.megatron_config."
_E = "generator.inference_engine."
_SUM = "sums over so many ranks have another order than the other side's"
_MODEL = {
    "sliding_window": "attention in a window has no exact operation",
    "rope_scaling": "scaled rotary angles are computed in two ways",
    "quantization_config": "quantised weights are multiplied by other kernels",
    "n_group": "experts chosen in groups have no exact operation",
}
_ENGINE_KWARGS = {
    "speculative_config": "drafted tokens are scored in another way",
    "quantization": "quantised weights are multiplied by other kernels",
    "kv_cache_dtype": "the trainer does not round keys and values",
}
_TRAINER_KWARGS = ("moe_expert_capacity_factor", "moe_router_fusion", "fp8")


def rollout_gap_limit(cfg: SkyRLTrainConfig) -> float | None:
    """Return the largest allowed mismatch of a token's log-prob, nats; None: any."""
    limit = cfg.trainer.max_rollout_gap
    return 0.0 if limit is None and cfg.trainer.exact_rollouts else limit


def requires_equal_bits(cfg: SkyRLTrainConfig) -> bool:
    """Return whether a run ends when a log-prob of engine and trainer differs in a bit."""
    return rollout_gap_limit(cfg) == 0 and cfg.trainer.rollout_gap_exceeded == "error"


def exact_problems(cfg: SkyRLTrainConfig, hardware: Hardware, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield each setting that breaks ``trainer.exact_rollouts``. ``hf``: the policy's ``config.json``, or empty."""
    if not cfg.trainer.exact_rollouts:
        return
    family = hf.get("model_type")
    if hf and family not in FAMILIES:
        yield Problem(
            KEY, True, f"{family} has no exact operations (they exist for {', '.join(FAMILIES)}): set it to false"
        )
    else:
        yield from _model_problems(cfg, hf)
    experts, on_cpu = any((hf.get(name) or 0) > 1 for name in EXPERT_COUNTS), hardware.is_cpu
    yield from _layout_problems(cfg, most=2 if on_cpu else 1, experts=experts)  # a sum of two numbers has no order
    yield from _engine_problems(cfg, "float32" if on_cpu or not cfg.trainer.bf16 else "bfloat16")
    if not on_cpu:
        yield from _gpu_problems(cfg, hardware, experts=experts)


def uses_local_layers(megatron: MegatronConfig) -> bool:
    """Return whether a role asks for this package's layers instead of Transformer Engine's."""
    return megatron.transformer_config_kwargs.get("transformer_impl") == "local"


def _gpu_problems(cfg: SkyRLTrainConfig, hardware: Hardware, *, experts: bool) -> Iterator[Problem]:
    """Yield what batch-invariant kernels on GPUs need. Those of engine and trainer differ, so a gap is left."""
    if requires_equal_bits(cfg):
        fix = "kernels of engine and trainer differ on GPUs, by an amount that is not measured yet: set it, or "
        yield Problem("trainer.max_rollout_gap", cfg.trainer.max_rollout_gap, fix + "rollout_gap_exceeded=warn")
    key = f"{_M}transformer_config_kwargs.transformer_impl"
    local = uses_local_layers(cfg.trainer.policy.megatron_config)
    if experts and not local:
        fix = f"Transformer Engine's products of experts depend on the batch: set it to local, or {KEY} to false"
        yield Problem(key, None, fix)
    elif not local and not hardware.elsewhere and find_spec("flash_attn_3") is None:
        fix = "Transformer Engine's attention needs the package flash_attn_3, which is not installed: install it, set "
        yield Problem(key, None, f"{fix}this to local, or {KEY} to false")
    if not hardware.elsewhere and find_spec("transformer_engine") is None:
        fix = f"Megatron-Core's batch-invariant kernels need Transformer Engine: run {set_up('gpu')}, or set it to "
        yield Problem(KEY, True, f"{fix}false")


def _model_problems(cfg: SkyRLTrainConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    scaled = cfg.trainer.rope_scaling or cfg.generator.rope_scaling
    features = {
        "sliding_window": hf.get("sliding_window") if hf.get("use_sliding_window", True) else None,
        "rope_scaling": scaled or rope_parameters(dict(hf)).get("rope_type", "default") != "default",
        "quantization_config": hf.get("quantization_config"),
        "n_group": (hf.get("n_group") or 1) > 1,
    }
    for name, why in _MODEL.items():
        if features[name]:
            yield Problem(KEY, True, f"the model has {name}, and {why}: set it to false")
    if cfg.trainer.policy.model.lora.rank:
        fix = f"adapters are added in another order than in the engine: set it to 0, or {KEY} to false"
        yield Problem("trainer.policy.model.lora.rank", cfg.trainer.policy.model.lora.rank, fix)
    for name in _TRAINER_KWARGS:
        if value := cfg.trainer.policy.megatron_config.transformer_config_kwargs.get(name):
            fix = f"the engine has no such option: remove it, or set {KEY} to false"
            yield Problem(f"{_M}transformer_config_kwargs.{name}", value, fix)
    if not cfg.trainer.use_sample_packing:
        fix = f"padded sequences have no exact operations: set it to true, or {KEY} to false"
        yield Problem("trainer.use_sample_packing", False, fix)
    if cfg.trainer.policy.megatron_config.moe_router_dtype == "fp64":
        fix = f"the engine's routers compute in float32: set it to fp32, or {KEY} to false"
        yield Problem(f"{_M}moe_router_dtype", "fp64", fix)


def _layout_problems(cfg: SkyRLTrainConfig, *, most: int, experts: bool) -> Iterator[Problem]:
    """``most``: ranks that may share a tensor."""
    trainer, engine = cfg.trainer.policy.megatron_config, cfg.generator.inference_engine
    engines = 1 if experts else min(most, trainer.tensor_model_parallel_size)  # an engine splits experts, too
    degrees = {
        f"{_M}tensor_model_parallel_size": (trainer.tensor_model_parallel_size, most, _SUM),
        f"{_M}context_parallel_size": (trainer.context_parallel_size, 1, "attention over ranks is not exact"),
        f"{_M}expert_tensor_parallel_size": (trainer.expert_tensor_parallel_size or 1, 1, _SUM),
        f"{_E}tensor_parallel_size": (engine.tensor_parallel_size, engines, _SUM),
        f"{_E}expert_parallel_size": (engine.expert_parallel_size, 1, _SUM),
    }
    for key, (value, limit, why) in degrees.items():
        if value > limit:
            yield Problem(key, value, f"{why}: set it to {limit}, or {KEY} to false")


def _engine_problems(cfg: SkyRLTrainConfig, dtype: str) -> Iterator[Problem]:
    """``dtype``: the trainer's."""
    engine = cfg.generator.inference_engine
    ours = engine.run_engines_locally and engine.backend == "vllm" and not engine.enable_registry
    if not ours:
        fix = f"engines that this run does not start compute in their own way: set {_E}run_engines_locally=true, "
        yield Problem(KEY, True, fix + "backend=vllm and enable_registry=false, or this to false")
    for name, why in _ENGINE_KWARGS.items():
        if (value := engine.engine_init_kwargs.get(name)) not in (None, "auto"):
            yield Problem(f"{_E}engine_init_kwargs.{name}", value, f"{why}: remove it, or set {KEY} to false")
    if engine.model_dtype not in ("auto", dtype):
        fix = f"the trainer computes in {dtype}: set it to that, or {KEY} to false"
        yield Problem(f"{_E}model_dtype", engine.model_dtype, fix)
    if cfg.generator.sampling_params.logprobs is None:
        fix = f"engines must return log-probs: set it to 0, or {KEY} to false"
        yield Problem("generator.sampling_params.logprobs", None, fix)
    stale = cfg.trainer.fully_async
    if stale.enabled and stale.max_staleness_steps:
        fix = f"tokens of older weights have other log-probs: set it to 0, or {KEY} to false"
        yield Problem("trainer.fully_async.max_staleness_steps", stale.max_staleness_steps, fix)
    if cfg.trainer.oversampling.ratio and cfg.trainer.oversampling.unfinished == "keep":
        fix = f"kept prompts have tokens of older weights: set it to drop, or {KEY} to false"
        yield Problem("trainer.oversampling.unfinished", "keep", fix)
