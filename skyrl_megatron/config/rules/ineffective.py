"""Settings that have no effect in a run. A user who sets one gets a warning with the reason.

:data:`IDLE` is the list. A setting is *asked for* when its value is neither its default nor what follows from others;
one that is asked for and idle is reported, in one warning for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import Section, default_of, get_path, leaves, owner_of
from skyrl_megatron.config.roles import active_roles, has_teacher, needs_reference
from skyrl_megatron.config.rules.rollout_rules import truncations
from skyrl_megatron.config.rules.training_rules import UNCORRECTED, runs_ahead
from skyrl_megatron.config.schema.algorithm import AdvantageEstimator, PolicyLossType
from skyrl_megatron.hub.names import is_hub_name
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
class Idle:
    """Settings that nothing reads, always or while ``when`` holds."""

    why: str
    keys: str
    """Separated by blanks; one that ends with a dot stands for the whole section."""
    when: Condition = _always


def _algorithm(condition: Callable[[AlgorithmConfig], bool]) -> Condition:
    return lambda cfg, hardware: condition(cfg.trainer.algorithm)


def _loss_is_not(*names: str) -> Condition:
    """Whether the loss is built in and none of these; a loss of a user may read every key."""
    return _algorithm(lambda a: a.policy_loss_type in set(PolicyLossType) - set(names))


def _estimator_is_not(*names: str) -> Condition:
    return _algorithm(lambda a: a.advantage_estimator in set(AdvantageEstimator) - set(names))


def _no_role(role: str) -> Condition:
    return lambda cfg, hardware: role not in active_roles(cfg)


def _model_is_a_folder(role: str) -> Condition:
    return lambda cfg, hardware: not is_hub_name(getattr(cfg.trainer, role).model.path or "")


def _on_cpu(cfg: SkyRLTrainConfig, hardware: Hardware) -> bool:
    return hardware.is_cpu


def _is_masked_by(metric: str) -> Condition:
    return _algorithm(lambda a: a.off_policy_correction.sequence_mask_metric != metric)


def _stops(sampling: SamplingParams | None) -> bool:
    return sampling is not None and bool(sampling.stop or "stop" in (sampling.additional_kwargs or {}))


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

IDLE: tuple[Idle, ...] = (
    # ------------------------------------------------------------ keys of other systems
    Idle("context_parallel_size of megatron_config splits sequences", f"{_T}sequence_parallel_backend"),
    Idle("policy.megatron_config.context_parallel_size splits sequences", f"{_P}sequence_parallel_size"),
    Idle("ref.megatron_config.context_parallel_size splits sequences", f"{_T}ref.sequence_parallel_size"),
    *(
        Idle(f"{role}.megatron_config.context_parallel_size splits sequences", f"{_T}{role}.sequence_parallel_size")
        for role in ("critic", "teacher")
    ),
    Idle("gradients are summed, and divided in the loss", f"{_M}ddp_config.average_in_collective"),
    Idle("Megatron recomputes in its own way", f"{_T}gradient_checkpointing_use_reentrant"),
    Idle("optimizer state always loads at any layout", f"{_M}dist_ckpt_optim_fully_reshardable"),
    Idle("trainer.deterministic makes sampling reproducible", f"{_E}vllm_v1_disable_multiproc"),
    Idle("weights travel in buckets of a fixed size", f"{_E}weight_transfer_threshold_cuda_ipc_GB"),
    Idle("engines are always asynchronous", f"{_E}async_engine"),
    Idle("an old update group is always replaced", f"{_E}override_existing_update_group"),
    Idle("transformers has one kind of tokenizer", f"{_T}disable_fast_tokenizer"),
    Idle("log-probs come from a fused kernel", f"{_P}use_torch_compile"),
    # ------------------------------------------------------------ rollouts that run ahead
    Idle(
        "trainer.fully_async.enabled is false",
        f"{_T}fully_async.max_staleness_steps",
        lambda cfg, hardware: not cfg.trainer.fully_async.enabled,
    ),
    Idle(
        "nothing runs ahead: that takes trainer.fully_async.enabled=true and max_staleness_steps above 0",
        _in_all(
            f"{_T}fully_async.",
            "num_parallel_generation_workers stale_policy clear_kv_cache_on_weight_sync rollouts_path keep_rollouts"
            " replay_from adaptive_concurrency",
        ),
        lambda cfg, hardware: not runs_ahead(cfg),
    ),
    Idle(
        "trainer.healing.enabled is false",
        _in_all(f"{_T}healing.", "copies max_times within_steps"),
        lambda cfg, hardware: not cfg.trainer.healing.enabled,
    ),
    # ------------------------------------------------------------ roles
    *(
        Idle("the model is a folder", f"{_T}{role}.model.revision", _model_is_a_folder(role))
        for role in ("policy", "ref", "critic", "teacher")
    ),
    Idle(
        "there is no critic: trainer.critic.model.path names one",
        f"{_T}critic. {_A}value_head_prefix {_A}value_clip "
        + f"{_T}critic_mini_batch_size {_T}critic_warmup_steps "
        + _in_all(f"{_T}placement.", "critic_num_nodes critic_num_gpus_per_node"),
        _no_role("critic"),
    ),
    Idle(
        "there is no teacher on ranks: trainer.teacher.model.path or .models names one",
        f"{_T}teacher.model. {_T}teacher.megatron_config. {_T}teacher.fsdp_config. {_T}teacher.model_config_kwargs "
        f"{_T}teacher.sequence_parallel_size "
        + _in_all(f"{_T}placement.", "teacher_num_nodes teacher_num_gpus_per_node"),
        _no_role("teacher"),
    ),
    Idle(
        "there is no teacher: trainer.teacher names one",
        f"{_A}distillation.",
        lambda cfg, hardware: not has_teacher(cfg),
    ),
    Idle(
        "distillation.loss_coef is 0",
        _in_all(f"{_A}distillation.", "top_k beta renormalize"),
        _algorithm(lambda a: not a.distillation.loss_coef),
    ),
    Idle(
        "there is no reference of its own: algorithm.use_kl_loss or use_kl_in_reward needs one, but for adapters",
        f"{_T}ref. {_T}update_ref_every_epoch "
        + _in_all(f"{_T}placement.", "ref_num_nodes ref_num_gpus_per_node colocate_policy_ref"),
        _no_role("ref"),
    ),
    Idle(
        "the reference is not trained",
        _in_all(
            f"{_T}ref.megatron_config.",
            "ddp_config. torch_profiler_config. lora_config. optimizer_config_kwargs empty_cuda_cache "
            "moe_aux_loss_coeff moe_z_loss_coeff dist_ckpt_optim_fully_reshardable freeze_moe_router "
            "moe_per_layer_logging moe_routing_replay_missing async_dist_ckpt_save",
        )
        + f" {_T}ref.model.lora.",
    ),
    Idle(
        "the layer of multi-token prediction is trained beside the policy alone",
        " ".join(f"{_T}{role}.megatron_config.mtp." for role in ("ref", "critic", "teacher")),
    ),
    Idle(
        "mtp.train is false",
        f"{_M}mtp.loss_scale",
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.mtp.train,
    ),
    Idle(
        "moe_enable_routing_replay=false",
        f"{_M}moe_routing_replay_missing {_M}moe_routing_replay_source",
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.moe_enable_routing_replay,
    ),
    Idle(
        "moe_routing_replay_source=trainer: no token comes without",
        f"{_M}moe_routing_replay_missing",
        lambda cfg, hardware: cfg.trainer.policy.megatron_config.moe_routing_replay_source == "trainer",
    ),
    Idle(
        "adapters are off: policy.model.lora.rank=0",
        f"{_E}fully_sharded_loras",
        lambda cfg, hardware: cfg.trainer.policy.model.lora.rank == 0,
    ),
    Idle("adapters travel through memory", f"{_P}model.lora.lora_sync_path"),
    Idle(
        "engines get merged weights: lora.sync_mode=merged",
        f"{_E}fully_sharded_loras",
        lambda cfg, hardware: cfg.trainer.policy.model.lora.sync_mode == "merged",
    ),
    Idle(
        "colocate_all=true: policy and reference share what all share",
        f"{_T}placement.colocate_policy_ref",
        lambda cfg, hardware: cfg.trainer.placement.colocate_all,
    ),
    # ------------------------------------------------------------ objective
    Idle(
        "the loss does not clip the ratio at it",
        _in_all(_A, "eps_clip_low eps_clip_high"),
        _loss_is_not("regular", "dual_clip", "gspo", "clip_cov", "rollout_is"),
    ),
    Idle("policy_loss_type is not dual_clip", f"{_A}clip_ratio_c", _loss_is_not("dual_clip")),
    *(
        Idle(f"policy_loss_type is not {name}", f"{_A}{name}.", _loss_is_not(name))
        for name in ("sapo", "clip_cov", "kl_cov", "cispo", "dppo")
    ),
    Idle(
        "the loss has no off-policy correction",
        _C,
        _algorithm(lambda a: a.policy_loss_type in UNCORRECTED),
    ),
    Idle(
        "tis_ratio_type is not token",
        f"{_C}token_tis_ratio_clip_high",
        _algorithm(lambda a: a.off_policy_correction.tis_ratio_type != "token"),
    ),
    Idle(
        "tis_ratio_type is not sequence",
        f"{_C}sequence_tis_ratio_clip_high",
        _algorithm(lambda a: a.off_policy_correction.tis_ratio_type != "sequence"),
    ),
    Idle(
        "sequence_mask_metric is not geometric", _in_all(_C, "geo_mask_low geo_mask_high"), _is_masked_by("geometric")
    ),
    Idle(
        "sequence_mask_metric is not product",
        _in_all(_C, "product_mask_low product_mask_high"),
        _is_masked_by("product"),
    ),
    Idle("use_tis=false", f"{_A}tis_imp_ratio_cap", _algorithm(lambda a: not a.use_tis)),
    Idle(
        "there is no KL term: use_kl_loss and use_kl_in_reward are off",
        _in_all(_A, "kl_loss_coef kl_estimator_type"),
        lambda cfg, hardware: not needs_reference(cfg),
    ),
    Idle("use_kl_in_reward=false", f"{_A}kl_ctrl.", _algorithm(lambda a: not a.use_kl_in_reward)),
    Idle(
        "kl_ctrl.type is not adaptive",
        _in_all(f"{_A}kl_ctrl.", "kl_target horizon"),
        _algorithm(lambda a: a.kl_ctrl.type != "adaptive"),
    ),
    Idle("use_entropy_loss=false", f"{_A}entropy_loss_coef", _algorithm(lambda a: not a.use_entropy_loss)),
    Idle(
        "loss_reduction is not seq_mean_token_sum_norm",
        f"{_A}max_seq_len",
        _algorithm(lambda a: a.loss_reduction != "seq_mean_token_sum_norm"),
    ),
    Idle("advantage_estimator is not grpo", f"{_A}grpo_norm_by_std", _estimator_is_not("grpo")),
    Idle("the estimator does not discount", f"{_A}gamma", _estimator_is_not("gae", "reinforce++")),
    Idle(
        "the estimator does not carry reward through time",
        f"{_A}skip_untrained_tokens",
        _estimator_is_not("gae", "reinforce++"),
    ),
    Idle("advantage_estimator is not gae", f"{_A}lambd {_A}gae.", _estimator_is_not("gae")),
    Idle(
        "gae.length_adaptive_alpha and gae.critic_lambd are set",
        f"{_A}lambd",
        _algorithm(lambda a: None not in (a.gae.length_adaptive_alpha, a.gae.critic_lambd)),
    ),
    Idle(
        "dynamic_sampling.type is off",
        f"{_A}dynamic_sampling.max_sample_batches",
        _algorithm(lambda a: a.dynamic_sampling.type is None),
    ),
    Idle(
        "dynamic_sampling.type is not replace",
        f"{_A}dynamic_sampling.min_replace_ratio",
        _algorithm(lambda a: a.dynamic_sampling.type != "replace"),
    ),
    # ------------------------------------------------------------ the step
    Idle(
        "the schedule does not decay",
        _in_all(f"{_P}optimizer_config.", "min_lr num_decay_steps"),
        lambda cfg, hardware: cfg.trainer.policy.optimizer_config.scheduler.startswith("constant"),
    ),
    Idle(
        "training and engines do not share GPUs: placement.colocate_all=false",
        f"{_P}optimizer_config.offload_after_step",
        lambda cfg, hardware: not cfg.trainer.placement.colocate_all,
    ),
    Idle(
        "max_tokens_per_microbatch cuts micro-batches",
        _in_all(_T, "micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu"),
        lambda cfg, hardware: cfg.trainer.max_tokens_per_microbatch > 0,
    ),
    Idle(
        "torch_profiler_config.enable=false",
        _in_all(f"{_M}torch_profiler_config.", "ranks save_path"),
        lambda cfg, hardware: not cfg.trainer.policy.megatron_config.torch_profiler_config.enable,
    ),
    # ------------------------------------------------------------ rollouts
    Idle(
        "no generation ends at a stop string: sampling_params.stop names none",
        f"{_G}append_eos_token_after_stop_str_in_multi_turn",
        lambda cfg, hardware: (
            not any(map(_stops, (cfg.generator.sampling_params, cfg.generator.eval_sampling_params)))
        ),
    ),
    # ------------------------------------------------------------ engines
    Idle(
        "tokens are sampled from the whole vocabulary: no top_p, top_k or min_p in sampling_params",
        f"{_E}return_sampling_support",
        lambda cfg, hardware: not truncations(cfg.generator.sampling_params),
    ),
    Idle(
        "enable_http_endpoint=false",
        _in_all(_E, "http_endpoint_host http_endpoint_port http_token_path served_model_name"),
        lambda cfg, hardware: not cfg.generator.inference_engine.enable_http_endpoint,
    ),
    Idle(
        "enable_registry=false",
        _in_all(
            _E,
            "registry_host registry_port registry_token_path registry_min_engines registry_silence_s registry_drain_s",
        ),
        lambda cfg, hardware: not cfg.generator.inference_engine.enable_registry,
    ),
    Idle(
        "engines are started here: run_engines_locally=true",
        _in_all(_E, "remote_urls external_server_urls external_proxy_url"),
        lambda cfg, hardware: cfg.generator.inference_engine.run_engines_locally,
    ),
    Idle(
        "external_server_urls names the engines",
        f"{_E}remote_urls",
        lambda cfg, hardware: bool(cfg.generator.inference_engine.external_server_urls),
    ),
    Idle(
        "engines are started elsewhere: run_engines_locally=false",
        _in_all(_E, _OF_LOCAL_ENGINES),
        lambda cfg, hardware: not cfg.generator.inference_engine.run_engines_locally,
    ),
    Idle(
        "engines on the trainer's GPUs get weights there: placement.colocate_all=true",
        _in_all(_E, "weight_sync_backend"),
        lambda cfg, hardware: (
            cfg.trainer.placement.colocate_all
            and cfg.generator.inference_engine.weight_sync_backend in TRANSPORTS.built_in
            and not (hardware.is_cpu and cfg.generator.inference_engine.weight_sync_backend == device.GLOO)
        ),
    ),
    # ------------------------------------------------------------ machines without GPUs
    Idle(
        "there is no GPU",
        f"{_P}record_memory " + _in_all(_E, "gpu_memory_utilization distributed_executor_backend"),
        _on_cpu,
    ),
    Idle(
        "there is no GPU",
        f"{_M}empty_cuda_cache",
        lambda cfg, hardware: (
            hardware.is_cpu
            and bool(cfg.trainer.policy.megatron_config.empty_cuda_cache)
            and not cfg.trainer.placement.colocate_all  # whose default it is
        ),
    ),
)


def idle_settings(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, why it changes nothing) of each idle setting that was asked for. ``cfg``: resolved."""
    every = [key for key, _, _ in leaves(type(cfg)) if _is_there(cfg, key)]
    reasons: dict[str, str] = {}
    for rule in IDLE:
        if rule.when(cfg, hardware):
            for named in rule.keys.split():
                matched = [key for key in every if key.startswith(named)] if named.endswith(".") else [named]
                reasons |= {key: rule.why for key in matched if key not in reasons and key not in _SWITCHES}
    for key, value in asked_for(cfg, tuple(reasons)):
        if key in reasons:
            yield key, value, reasons[key]


