"""Check that engines can hold the adapters of a run next to the base model."""

from __future__ import annotations

from collections.abc import Iterator

from bridges.plan import Plan
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import Problem
from skyrl_megatron_lora.targets import KEY, Selection, targets
from skyrl_megatron_lora.tensors import RANKS, adapter_pairs, stacked

MERGED = f"{KEY}.sync_mode=merged with trainer.policy.megatron_config.lora_config.merge_lora=true"
_NOT_HELD = {
    "kv_b_proj": "vLLM folds this weight into other products and supports no adapter for it",
    "lm_head": "engines support no adapter for the output layer",
    "embed_tokens": "engines support no adapter for the embedding",
}
"""Projections for which vLLM supports no adapter → reason."""


def engine_adapters(cfg: SkyRLTrainConfig, plan: Plan, selection: Selection, expert_rank: int) -> Iterator[Problem]:
    """Yield every reason why engines cannot hold the adapters of ``lora.sync_mode=memory``."""
    lora, engine = cfg.trainer.policy.model.lora, cfg.generator.inference_engine
    if lora.sync_mode != "memory":
        return
    pairs = adapter_pairs(plan, selection, lora.rank, expert_rank)
    largest = max(pair.rank for pair in pairs.values())
    if largest > RANKS[-1]:
        yield Problem(
            f"{KEY}.rank", lora.rank, f"engines support ranks up to {RANKS[-1]}: use a lower rank, or set {MERGED}"
        )
    for name, why in _NOT_HELD.items():
        if any(module.rpartition(".")[2] == name for module in pairs):
            yield Problem(f"{KEY}.target_modules", lora.target_modules, f"{why}: exclude {name}, or set {MERGED}")
    experts: dict[str, int] = {}
    for target in targets(plan):
        for module in target.hf_modules if target.entry.is_expert else ():
            experts[stacked(module)] = experts.get(stacked(module), 0) + 1
    for module, pair in pairs.items():
        if pair.experts is not None and pair.experts != experts[module]:
            fix = (
                f"{module}: {pair.experts} of {experts[module]} experts have adapters, but engines need all or none: "
                f"name whole layers, or set {MERGED}"
            )
            named = "exclude_modules" if lora.exclude_modules else "target_modules"
            yield Problem(f"{KEY}.{named}", getattr(lora, named), fix)
            break
    ranks = sorted({pair.rank for pair in pairs.values()})
    if engine.fully_sharded_loras and any(rank % engine.tensor_parallel_size for rank in ranks):
        fix = f"tensor_parallel_size={engine.tensor_parallel_size} cannot split ranks {ranks} evenly: set it to false"
        yield Problem("generator.inference_engine.fully_sharded_loras", True, fix)
