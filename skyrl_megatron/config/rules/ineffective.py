"""Settings that have no effect in a run. A user who sets one gets a warning with the reason.

:data:`INEFFECTIVE` lists them. A setting is *explicit* if its value is neither its default nor derived from other
settings. One warning reports all explicit settings that have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.config.derive import derive, supervised
from skyrl_megatron.config.fields import Section, default_of, get_path, leaves, owner_of
from skyrl_megatron.config.resolve import generates_ahead
from skyrl_megatron.config.roles import active_roles, balances_experts, has_teacher, needs_reference
from skyrl_megatron.config.rules.passthrough import masks
from skyrl_megatron.config.table import (
    ESTIMATORS,
    LOSSES,
    OPTIMIZERS,
    OTHER_ROLES,
    ROLES,
    ObjectiveRow,
    ObjectiveTable,
    one_of,
)
from skyrl_megatron.hub.repo_names import is_hub_name
from skyrl_megatron.plugins import TRANSPORTS

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


type Condition = Callable[[SkyRLTrainConfig, Hardware], bool]


def _always(cfg: SkyRLTrainConfig, hardware: Hardware) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class IneffectiveSetting:
    """Settings that no code reads, always or while ``when`` is true."""

    why: str
    keys: str
    """Keys separated by spaces. A key that ends with a dot is a whole section."""
    when: Condition = _always


def _algorithm(condition: Callable[[AlgorithmConfig], bool]) -> Condition:
    return lambda cfg, hardware: condition(cfg.trainer.algorithm)


def _objective_rules[R: ObjectiveRow](
    table: ObjectiveTable[R], chosen: Callable[[AlgorithmConfig], str]
) -> Iterator[IneffectiveSetting]:
    """Yield a rule for each setting that only some losses, or some estimators, read, and for the section of each."""

    def is_none_of(*names: str) -> Condition:
        return _algorithm(lambda a: table.get(chosen(a)) is not None and chosen(a) not in names)

    def does_not_read(setting: str) -> Condition:
        return _algorithm(
            lambda a: (row := table.get(chosen(a))) is not None and row.reads is not None and setting not in row.reads
        )

    kind = table.key.rpartition(".")[2]
    for setting in table.shared():
        why = f"{kind} is not {one_of(table.readers(setting))}"
        yield IneffectiveSetting(why, f"{_A}{setting}", does_not_read(setting))
    for name, _ in table.sections():
        yield IneffectiveSetting(f"{kind} is not {name}", f"{_A}{name}.", is_none_of(name))


def _optimizer_rules() -> Iterator[IneffectiveSetting]:
    """Yield a rule for each setting of the policy's optimizer that not every optimizer reads."""

    def is_none_of(names: list[str]) -> Condition:
        return lambda cfg, hardware: cfg.trainer.policy.optimizer_config.optimizer not in names

    for setting in sorted(frozenset[str]().union(*(row.reads for row in OPTIMIZERS.values()))):
        readers = [name for name, row in OPTIMIZERS.items() if setting in row.reads]
        why = f"optimizer_config.optimizer is not {one_of(readers)}"
        yield IneffectiveSetting(why, f"{_P}optimizer_config.{setting}", is_none_of(readers))


def _no_role(role: str) -> Condition:
    return lambda cfg, hardware: role not in active_roles(cfg)


def _balances_no_experts(role: str) -> Condition:
    return lambda cfg, hardware: not balances_experts(cfg, role)


def _model_is_a_folder(role: str) -> Condition:
    return lambda cfg, hardware: not is_hub_name(getattr(cfg.trainer, role).model.path or "")


def _on_cpu(cfg: SkyRLTrainConfig, hardware: Hardware) -> bool:
    return hardware.is_cpu


def _is_masked_by(metric: str) -> Condition:
    return _algorithm(lambda a: a.off_policy_correction.sequence_mask_metric != metric)


def _stops(sampling: SamplingParams | None) -> bool:
    return sampling is not None and bool(sampling.stop)


