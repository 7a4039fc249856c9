"""The table: one row for each setting that has an effect, and those that are refused.

A row says what to set, and which description of the run then differs (a function of this package, or a part of what a
rank says of itself). ``given`` are settings that the row needs on both sides of the comparison. Relative paths are
files that ``base.prepare`` writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.config.settings import engines, loop, objective, ranks, rollout
from tests.support.rank_pool import lasting_port

T, A, G = "trainer.", "trainer.algorithm.", "generator."
P, M, C = f"{T}policy.", f"{T}policy.megatron_config.", f"{A}off_policy_correction."
E = f"{G}inference_engine."
OPT, S, R = f"{P}optimizer_config.", f"{G}sampling_params.", "environment.skyrl_gym."


@dataclass(frozen=True)
class Row:
    """One setting."""

    value: Any
    shows: Callable[[Any], Any] | str
    """What differs: a description, or one of ``ranks.PARTS``."""
    given: dict[str, Any] = field(default_factory=dict)


def loss_is(name: str, **more: Any) -> dict[str, Any]:
    return {f"{A}policy_loss_type": name} | {f"{A}{key}": value for key, value in more.items()}


PORTS = lasting_port(), lasting_port()
TIS = {f"{C}tis_ratio_type": "token"}
MASKED = {f"{C}sequence_mask_metric": "geometric"}
IN_REWARD = {f"{A}use_kl_in_reward": True, f"{A}use_kl_loss": False, f"{A}kl_loss_coef": 0.1}
ADAPTIVE = IN_REWARD | {f"{A}kl_ctrl.type": "adaptive"}
TWO_TURNS = {f"{G}max_turns": 2, f"{G}max_input_length": 300, "generator.sampling_params.stop": ["15"]}
APART = {f"{T}placement.colocate_all": False}
ELSEWHERE = APART | {f"{E}run_engines_locally": False, f"{E}remote_urls": ["a:1"]}
SERVED = ELSEWHERE | {f"{E}enable_http_endpoint": True, f"{E}http_endpoint_port": PORTS[0]}
JOINED = ELSEWHERE | {f"{E}enable_registry": True, f"{E}registry_port": PORTS[0]}
FEW = {f"{T}max_training_steps": 2}
DECAYS = {f"{OPT}scheduler": "linear", f"{OPT}num_warmup_steps": 2}
DRAFTED = {f"{P}model.path": "drafted"}
EXPERTS_APART = {f"{M}expert_model_parallel_size": 2, f"{T}placement.policy_num_gpus_per_node": 2}
AUX = {f"{M}moe_router_load_balancing_type": "aux_loss"}
ROUTED = {f"{E}enable_return_routed_experts": True}
SPREAD = ROUTED | {
    f"{T}{role}.megatron_config.{name}": value
    for role in ("policy", "ref")
    for name, value in {"moe_enable_routing_replay": True, "expert_model_parallel_size": 2}.items()
}
PROFILED = {f"{M}torch_profiler_config.enable": True}
OWN_TEMPLATE = {f"{G}chat_template.source": "file", f"{G}chat_template.name_or_path": "chat.jinja"}
TWO_REWARDS = {f"{A}advantage_estimator": "gdpo", f"{A}gdpo_weights": {"right": 1.0, "short": 1.0}}
AGENT = {f"{G}name": "agent", f"{G}agent.command": ["agent"], f"{G}agent.sandbox": "tests_sandbox"}
FILTER = {f"{A}dynamic_sampling.type": "filter"}

OBJECTIVE = {
    f"{A}policy_loss_type": Row("gspo", objective.loss),
    f"{A}loss_reduction": Row("sequence_mean", objective.loss),
    f"{A}max_seq_len": Row(99, objective.loss, {f"{A}loss_reduction": "seq_mean_token_sum_norm"}),
    f"{A}eps_clip_low": Row(0.01, objective.loss),
    f"{A}eps_clip_high": Row(0.01, objective.loss),
    f"{A}clip_ratio_c": Row(1.1, objective.loss, loss_is("dual_clip")),
    f"{A}kl_estimator_type": Row("k1", objective.loss),
    f"{A}use_kl_loss": Row(False, objective.loss),
    f"{A}kl_loss_coef": Row(0.5, objective.loss),
    f"{A}use_entropy_loss": Row(True, objective.loss),
    f"{A}entropy_loss_coef": Row(0.5, objective.loss, {f"{A}use_entropy_loss": True}),
    f"{A}use_tis": Row(True, objective.loss, {f"{A}tis_imp_ratio_cap": 1.1}),
    f"{A}tis_imp_ratio_cap": Row(1.1, objective.loss, {f"{A}use_tis": True}),
    f"{C}tis_ratio_type": Row("token", objective.loss),
    f"{C}token_tis_ratio_clip_high": Row(1.1, objective.loss, TIS),
    f"{C}sequence_tis_ratio_clip_high": Row(0.1, objective.loss, {f"{C}tis_ratio_type": "sequence"}),
    f"{C}sequence_mask_metric": Row("geometric", objective.loss),
    f"{C}geo_mask_high": Row(9.0, objective.loss, MASKED | {f"{C}geo_mask_low": 0.0}),
    f"{C}geo_mask_low": Row(0.0, objective.loss, MASKED | {f"{C}geo_mask_high": 9.0}),
    f"{C}product_mask_high": Row(
        0.9, objective.loss, {f"{C}sequence_mask_metric": "product", f"{C}product_mask_low": 0.0}
    ),
    f"{C}product_mask_low": Row(0.0, objective.loss, {f"{C}sequence_mask_metric": "product"}),
    f"{C}outlier_token_is_threshold_low": Row(0.9, objective.loss),
    f"{C}outlier_token_is_threshold_high": Row(1.1, objective.loss),
    f"{C}token_mask_is_threshold_low": Row(0.9, objective.loss),
    f"{C}token_mask_is_threshold_high": Row(1.1, objective.loss),
    f"{A}sapo.tau_pos": Row(3.0, objective.loss, loss_is("sapo")),
    f"{A}sapo.tau_neg": Row(3.0, objective.loss, loss_is("sapo")),
    f"{A}clip_cov.clip_ratio": Row(0.5, objective.loss, loss_is("clip_cov", **{"clip_cov.clip_cov_lb": -9.0})),
    f"{A}clip_cov.clip_cov_lb": Row(-9.0, objective.loss, loss_is("clip_cov", **{"clip_cov.clip_ratio": 0.5})),
    f"{A}clip_cov.clip_cov_ub": Row(
        0.01, objective.loss, loss_is("clip_cov", **{"clip_cov.clip_ratio": 0.9, "clip_cov.clip_cov_lb": -9.0})
    ),
    f"{A}kl_cov.kl_cov_frac": Row(0.9, objective.loss, loss_is("kl_cov")),
    f"{A}kl_cov.ppo_kl_coef": Row(9.0, objective.loss, loss_is("kl_cov")),
    f"{A}cispo.cispo_eps_clip_low": Row(0.5, objective.loss, loss_is("cispo")),
    f"{A}cispo.cispo_eps_clip_high": Row(0.1, objective.loss, loss_is("cispo")),
    f"{A}cispo.anchor": Row("rollout", objective.loss, loss_is("cispo")),
    f"{A}dppo.dppo_type": Row("binary_kl", objective.loss, loss_is("dppo")),
    f"{A}ratio_anchor": Row("rollout", objective.loss, loss_is("regular")),
    f"{A}m2po_threshold": Row(1e-6, objective.loss, loss_is("m2po")),
    f"{A}dppo.delta_low": Row(0.001, objective.loss, loss_is("dppo")),
    f"{A}dppo.delta_high": Row(0.001, objective.loss, loss_is("dppo")),
    f"{A}advantage_estimator": Row("rloo", objective.advantages),
    f"{A}grpo_norm_by_std": Row(False, objective.advantages),
    f"{A}advantage_batch_normalize": Row(True, objective.advantages),
    f"{A}zero_variance_filter": Row(True, objective.advantages),
    f"{A}gdpo_weights": Row({"right": 2.0, "short": 0.5}, objective.advantages, TWO_REWARDS),
    f"{A}rae_decay": Row(0.5, objective.advantages, {f"{A}advantage_estimator": "rae"}),
    f"{A}observation_loss_coef": Row(0.5, objective.loss),
    f"{A}length_penalty": Row({"type": "relative"}, objective.advantages),
    f"{C}sequence_error_high": Row(1.1, objective.loss),
    f"{A}gamma": Row(0.5, objective.advantages, {f"{A}advantage_estimator": "reinforce++"}),
    f"{A}lambd": Row(0.5, objective.advantages, {f"{A}advantage_estimator": "gae"}),
    f"{A}gae.critic_lambd": Row(0.5, objective.returns, {f"{A}advantage_estimator": "gae"}),
    f"{A}gae.length_adaptive_alpha": Row(0.5, objective.advantages, {f"{A}advantage_estimator": "gae"}),
    f"{A}gae.bootstrap_truncated": Row(True, objective.returns, {f"{A}advantage_estimator": "gae"}),
    f"{A}skip_untrained_tokens": Row(False, objective.returns, {f"{A}advantage_estimator": "gae"}),
    f"{A}use_kl_in_reward": Row(True, objective.penalty, {f"{A}use_kl_loss": False}),
    f"{A}kl_ctrl.type": Row("adaptive", objective.penalty, IN_REWARD),
    f"{A}kl_ctrl.kl_target": Row(99.0, objective.penalty, ADAPTIVE),
    f"{A}kl_ctrl.horizon": Row(10, objective.penalty, ADAPTIVE),
    f"{A}dynamic_sampling.type": Row("filter", objective.sampler),
    f"{A}dynamic_sampling.gates": Row({"length": {"high": 2}}, rollout.refusal),
    f"{A}dynamic_sampling.max_sample_batches": Row(2, objective.sampler, FILTER),
    f"{A}dynamic_sampling.min_replace_ratio": Row(0.1, objective.sampler, {f"{A}dynamic_sampling.type": "replace"}),
    f"{A}nonfinite": Row("skip", objective.nonfinite),
    f"{A}temperature": Row(2.0, "logprobs"),
}

OVERSAMPLED = TIS | {f"{T}oversampling.ratio": 0.5}
ASYNC = APART | TIS | {f"{T}fully_async.enabled": True}
HEALED = {f"{T}healing.enabled": True}
LOOP = {
    f"{T}fully_async.enabled": Row(True, loop.stream, APART | TIS),
    f"{T}fully_async.max_staleness_steps": Row(2, loop.stream, ASYNC),
    f"{T}fully_async.num_parallel_generation_workers": Row(2, loop.stream, ASYNC),
    f"{T}fully_async.stale_policy": Row("drop", loop.stream, ASYNC),
    f"{T}fully_async.rollouts_path": Row("/rollouts", loop.rollouts, ASYNC),
    f"{T}fully_async.adaptive_concurrency": Row(True, loop.adapts, ASYNC),
    f"{T}fully_async.batches_ahead": Row(1.5, loop.stream, ASYNC),
    f"{T}fully_async.keep_rollouts": Row(True, loop.keeps, ASYNC),
    f"{T}oversampling.ratio": Row(0.5, loop.oversampling, TIS),
    f"{T}oversampling.unfinished": Row("drop", loop.oversampling, OVERSAMPLED),
    f"{T}oversampling.max_staleness_steps": Row(2, loop.oversampling, OVERSAMPLED),
    f"{T}fully_async.replay_from": Row("/no/such", loop.replays, ASYNC),
    f"{T}healing.enabled": Row(True, loop.heals),
    f"{T}healing.copies": Row("none", loop.heals, HEALED),
    f"{T}healing.max_times": Row(1, loop.heals, HEALED),
    f"{T}healing.within_steps": Row(1, loop.heals, HEALED),
    f"{T}update_ref_every_epoch": Row(True, loop.plan),
    f"{T}epochs": Row(2, loop.plan),
    f"{T}max_training_steps": Row(1, loop.plan),
    f"{T}train_batch_size": Row(6, loop.plan),
    f"{T}policy_mini_batch_size": Row(4, loop.plan),
    f"{T}update_epochs_per_batch": Row(2, loop.plan),
    f"{T}seed": Row(7, loop.plan),
    f"{T}max_rollout_gap": Row(0.1, loop.gap),
    f"{T}rollout_gap_exceeded": Row("warn", loop.gap, {f"{T}max_rollout_gap": 0.1}),
    f"{T}ckpt_interval": Row(1, loop.plan),
    f"{T}hf_save_interval": Row(1, loop.plan),
    f"{T}export_path": Row("out/elsewhere", loop.evaluation),
    f"{T}eval_before_train": Row(False, loop.plan),
    f"{T}eval_interval": Row(1, loop.plan),
    f"{G}n_samples_per_prompt": Row(3, loop.plan),
    "environment.env_class": Row("addition", loop.plan),
    f"{T}resume_mode": Row("none", loop.resumes),
    f"{T}resume_other": Row(["data"], loop.continues_others),
    f"{T}resume_path": Row("/a/global_step_1", loop.resumes, {f"{T}resume_mode": "from_path"}),
    f"{T}ckpt_path": Row("/elsewhere", loop.checkpointer),
    f"{T}stop_when": Row("reward/avg_raw_reward >= 0.5", loop.plan),
    f"{T}best_metric": Row("eval/all/avg_score", loop.plan),
    f"{T}max_ckpts_to_keep": Row(3, loop.checkpointer),
    f"{T}hub_commits": Row({"model org/name": "0123456789"}, loop.checkpointer),
    f"{M}async_dist_ckpt_save": Row(True, loop.checkpointer),
    f"{T}phase_timeout_s": Row(99.0, loop.checkpointer),
    f"{T}dump_data_batch": Row(True, loop.dumps),
    f"{T}prometheus_port": Row(PORTS[1], loop.exports),
    f"{T}opentelemetry_endpoint": Row("http://127.0.0.1:9", loop.exports),
    f"{T}samples_per_step": Row(3, loop.looks),
    f"{T}samples_per_run": Row(16, loop.looks),
    f"{T}dump_eval_results": Row(False, loop.evaluation),
    f"{T}eval_batch_size": Row(3, loop.evaluation),
    f"{G}eval_n_samples_per_prompt": Row(2, loop.evaluation),
    f"{E}restarts_per_hour": Row(7, loop.restarts),
    f"{E}weight_sync_probe_interval": Row(7, loop.synchronizer),
    f"{E}weight_sync_probe_limit": Row(0.7, loop.synchronizer),
    f"{E}weight_sync_routes": Row(False, loop.synchronizer),
    **{
        f"{G}eval_sampling_params.{name}": Row(value, loop.evaluation)
        for name, value in {
            "max_generate_length": 5,
            "repetition_penalty": 1.5,
            "temperature": 0.7,
            "top_p": 0.5,
            "min_p": 0.1,
            "top_k": 3,
            "logprobs": None,
            "stop": ["x"],
            "additional_kwargs": {"presence_penalty": 0.5},
        }.items()
    },
}

ROLLOUT = {
    **{
        f"{S}{name}": Row(value, engines.sampling)
        for name, value in {
            "max_generate_length": 5,
            "repetition_penalty": 1.5,
            "temperature": 0.7,
            "top_p": 0.5,
            "min_p": 0.1,
            "top_k": 3,
            "logprobs": None,
            "stop": ["x"],
            "additional_kwargs": {"presence_penalty": 0.5},
        }.items()
    },
    f"{G}batched": Row(True, rollout.samples),
    f"{G}max_turns": Row(2, rollout.samples),
    f"{G}max_input_length": Row(40, rollout.samples, TWO_TURNS),
    f"{G}chat_template.name_or_path": Row("qwen3_without_thinking", rollout.samples),
    f"{G}chat_template.source": Row("file", rollout.samples, {f"{G}chat_template.name_or_path": "chat.jinja"}),
    f"{G}chat_template_kwargs": Row({"hint": "answer:"}, rollout.samples, OWN_TEMPLATE),
    f"{G}use_conversation_multi_turn": Row(False, rollout.samples, TWO_TURNS),
    f"{G}append_eos_token_after_stop_str_in_multi_turn": Row(False, rollout.samples, TWO_TURNS),
    f"{G}zero_reward_on_non_stop": Row(True, rollout.samples),
    f"{G}apply_overlong_filtering": Row(True, rollout.samples),
    f"{G}step_wise_trajectories": Row(True, rollout.samples, TWO_TURNS),
    f"{G}merge_stepwise_output": Row(True, rollout.samples, TWO_TURNS | {f"{G}step_wise_trajectories": True}),
    f"{T}deterministic": Row(True, rollout.samples),
    f"{R}max_env_workers": Row(3, rollout.workers),
    f"{R}env_timeout": Row(9.0, rollout.workers),
    f"{R}packages": Row(["nemo-gym:*"], rollout.packages),
    f"{R}task.images": Row(["/images/*"], rollout.task),
    f"{R}task.max_cpus": Row(1.5, rollout.task),
    f"{R}task.max_memory": Row(1000, rollout.task),
    f"{R}task.max_disk": Row(1000, rollout.task),
    f"{R}task.max_processes": Row(7, rollout.task),
    f"{R}task.max_timeout_s": Row(9.0, rollout.task),
    f"{R}text2sql.db_path": Row("others", rollout.environments),
    f"{R}llm_as_a_judge.model": Row("judge", rollout.environments),
    f"{R}llm_as_a_judge.base_url": Row("http://judge", rollout.environments),
    f"{R}search.log_requests": Row(True, rollout.environments),
    f"{R}search.search_url": Row("http://search", rollout.environments),
    f"{R}search.topk": Row(9, rollout.environments),
    f"{R}search.timeout": Row(9.0, rollout.environments),
    "data.train_data": Row(["more.parquet"], rollout.experiment),
    "data.val_data": Row([], rollout.experiment),
    "data.eval_sets": Row({"more": {"data": ["train.parquet"]}}, rollout.experiment),
    "data.sampler": Row("in_order", rollout.order),
    "data.sampler_options": Row({"path": "order.txt"}, rollout.order, {"data.sampler": "list"}),
    "data.strict_rows": Row(True, rollout.unread_keys),
    "data.row_cache_gb": Row(0.0, rollout.kept_lengths),
    f"{T}max_prompt_length": Row(1, rollout.experiment),
    f"{G}name": Row("tests_generator", rollout.experiment),
    f"{G}min_token_in_rate": Row(0.99, rollout.judgement, {f"{G}name": "tests_generator"}),
    f"{G}agent.command": Row(["other"], rollout.agent, AGENT),
    f"{G}agent.sandbox": Row("docker", rollout.agent, AGENT),
    f"{G}agent.mounts": Row({"/opt": "/"}, rollout.agent, AGENT),
    f"{G}agent.at_once": Row(77, rollout.agent, AGENT),
    f"{G}agent.stdin": Row(True, rollout.agent, AGENT),
    f"{G}agent.timed_out_reward": Row(None, rollout.agent, AGENT),
    f"{G}agent.context_full_reward": Row(None, rollout.agent, AGENT),
    f"{G}unaccounted_sampling": Row("warn", rollout.agent_limits, AGENT),
    f"{G}max_infrastructure_share": Row(0.1, rollout.judgement, {f"{G}name": "tests_generator"}),
    f"{G}agent.reasoning_parser": Row("qwen3", rollout.agent_limits, {f"{G}name": "tests_generator"}),
    f"{G}agent.max_calls": Row(77, rollout.agent_limits, AGENT),
    f"{G}agent.max_samples": Row(77, rollout.agent_limits, AGENT),
    f"{G}agent.max_tokens": Row(77, rollout.agent_limits, AGENT),
    f"{G}agent.max_connections": Row(77, rollout.agent_limits, AGENT),
}

ENGINES = {
    f"{T}fully_async.clear_kv_cache_on_weight_sync": Row(True, engines.settings, ASYNC),
    f"{T}exact_rollouts": Row(True, engines.settings),
    f"{E}model_dtype": Row("float16", engines.arguments),
    f"{E}tensor_parallel_size": Row(2, engines.arguments),
    f"{E}pipeline_parallel_size": Row(2, engines.arguments),
    f"{E}data_parallel_size": Row(2, engines.arguments),
    f"{E}expert_parallel_size": Row(2, engines.arguments),
    f"{E}enable_prefix_caching": Row(False, engines.arguments),
    f"{E}enable_return_routed_experts": Row(True, engines.arguments),
    f"{E}enable_chunked_prefill": Row(False, engines.arguments),
    f"{E}max_num_batched_tokens": Row(4096, engines.arguments),
    f"{E}enforce_eager": Row(True, engines.arguments),
    f"{E}enable_ray_prometheus_stats": Row(True, engines.arguments),
    f"{E}max_num_seqs": Row(8, engines.arguments),
    f"{E}return_sampling_support": Row(False, engines.arguments, {f"{G}sampling_params.top_p": 0.5}),
    f"{E}distributed_executor_backend": Row("mp", engines.arguments),
    f"{E}engine_init_kwargs": Row({"max_model_len": 64}, engines.arguments),
    f"{E}gpu_memory_utilization": Row(0.5, engines.arguments_on_gpus),
    f"{T}trust_remote_code": Row(True, engines.arguments),
    f"{G}rope_theta": Row(9.0, engines.arguments),
    f"{G}rope_scaling": Row({"rope_type": "linear", "factor": 2.0}, engines.arguments),
    f"{E}backend": Row("tests_engine", engines.kind),
    f"{E}weight_sync_backend": Row("gloo", engines.transport, APART),
    f"{E}num_engines": Row(2, engines.devices, APART),
    f"{E}run_engines_locally": Row(False, engines.devices, APART),
    f"{E}remote_urls": Row(["b:2"], engines.elsewhere, ELSEWHERE),
    f"{E}external_server_urls": Row(["http://b:2"], engines.elsewhere, ELSEWHERE),
    f"{E}external_proxy_url": Row("http://b:2", engines.elsewhere, ELSEWHERE),
    f"{E}enable_http_endpoint": Row(True, engines.endpoint, ELSEWHERE | {f"{E}http_endpoint_port": PORTS[0]}),
    f"{E}http_endpoint_host": Row("127.0.0.2", engines.endpoint, SERVED),
    f"{E}http_endpoint_port": Row(PORTS[1], engines.endpoint, SERVED),
    f"{E}http_token_path": Row("token", engines.endpoint, SERVED),
    f"{E}served_model_name": Row("mine", engines.endpoint, SERVED),
    f"{E}tool_call_parser": Row("hermes", engines.settings),
    f"{E}enable_registry": Row(True, engines.registry, ELSEWHERE | {f"{E}registry_port": PORTS[0]}),
    f"{E}registry_host": Row("127.0.0.2", engines.registry, JOINED),
    f"{E}registry_port": Row(PORTS[1], engines.registry, JOINED),
    f"{E}registry_token_path": Row("token", engines.registry, JOINED),
    f"{E}registry_min_engines": Row(2, engines.registry, JOINED),
    f"{E}registry_silence_s": Row(7.0, engines.registry, JOINED),
    f"{E}registry_drain_s": Row(7.0, engines.registry, JOINED),
    f"{T}placement.colocate_all": Row(False, engines.devices),
    f"{T}placement.colocate_policy_ref": Row(False, engines.devices, APART),
    f"{T}placement.policy_num_nodes": Row(2, engines.layout),
    f"{T}placement.policy_num_gpus_per_node": Row(2, engines.layout),
    f"{T}critic.model.path": Row("other", engines.layout, {f"{A}advantage_estimator": "gae"}),
    f"{T}placement.ref_num_nodes": Row(2, engines.layout),
    f"{T}placement.ref_num_gpus_per_node": Row(2, engines.layout),
    f"{T}log_path": Row("/elsewhere", engines.folder),
    f"{T}project_name": Row("other", engines.folder),
    f"{T}run_name": Row("other", engines.folder),
    f"{T}logger": Row("mlflow", engines.tracker),
    f"{T}plugins": Row(["colorsys"], engines.plugins),
}

_LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 1,
}
_OF_EVERY_MODEL = {
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_grouped_gemm": False,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp64",
    "transformer_config_kwargs": {"attention_dropout": 0.25},
}

MODELS = {
    **{f"{M}{name}": Row(value, engines.layout) for name, value in _LAYOUT.items()},
    **{f"{T}ref.megatron_config.{name}": Row(value, engines.layout) for name, value in _LAYOUT.items()},
    **{f"{M}{name}": Row(value, "transformer") for name, value in _OF_EVERY_MODEL.items()},
    **{f"{T}ref.megatron_config.{name}": Row(value, "transformer") for name, value in _OF_EVERY_MODEL.items()},
    **{
        key: Row({"rms_norm_eps": 0.5}, "model")
        for key in (
            f"{P}model_config_kwargs",
            f"{M}model_config_kwargs",
            f"{T}ref.model_config_kwargs",
            f"{T}ref.megatron_config.model_config_kwargs",
        )
    },
    f"{P}model.revision": Row("v1", engines.repositories, {f"{P}model.path": "org/name"}),
    f"{T}ref.model.revision": Row("v1", engines.repositories, {f"{T}ref.model.path": "org/name"}),
    f"{P}model.path": Row("other", "path"),
    f"{T}ref.model.path": Row("other", "path"),
    f"{T}rope_theta": Row(9.0, "model"),
    f"{T}rope_scaling": Row({"rope_type": "linear", "factor": 2.0}, "model"),
    f"{T}flash_attn": Row(False, "transformer"),
    f"{T}gradient_checkpointing": Row(False, "transformer"),
    f"{M}moe_aux_loss_coeff": Row(0.5, "transformer", AUX),
    f"{M}moe_z_loss_coeff": Row(0.5, "transformer"),
    f"{M}freeze_moe_router": Row(True, "trainable"),
    f"{M}moe_per_layer_logging": Row(True, "metrics"),
    f"{M}moe_expert_moves": Row("auto", ranks.report, EXPERTS_APART),
    f"{M}mtp.train": Row(True, "draft", DRAFTED),
    f"{M}mtp.loss_scale": Row(0.5, "draft", DRAFTED | {f"{M}mtp.train": True}),
    f"{M}moe_enable_routing_replay": Row(True, "replayed", ROUTED),
    f"{T}ref.megatron_config.moe_enable_routing_replay": Row(True, "replayed", ROUTED),
    f"{M}moe_routing_replay_source": Row("trainer", loop.scores, ROUTED | {f"{M}moe_enable_routing_replay": True}),
    f"{M}moe_balance_experts": Row(True, ranks.balanced, SPREAD),
    f"{T}ref.megatron_config.moe_balance_experts": Row(True, ranks.balanced, SPREAD),
    f"{M}moe_routing_replay_missing": Row("error", "routes", ROUTED | {f"{M}moe_enable_routing_replay": True}),
    f"{M}ddp_config.grad_reduce_in_fp32": Row(False, "buffers"),
    f"{M}ddp_config.overlap_grad_reduce": Row(True, ranks.buffers),
    f"{M}ddp_config.overlap_param_gather": Row(True, ranks.buffers, {f"{M}ddp_config.overlap_grad_reduce": True}),
    f"{M}torch_profiler_config.enable": Row(True, "traces"),
    f"{M}torch_profiler_config.ranks": Row([1], "traces", PROFILED),
    f"{M}torch_profiler_config.save_path": Row("out/traces", "traces", PROFILED),
    f"{M}optimizer_config_kwargs": Row({"adam_eps": 0.5}, "optimizer"),
    f"{M}empty_cuda_cache": Row(True, "emptied"),
    f"{OPT}lr": Row(0.5, "schedule"),
    f"{OPT}optimizer": Row("muon", "moments"),
    f"{OPT}adam_lr": Row(0.5, "moments", {f"{OPT}optimizer": "muon"}),
    f"{OPT}adam_betas": Row([0.5, 0.6], "optimizer"),
    f"{OPT}weight_decay": Row(0.5, "optimizer"),
    f"{OPT}decay_norms_and_biases": Row(True, "decay"),
    f"{OPT}max_grad_norm": Row(0.5, "optimizer"),
    f"{OPT}num_warmup_steps": Row(3, "schedule"),
    f"{OPT}scheduler": Row("cosine", "schedule"),
    f"{OPT}min_lr": Row(1e-7, "schedule", DECAYS),
    f"{OPT}num_decay_steps": Row(4, "schedule", DECAYS),
    f"{OPT}offload_after_step": Row(False, "away"),
    f"{P}record_memory": Row(True, "said"),
    f"{T}peak_flops_per_rank": Row(1e12, "metrics"),
    f"{T}expected_lengths": Row("7", ranks.expected_lengths),
    f"{T}bf16": Row(False, ranks.dtype_on_gpus),
    f"{T}micro_train_batch_size_per_gpu": Row(2, "micro-batches"),
    f"{T}micro_forward_batch_size_per_gpu": Row(2, "forward"),
    f"{T}max_tokens_per_microbatch": Row(64, "micro-batches"),
    f"{T}use_sample_packing": Row(False, "micro-batches", {f"{T}micro_train_batch_size_per_gpu": 2}),
    f"{T}share_prefixes": Row("never", "prefixes", {f"{T}max_tokens_per_microbatch": 64}),
    f"{T}logprobs_chunk_size": Row(7, "head"),
    f"{T}fused_lm_head_logprob": Row(True, "fused"),
    f"{T}strategy": Row("fsdp2", "warns"),
}

ALONE = {f"{P}model.lora.rank": 4, f"{P}model.lora.sync_mode": "memory"}
ADAPTED = {f"{P}model.lora.rank": 4, f"{OPT}lr": 0.01}
ADAPTERS = {
    f"{P}model.lora.rank": Row(2, "adapters"),
    f"{P}model.lora.alpha": Row(99, "adapters", ADAPTED),
    f"{P}model.lora.dropout": Row(0.5, "adapters", ADAPTED),
    f"{P}model.lora.target_modules": Row("linear_qkv", "adapters", ADAPTED),
    f"{P}model.lora.exclude_modules": Row("linear_qkv", "adapters", ADAPTED),
    f"{P}model.lora.init_method": Row("zero", "adapters", ADAPTED),
    f"{P}model.lora.train_attn": Row(False, "adapters", ADAPTED),
    f"{P}model.lora.train_mlp": Row(False, "adapters", ADAPTED),
    f"{P}model.lora.use_rslora": Row(True, "adapters", ADAPTED),
    f"{P}model.lora.adapters": Row({"code": {"alpha": 99}}, "adapters", ADAPTED),
    f"{P}model.lora.train_unembed": Row(True, "adapters", ADAPTED),
    f"{M}lora_config.lora_type": Row("canonical_lora", "adapters", ADAPTED),
    f"{M}lora_config.experts_shared_outer_loras": Row(True, "adapters", ADAPTED),
    f"{M}lora_config.normalize_moe_lora": Row(True, "adapters", ADAPTED),
    f"{P}model.lora.sync_mode": Row("memory", engines.arguments, {f"{P}model.lora.rank": 4}),
    f"{M}lora_config.merge_lora": Row(False, engines.arguments, {f"{P}model.lora.rank": 4}),
    f"{E}fully_sharded_loras": Row(True, engines.arguments, ALONE),
}

ROWS = OBJECTIVE | LOOP | ROLLOUT | ENGINES | MODELS | ADAPTERS

_FSDP = {"cpu_offload": True, "reshard_after_forward": False, "fsdp_size": 2, "wrap_policy": {"a": 1}}
_MIXED = {"param_dtype": "fp16", "reduce_dtype": "fp16", "buffer_dtype": "fp16"}
REFUSED_BY_RANKS = {
    f"{M}moe_router_enable_expert_bias": True,
    f"{T}ref.megatron_config.moe_router_enable_expert_bias": True,
}
"""Settings that a rank refuses, which knows the tensors of its model."""
REFUSED = {
    f"{P}model.lora.adapter_path": "/no/such",
    f"{T}ref.model.lora.rank": 8,
    f"{A}distillation.demonstration": "hint",
    f"{T}teacher.model.path": "/model",
    f"{T}teacher.models": {"a": "/model"},
    f"{M}moe_token_dispatcher_type": "allgather",
    f"{T}ref.megatron_config.moe_token_dispatcher_type": "allgather",
    f"{T}ref.megatron_config.moe_routing_replay_source": "trainer",
    **{f"{T}{role}.fsdp_config.{name}": value for role in ("policy", "ref") for name, value in _FSDP.items()},
    **{
        f"{T}{role}.fsdp_config.mixed_precision.{name}": value
        for role in ("policy", "ref")
        for name, value in _MIXED.items()
    },
}
"""Settings that a run is refused for, with a value."""

NO_EFFECT = (
    f"{T}critic.",
    f"{T}critic_mini_batch_size",
    f"{T}critic_warmup_steps",
    f"{T}teacher.",
    f"{T}placement.teacher_num_nodes",
    f"{T}placement.teacher_num_gpus_per_node",
    f"{A}distillation.",
    f"{A}value_head_prefix",
    f"{T}placement.critic_num_nodes",
    f"{T}placement.critic_num_gpus_per_node",
    f"{A}value_clip",
    f"{P}model.lora.lora_sync_path",
    f"{T}ref.model.lora.",
    f"{T}ref.megatron_config.",
    f"{T}sequence_parallel_backend",
    f"{P}sequence_parallel_size",
    f"{T}ref.sequence_parallel_size",
    f"{M}ddp_config.average_in_collective",
    f"{M}dist_ckpt_optim_fully_reshardable",
    f"{T}gradient_checkpointing_use_reentrant",
    f"{T}disable_fast_tokenizer",
    f"{E}vllm_v1_disable_multiproc",
    f"{P}use_torch_compile",
    f"{E}weight_transfer_threshold_cuda_ipc_GB",
    f"{E}async_engine",
    f"{E}override_existing_update_group",
)
"""Settings that change nothing in any run of this version, which ``config/rules/ineffective.py`` reports; sections
end with a dot. What has a row or is refused is not among them."""