def asked_for(cfg: SkyRLTrainConfig, beginnings: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of the settings that begin so and are somebody's wish: no default, and not what follows from
    others. ``cfg``: resolved."""
    fresh = type(cfg)()
    for key, _, _ in leaves(type(cfg)):
        if key.startswith(beginnings) and _is_there(cfg, key) and _asked_for(cfg, key, fresh):
            yield key, get_path(cfg, key)


_SWITCHES = frozenset(
    f"trainer.{key}"
    for key in "critic.model.path teacher.model.path policy.model.lora.rank ref.model.lora.rank".split()
)
"""Settings inside idle sections that switch them on, or are refused."""


def _is_there(cfg: Section, key: str) -> bool:
    try:
        get_path(cfg, key)
    except AttributeError:  # below a section that is None
        return False
    return True


def _asked_for(cfg: SkyRLTrainConfig, key: str, fresh: SkyRLTrainConfig) -> bool:
    """Return whether the value is somebody's wish: no default, and not what follows from other settings."""
    value, filled = get_path(cfg, key), cfg.__dict__["_filled"]
    if (_is_there(fresh, key) and value == get_path(fresh, key)) or (key in filled and value == filled[key]):
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
    """Return the default in the classes, before anything is filled in. ``sections``: those made so far, by name."""
    first, _, rest = key.partition(".")
    if first not in sections:
        sections[first] = default_of(type(cfg), first)
    if _is_there(sections[first], rest):
        return copy.deepcopy(get_path(sections[first], rest))
    owner, name = owner_of(cfg, key)
    return default_of(type(owner), name)


def _without(cfg: SkyRLTrainConfig, key: str) -> SkyRLTrainConfig:
    """Return the configuration as it would be had nobody set ``key``."""
    sections: dict[str, Any] = {}
    unset = copy.deepcopy(cfg)
    section, name = owner_of(unset, key)
    setattr(section, name, _declared(cfg, key, sections))
    for path, value in [*unset.__dict__["_filled"].items()]:  # it may follow from the key
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