def _in_all(prefix: str, names: str) -> str:
    return " ".join(prefix + name for name in names.split())


_T, _P, _A = "trainer.", "trainer.policy.", "trainer.algorithm."
_M, _C = f"{_P}megatron_config.", f"{_A}off_policy_correction."
_G, _E = "generator.", "generator.inference_engine."
_OF_LOCAL_ENGINES = """
    model_dtype num_engines backend tensor_parallel_size pipeline_parallel_size expert_parallel_size
    data_parallel_size enable_prefix_caching enable_chunked_prefill max_num_batched_tokens enforce_eager
    enable_ray_prometheus_stats gpu_memory_utilization max_num_seqs distributed_executor_backend engine_init_kwargs
"""

INEFFECTIVE: tuple[IneffectiveSetting, ...] = (
    # ------------------------------------------------------------ supervised training
    IneffectiveSetting(
        "supervised training samples nothing",
        f"{_T}max_prompt_length {_T}fully_async. {_A}dynamic_sampling. {_A}advantage_estimator "
        f"{_G}sampling_params. {_G}eval_sampling_params. environment. "
        + _in_all(_G, "max_turns max_input_length batched eval_n_samples_per_prompt step_wise_trajectories"),
        lambda cfg, hardware: supervised(cfg) is not None,
    ),
    # ------------------------------------------------------------ keys of SkyRL that have no use here
    IneffectiveSetting("megatron_config.context_parallel_size splits sequences", f"{_T}sequence_parallel_backend"),
    *(
        IneffectiveSetting(
            f"{role}.megatron_config.context_parallel_size splits sequences", f"{_T}{role}.sequence_parallel_size"
        )
        for role in ROLES
    ),
    IneffectiveSetting("gradients are summed, and the loss divides them", f"{_M}ddp_config.average_in_collective"),
    IneffectiveSetting("Megatron has its own recomputation", f"{_T}gradient_checkpointing_use_reentrant"),
    IneffectiveSetting("optimizer state can always be loaded in any layout", f"{_M}dist_ckpt_optim_fully_reshardable"),
    IneffectiveSetting("trainer.deterministic makes sampling reproducible", f"{_E}vllm_v1_disable_multiproc"),
    IneffectiveSetting("the trainer chooses the size of weight buckets", f"{_E}weight_transfer_threshold_cuda_ipc_GB"),
    IneffectiveSetting("engines are always asynchronous", f"{_E}async_engine"),
    IneffectiveSetting("an existing update group is always replaced", f"{_E}override_existing_update_group"),
    IneffectiveSetting("transformers has only fast tokenizers", f"{_T}disable_fast_tokenizer"),
    IneffectiveSetting("log-probs come from a fused kernel", f"{_P}use_torch_compile"),
    # ------------------------------------------------------------ rollouts
    *(
        IneffectiveSetting(
            "generator.name is not agent", f"{_G}agent.{name}", lambda cfg, hardware: cfg.generator.name != "agent"
        )
        for name in ("command", "sandbox", "mounts", "at_once", "stdin", "timed_out_reward", "context_full_reward")
    ),
    *(
        IneffectiveSetting(
            "generator.name=skyrl_gym runs no agents",
            f"{_G}{name}",
            lambda cfg, hardware: cfg.generator.name == "skyrl_gym",
        )
        for name in (
            *("min_token_in_rate", "max_infrastructure_share", "agent.reasoning_parser"),
            *("agent.max_calls", "agent.max_samples", "agent.max_tokens", "agent.max_connections"),
        )
    ),
    # ------------------------------------------------------------ fully asynchronous rollouts
    IneffectiveSetting(
        "trainer.fully_async.enabled is false",
        f"{_T}fully_async.max_staleness_steps",
        lambda cfg, hardware: not cfg.trainer.fully_async.enabled,
    ),
    IneffectiveSetting(
        "rollouts are synchronous: set trainer.fully_async.enabled=true and max_staleness_steps above 0",
        _in_all(
            f"{_T}fully_async.",
            "num_parallel_generation_workers stale_policy clear_kv_cache_on_weight_sync rollouts_path keep_rollouts"
            " replay_from adaptive_concurrency batches_ahead",
        ),
        lambda cfg, hardware: not generates_ahead(cfg),
    ),
    IneffectiveSetting(
        "any log-prob mismatch is allowed: set trainer.max_rollout_gap",
        f"{_T}rollout_gap_exceeded",
        lambda cfg, hardware: cfg.trainer.max_rollout_gap is None and not cfg.trainer.exact_rollouts,
    ),
    IneffectiveSetting(
        "trainer.oversampling.ratio is 0",
        _in_all(f"{_T}oversampling.", "unfinished max_staleness_steps"),
        lambda cfg, hardware: not cfg.trainer.oversampling.ratio,
    ),
    IneffectiveSetting(
        "trainer.oversampling.unfinished=drop trains on new responses only",
        f"{_T}oversampling.max_staleness_steps",
        lambda cfg, hardware: cfg.trainer.oversampling.unfinished == "drop",
    ),
    IneffectiveSetting(
        "asynchronous rollouts start more prompts anyway",
        f"{_T}oversampling.ratio",
        lambda cfg, hardware: generates_ahead(cfg),
    ),
    IneffectiveSetting(
        "trainer.healing.enabled is false",
        _in_all(f"{_T}healing.", "copies max_times within_steps"),
        lambda cfg, hardware: not cfg.trainer.healing.enabled,
    ),
    # ------------------------------------------------------------ roles
    *(
        IneffectiveSetting(role.absent, " ".join(role.keys), _no_role(name))
        for name, role in ROLES.items()
        if role.absent
    ),
    *(
        IneffectiveSetting("the model is a local folder", f"{_T}{role}.model.revision", _model_is_a_folder(role))
        for role in ROLES
    ),
    IneffectiveSetting(
        "the run has no teacher: set trainer.teacher.model.path or trainer.teacher.models",
        _in_all(f"{_A}distillation.", "reward_coef loss_coef top_k beta renormalize divergence_alone"),
        lambda cfg, hardware: not has_teacher(cfg) and cfg.trainer.algorithm.distillation.demonstration is None,
    ),
    IneffectiveSetting(
        "distillation.loss_coef is 0",
        _in_all(f"{_A}distillation.", "top_k beta renormalize"),
        _algorithm(lambda a: not a.distillation.loss_coef),
    ),
    IneffectiveSetting(
        "the reference is not trained",
        _in_all(
            f"{_T}ref.megatron_config.",
            "ddp_config. torch_profiler_config. lora_config. optimizer_config_kwargs empty_cuda_cache "
            "moe_aux_loss_coeff moe_z_loss_coeff dist_ckpt_optim_fully_reshardable freeze_moe_router "
            "moe_per_layer_logging moe_routing_replay_missing async_dist_ckpt_save moe_expert_moves",
        )
        + f" {_T}ref.model.lora.",
    ),
    IneffectiveSetting(
        "only the policy's multi-token-prediction layer is trained",
        " ".join(f"{_T}{role}.megatron_config.mtp." for role in OTHER_ROLES),
    ),
    IneffectiveSetting(
        "mtp.train is false",
        f"{_M}mtp.loss_scale",
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.mtp.train,
    ),
    IneffectiveSetting(
        "moe_enable_routing_replay=false",
        f"{_M}moe_routing_replay_missing {_M}moe_routing_replay_source",
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.moe_enable_routing_replay,
    ),
    *(
        IneffectiveSetting(
            f"only passes with replayed experts on several EP ranks, in packed micro-batches, are balanced: set "
            f"{role}.megatron_config.moe_enable_routing_replay=true and {role}.megatron_config."
            "expert_model_parallel_size, and keep use_sample_packing",
            f"{_T}{role}.megatron_config.moe_balance_experts",
            _balances_no_experts(role),
        )
        for role in ROLES
    ),
    IneffectiveSetting(
        "moe_routing_replay_source=trainer: every token has recorded experts",
        f"{_M}moe_routing_replay_missing",
        lambda cfg, hardware: cfg.trainer.policy.megatron_config.moe_routing_replay_source == "trainer",
    ),
    IneffectiveSetting(
        "adapters are off: policy.model.lora.rank=0",
        f"{_E}fully_sharded_loras",
        lambda cfg, hardware: cfg.trainer.policy.model.lora.rank == 0,
    ),
    IneffectiveSetting("adapters are sent to engines through memory", f"{_P}model.lora.lora_sync_path"),
    IneffectiveSetting(
        "engines get merged weights: lora.sync_mode=merged",
        f"{_E}fully_sharded_loras",
        lambda cfg, hardware: cfg.trainer.policy.model.lora.sync_mode == "merged",
    ),
    IneffectiveSetting(
        "colocate_all=true: all roles share the same GPUs",
        f"{_T}placement.colocate_policy_ref",
        lambda cfg, hardware: cfg.trainer.placement.colocate_all,
    ),
    # ------------------------------------------------------------ objective
    *_objective_rules(LOSSES, lambda algorithm: algorithm.policy_loss_type),
    *_objective_rules(ESTIMATORS, lambda algorithm: algorithm.advantage_estimator),
    IneffectiveSetting(
        "this policy loss has no off-policy correction",
        _C,
        _algorithm(lambda a: (row := LOSSES.get(a.policy_loss_type)) is not None and row.corrected is False),
    ),
    IneffectiveSetting(
        "tis_ratio_type is not token",
        f"{_C}token_tis_ratio_clip_high",
        _algorithm(lambda a: a.off_policy_correction.tis_ratio_type != "token"),
    ),
    IneffectiveSetting(
        "tis_ratio_type is not sequence",
        f"{_C}sequence_tis_ratio_clip_high",
        _algorithm(lambda a: a.off_policy_correction.tis_ratio_type != "sequence"),
    ),
    IneffectiveSetting(
        "sequence_mask_metric is not geometric", _in_all(_C, "geo_mask_low geo_mask_high"), _is_masked_by("geometric")
    ),
    IneffectiveSetting(
        "sequence_mask_metric is not product",
        _in_all(_C, "product_mask_low product_mask_high"),
        _is_masked_by("product"),
    ),
    IneffectiveSetting("use_tis=false", f"{_A}tis_imp_ratio_cap", _algorithm(lambda a: not a.use_tis)),
    IneffectiveSetting(
        "there is no KL term: use_kl_loss and use_kl_in_reward are false",
        _in_all(_A, "kl_loss_coef kl_estimator_type"),
        lambda cfg, hardware: not needs_reference(cfg),
    ),
    IneffectiveSetting("use_kl_in_reward=false", f"{_A}kl_ctrl.", _algorithm(lambda a: not a.use_kl_in_reward)),
    IneffectiveSetting(
        "kl_ctrl.type is not adaptive",
        _in_all(f"{_A}kl_ctrl.", "kl_target horizon"),
        _algorithm(lambda a: a.kl_ctrl.type != "adaptive"),
    ),
    IneffectiveSetting(
        "use_entropy_loss=false", f"{_A}entropy_loss_coef", _algorithm(lambda a: not a.use_entropy_loss)
    ),
    IneffectiveSetting(
        "loss_reduction is not seq_mean_token_sum_norm",
        f"{_A}max_seq_len",
        _algorithm(lambda a: a.loss_reduction != "seq_mean_token_sum_norm"),
    ),
    IneffectiveSetting(
        "gae.length_adaptive_alpha and gae.critic_lambd are set",
        f"{_A}lambd",
        _algorithm(lambda a: None not in (a.gae.length_adaptive_alpha, a.gae.critic_lambd)),
    ),
    IneffectiveSetting(
        "dynamic_sampling.type is null",
        f"{_A}dynamic_sampling.max_sample_batches",
        _algorithm(lambda a: a.dynamic_sampling.type is None),
    ),
    IneffectiveSetting(
        "dynamic_sampling.type is not replace",
        f"{_A}dynamic_sampling.min_replace_ratio",
        _algorithm(lambda a: a.dynamic_sampling.type != "replace"),
    ),
    # ------------------------------------------------------------ the step
    *_optimizer_rules(),
    IneffectiveSetting(
        "the learning-rate schedule does not decay",
        _in_all(f"{_P}optimizer_config.", "min_lr num_decay_steps"),
        lambda cfg, hardware: cfg.trainer.policy.optimizer_config.scheduler.startswith("constant"),
    ),
    IneffectiveSetting(
        "training and engines do not share GPUs: placement.colocate_all=false",
        f"{_P}optimizer_config.offload_after_step",
        lambda cfg, hardware: not cfg.trainer.placement.colocate_all,
    ),
    IneffectiveSetting(
        "max_tokens_per_microbatch sets the size of micro-batches",
        _in_all(_T, "micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu"),
        lambda cfg, hardware: cfg.trainer.max_tokens_per_microbatch > 0,
    ),
    IneffectiveSetting(
        "torch_profiler_config.enable=false",
        _in_all(f"{_M}torch_profiler_config.", "ranks save_path"),
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.torch_profiler_config.enable,
    ),
    # ------------------------------------------------------------ rollouts
    IneffectiveSetting(
        "sampling_params.stop is empty, so no generation ends at a stop string",
        f"{_G}append_eos_token_after_stop_str_in_multi_turn",
        lambda cfg, hardware: (
            not any(map(_stops, (cfg.generator.sampling_params, cfg.generator.eval_sampling_params)))
        ),
    ),
    # ------------------------------------------------------------ engines
    IneffectiveSetting(
        "tokens are sampled from the whole vocabulary: sampling_params excludes none (top_p, top_k, min_p)",
        f"{_E}return_sampling_support",
        lambda cfg, hardware: not masks(cfg.generator.sampling_params),
    ),
    IneffectiveSetting(
        "enable_http_endpoint=false",
        _in_all(_E, "http_endpoint_host http_endpoint_port http_token_path served_model_name"),
        lambda cfg, hardware: not cfg.generator.inference_engine.enable_http_endpoint,
    ),
    IneffectiveSetting(
        "enable_registry=false",
        _in_all(
            _E,
            "registry_host registry_port registry_token_path registry_min_engines registry_silence_s registry_drain_s",
        ),
        lambda cfg, hardware: not cfg.generator.inference_engine.enable_registry,
    ),
    IneffectiveSetting(
        "this run starts its own engines: run_engines_locally=true",
        _in_all(_E, "remote_urls external_server_urls external_proxy_url"),
        lambda cfg, hardware: cfg.generator.inference_engine.run_engines_locally,
    ),
    IneffectiveSetting(
        "external_server_urls names the engines",
        f"{_E}remote_urls",
        lambda cfg, hardware: bool(cfg.generator.inference_engine.external_server_urls),
    ),
    IneffectiveSetting(
        "this run does not start engines: run_engines_locally=false",
        _in_all(_E, _OF_LOCAL_ENGINES),
        lambda cfg, hardware: not cfg.generator.inference_engine.run_engines_locally,
    ),
    IneffectiveSetting(
        "engines share the trainer's GPUs and receive weights by CUDA IPC: placement.colocate_all=true",
        _in_all(_E, "weight_sync_backend"),
        lambda cfg, hardware: (
            cfg.trainer.placement.colocate_all
            and cfg.generator.inference_engine.weight_sync_backend in TRANSPORTS.built_in
            and not (hardware.is_cpu and cfg.generator.inference_engine.weight_sync_backend == device.GLOO)
        ),
    ),
    # ------------------------------------------------------------ machines without GPUs
    IneffectiveSetting(
        "there is no GPU",
        f"{_P}record_memory {_M}empty_cuda_cache "
        + _in_all(_E, "gpu_memory_utilization distributed_executor_backend"),
        _on_cpu,
    ),
)


