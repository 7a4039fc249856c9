"""The adapter that a configuration asks for: attached to the policy, new or from its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_megatron.config.hf_model import adapter_folder
from skyrl_megatron.errors import ConfigError
from skyrl_megatron_lora.attach import Adapters, attach
from skyrl_megatron_lora.folder import load_adapter
from skyrl_megatron_lora.layers import AdapterSettings
from skyrl_megatron_lora.targets import configured_selection, expert_rank, rank_problems

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


def configured_adapter(
    cfg: SkyRLTrainConfig, model: ModelChunks, groups: ProcessGroups, base: str | None = None
) -> Adapters:
    """Attach an adapter to the policy as configured by ``policy.model.lora`` and ``lora_config``, and load it from its
    folder, if there is one. ``base``: fingerprint of the base weights.

    Raises ConfigError for a rank that does not fit the model or the layout, else as :func:`load_adapter`.
    """
    lora, how = cfg.trainer.policy.model.lora, cfg.trainer.policy.megatron_config.lora_config
    plan, selection = model.hf.plan, configured_selection(cfg, model.hf.plan)
    of_experts = expert_rank(cfg, model.config.moe_router_topk if model.config.num_moe_experts else None)
    if problems := list(rank_problems(plan, selection, lora.rank, of_experts, groups.parallel)):
        raise ConfigError(problems)
    settings = AdapterSettings(
        lora.rank, lora.alpha, lora.dropout, lora.init_method, rank_stabilised=lora.use_rslora, seed=cfg.trainer.seed
    )
    adapters = attach(
        model,
        groups,
        selection,
        settings,
        separate=how.lora_type == "canonical_lora",
        shared_outer=how.experts_shared_outer_loras,
        expert_rank=of_experts,
    )
    if (folder := adapter_folder(cfg)) is not None:
        load_adapter(adapters, groups, folder, base)
    return adapters