def ineffective_settings(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, reason) of each explicit setting without effect. ``cfg``: resolved."""
    every = [key for key, _, _ in leaves(type(cfg)) if _exists(cfg, key)]
    reasons: dict[str, str] = {}
    for rule in INEFFECTIVE:
        if rule.when(cfg, hardware):
            for named in rule.keys.split():
                matched = [key for key in every if key.startswith(named)] if named.endswith(".") else [named]
                reasons |= {key: rule.why for key in matched if key not in reasons and key not in _SWITCHES}
    for key, value in explicit_settings(cfg, tuple(reasons)):
        if key in reasons:
            yield key, value, reasons[key]


def explicit_settings(cfg: SkyRLTrainConfig, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of the explicit settings whose key starts with one of ``prefixes``. ``cfg``: resolved."""
    fresh = type(cfg)()
    for key, _, _ in leaves(type(cfg)):
        if key.startswith(prefixes) and _exists(cfg, key) and _is_explicit(cfg, key, fresh):
            yield key, get_path(cfg, key)


_SWITCHES = frozenset(
    f"trainer.{key}"
    for key in "critic.model.path teacher.model.path policy.model.lora.rank ref.model.lora.rank".split()
)
"""Settings inside ineffective sections that enable the section, or that a rule rejects."""


def _exists(cfg: Section, key: str) -> bool:
    try:
        get_path(cfg, key)
    except AttributeError:  # below a section that is None
        return False
    return True


def _is_explicit(cfg: SkyRLTrainConfig, key: str, fresh: SkyRLTrainConfig) -> bool:
    """Return whether the value is neither a default nor derived from other settings."""
    value, filled = get_path(cfg, key), cfg.__dict__["_filled"]
    if (_exists(fresh, key) and value == get_path(fresh, key)) or (key in filled and value == filled[key]):
        return False
    _, role, name = (
        key.split(".", 2) if key.startswith(("trainer.ref.", "trainer.critic.", "trainer.teacher.")) else ("", "", key)
    )
    if role and name.startswith("megatron_config."):  # a copy of the policy's
        section, field = owner_of(cfg, key)
        if value in (get_path(cfg, f"trainer.policy.{name}"), default_of(type(section), field)):
            return False
    return bool(value != get_path(_without(cfg, key), key))


def _declared(cfg: SkyRLTrainConfig, key: str, sections: dict[str, Any]) -> Any:
    """Return the default that the class declares, before :func:`derive`. ``sections``: a cache by name."""
    first, _, rest = key.partition(".")
    if first not in sections:
        sections[first] = default_of(type(cfg), first)
    if _exists(sections[first], rest):
        return copy.deepcopy(get_path(sections[first], rest))
    owner, name = owner_of(cfg, key)
    return default_of(type(owner), name)


def _without(cfg: SkyRLTrainConfig, key: str) -> SkyRLTrainConfig:
    """Return what the configuration would be if ``key`` were not set."""
    sections: dict[str, Any] = {}
    unset = copy.deepcopy(cfg)
    section, name = owner_of(unset, key)
    setattr(section, name, _declared(cfg, key, sections))
    for path, value in [*unset.__dict__["_filled"].items()]:  # the value may be derived from the key
        if get_path(unset, path) == value:
            owner, part = owner_of(unset, path)
            setattr(owner, part, _declared(cfg, path, sections))
            del unset.__dict__["_filled"][path]
    parts = key.split(".")
    for path in (".".join(parts[: depth + 1]) for depth in range(len(parts))):
        owner, part = owner_of(unset, path)
        owner.__dict__["_given"] = owner.__dict__.get("_given", frozenset()) - {part}
        unset.__dict__["_filled"].pop(path, None)
    derive(unset)
    return unset
