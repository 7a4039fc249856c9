"""Rules of rollouts: lengths, turns, sampling, engines, and their agreement with the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.layout import ModelDimensions
from skyrl_megatron.config.resolve import longest_sequence
from skyrl_megatron.config.roles import ADAPTERS_KEY as ADAPTERS
from skyrl_megatron.config.roles import ranks_exchange_weights
from skyrl_megatron.config.rules.passthrough import distribution_changes, engine_key_problems, masks, weights
from skyrl_megatron.config.rules.role_rules import adapter_problems
from skyrl_megatron.errors import Problem
from skyrl_megatron.plugins import ENGINES, GENERATORS, SAMPLERS, SANDBOXES, TRANSPORTS

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.generator import GeneratorConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


KEY = "generator.inference_engine.return_sampling_support"


def returns_sampling_support(generator: GeneratorConfig) -> bool:
    """Return whether engines return the tokens that training samples were drawn from, for the trainer's softmax.

    False if that is the whole vocabulary. If the key is not set: true unless something prevents it.
    """
    if not masks(generator.sampling_params):
        return False
    wanted = generator.inference_engine.return_sampling_support
    return not any(_obstacles(generator)) if wanted is None else wanted


def support_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what prevents ``return_sampling_support=true``."""
    if cfg.generator.inference_engine.return_sampling_support:
        for obstacle in _obstacles(cfg.generator):
            yield Problem(KEY, True, f"{obstacle}: change that, or set this key to false")


def _obstacles(generator: GeneratorConfig) -> Iterator[str]:
    engine, params = generator.inference_engine, generator.sampling_params
    if not engine.run_engines_locally or engine.backend != "vllm":
        yield "needs vLLM engines that this run starts (run_engines_locally=true, backend=vllm)"
    if engine.enable_registry:
        yield "needs engines that this run starts, but enable_registry=true lets other engines join"
    if engine.enable_http_endpoint:
        yield "engines then accept only requests with top_k, which clients of enable_http_endpoint=true may not send"
    if params.logprobs is None:
        yield "needs the engine's log-probs, but generator.sampling_params.logprobs=null"
    for setting in weights(params):
        yield f"generator.sampling_params.{setting} changes the probability of tokens from that of the softmax"


def unaccounted_sampling(cfg: SkyRLTrainConfig) -> Problem | None:
    """Return the problem of training samples that come from another distribution than the trainer's softmax. Where
    ``generator.unaccounted_sampling=warn``, it is a warning."""
    changed = distribution_changes(cfg.generator.sampling_params)
    if not changed or returns_sampling_support(cfg.generator) or cfg.generator.inference_engine.enable_registry:
        return None  # a rule refuses joining engines with such sampling
    others = weights(cfg.generator.sampling_params)
    name, _, value = (others or changed)[0].partition("=")
    obstacle = next(_obstacles(cfg.generator), f"{KEY}=false")
    unreturned = "" if others else f", as engines do not return what they are sampled from ({obstacle})"
    return Problem(
        f"generator.sampling_params.{name}",
        value,
        f"tokens are not sampled from the trainer's softmax(logits / temperature), and neither ratios nor trainer."
        f"algorithm.off_policy_correction account for that{unreturned}: remove it, set it in generator."
        "eval_sampling_params for evaluation alone, or accept it with generator.unaccounted_sampling=warn",
    )


def _grammar(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """vLLM applies the mask of a grammar before it takes log-probs of any kind."""
    params = cfg.generator.sampling_params
    if (params.additional_kwargs or {}).get("structured_outputs") and not returns_sampling_support(cfg.generator):
        key = "generator.sampling_params.additional_kwargs.structured_outputs"
        obstacle = next(_obstacles(cfg.generator), f"{KEY}=false")
        fix = f"log-probs need the tokens that the grammar leaves, which engines do not return: {obstacle}; remove one"
        yield Problem(key, (params.additional_kwargs or {})["structured_outputs"], fix)


_E = "generator.inference_engine."


def rollout_problems(
    cfg: SkyRLTrainConfig, hf: Mapping[str, Any], hardware: Hardware, *, training: bool = True
) -> Iterator[Problem]:
    """Yield every problem of generation. ``hf``: the policy's ``config.json``, empty if it is not available.
    ``training``: whether samples are trained on."""
    yield from GENERATORS.problems(cfg.generator.name)
    yield from SAMPLERS.problems(cfg.data.sampler)
    yield from _agent(cfg)
    yield from _turns(cfg)
    yield from _engines(cfg, model_dimensions(hf))
    yield from _routed_experts(cfg, model_dimensions(hf))
    yield from _lengths(cfg, hf)
    yield from _external(cfg)
    yield from _lora(cfg)
    yield from engine_key_problems(cfg, hardware)
    yield from support_problems(cfg)
    grammar = [*_grammar(cfg)] if training else []
    yield from grammar
    refused = training and cfg.generator.unaccounted_sampling == "error" and not grammar
    if refused and (problem := unaccounted_sampling(cfg)):
        yield problem


def _agent(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield the problems of the command that drives trajectories."""
    if cfg.generator.name != "agent":
        return
    agent = cfg.generator.agent
    if not agent.command:
        yield Problem("generator.agent.command", [], "set it to the words of the agent's command, e.g. [python3,a.py]")
    yield from SANDBOXES.problems(agent.sandbox)
    for inside, outside in agent.mounts.items():
        if not inside.startswith("/"):
            yield Problem(
                "generator.agent.mounts", inside, "write the path in the sandbox from its root on: /opt/agent"
            )
        if not Path(outside).exists():
            yield Problem(
                f"generator.agent.mounts.{inside}",
                outside,
                "no such file or folder on this machine: correct the path, or create it",
            )
    if cfg.generator.batched:
        yield Problem("generator.batched", True, "agents call one by one: set it to false")


def _turns(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    generator, prompt = cfg.generator, cfg.trainer.max_prompt_length
    context = generator.max_input_length or prompt
    if generator.max_turns == 1 and generator.name != "agent" and context != prompt:
        fix = f"the context of a single turn is the prompt: set it to trainer.max_prompt_length={prompt}, or remove it"
        yield Problem("generator.max_input_length", context, fix)
    elif context < prompt:
        yield Problem("generator.max_input_length", context, f"must be at least trainer.max_prompt_length={prompt}")
    if coef := cfg.trainer.algorithm.observation_loss_coef:
        key, cut = "trainer.algorithm.observation_loss_coef", distribution_changes(generator.sampling_params)
        if generator.max_turns == 1 and generator.name == "skyrl_gym":
            yield Problem(
                key, coef, "with generator.max_turns=1 there are no observations: allow more, or set it to 0"
            )
        if generator.name == "skyrl_gym" and generator.step_wise_trajectories and not generator.merge_stepwise_output:
            fix = (
                "with generator.step_wise_trajectories=true observations are prompts, which no row trains on: set "
                "generator.merge_stepwise_output=true or step_wise_trajectories=false, or set this key to 0"
            )
            yield Problem(key, coef, fix)
        if cut:
            fix = (
                f"needs log-probs over the whole vocabulary: remove generator.sampling_params.{cut[0]}, or set it to 0"
            )
            yield Problem(key, coef, fix)
    if generator.merge_stepwise_output:
        if not generator.step_wise_trajectories:
            fix = "needs step-wise trajectories: set generator.step_wise_trajectories=true"
            yield Problem("generator.merge_stepwise_output", True, fix)
        megatron = cfg.trainer.policy.megatron_config
        if megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "rollout":
            fix = (
                "merged turns have no recorded experts: set "
                "trainer.policy.megatron_config.moe_enable_routing_replay=false, or set this key to false"
            )
            yield Problem("generator.merge_stepwise_output", True, fix)
    if generator.batched:
        for key, conflict in (
            ("max_turns", generator.max_turns > 1),
            ("step_wise_trajectories", generator.step_wise_trajectories),
            ("chat_template_kwargs", bool(generator.chat_template_kwargs)),
        ):
            if conflict:
                fix = f"generator.{key}={getattr(generator, key)} needs an agent loop per prompt: set it to false"
                yield Problem("generator.batched", True, fix)


def _engines(cfg: SkyRLTrainConfig, dims: ModelDimensions | None) -> Iterator[Problem]:
    engine = cfg.generator.inference_engine
    yield from ENGINES.problems(engine.backend)
    yield from TRANSPORTS.problems(engine.weight_sync_backend)
    if ranks_exchange_weights(cfg) and not engine.weight_sync_routes:
        fix = "engine workers cannot open the memory of ranks on other nodes or GPUs: set it to true, or "
        yield Problem(f"{_E}weight_sync_routes", False, fix + "trainer.placement.colocate_all=false")
    spread = engine.data_parallel_size * engine.tensor_parallel_size
    if engine.expert_parallel_size > 1 and engine.expert_parallel_size != spread:
        fix = f"must be 1 or data_parallel_size · tensor_parallel_size = {spread}"
        yield Problem(f"{_E}expert_parallel_size", engine.expert_parallel_size, fix)
    if dims is not None and dims.num_attention_heads % engine.tensor_parallel_size:
        fits = math.gcd(engine.tensor_parallel_size, dims.num_attention_heads)
        fix = f"must divide the model's {dims.num_attention_heads} attention heads: set it to {fits}"
        yield Problem(f"{_E}tensor_parallel_size", engine.tensor_parallel_size, fix)
    if dims is not None and engine.pipeline_parallel_size > dims.num_layers:
        fix = f"the model has only {dims.num_layers} layers: lower it"
        yield Problem(f"{_E}pipeline_parallel_size", engine.pipeline_parallel_size, fix)
    if dims is not None and engine.expert_parallel_size > 1 and not dims.num_experts:
        fix = "the model has no experts: set it to 1"
        yield Problem(f"{_E}expert_parallel_size", engine.expert_parallel_size, fix)


def _routed_experts(cfg: SkyRLTrainConfig, dims: ModelDimensions | None) -> Iterator[Problem]:
    engine = cfg.generator.inference_engine
    if not engine.enable_return_routed_experts:
        return
    alone = engine.run_engines_locally and not engine.enable_registry and engine.backend == "vllm"
    for wrong, why in (
        (dims is not None and not dims.num_experts, "the model has no experts: set it to false"),
        (
            not alone,
            "needs vLLM engines that this run starts: run_engines_locally=true, enable_registry=false, backend=vllm",
        ),
        (not engine.enable_prefix_caching, "needs the prefix cache: set enable_prefix_caching=true"),
        (
            engine.pipeline_parallel_size > 1,
            "vLLM does not return experts with pipeline parallelism: set pipeline_parallel_size=1",
        ),
    ):
        if wrong:
            yield Problem(f"{_E}enable_return_routed_experts", True, why)


def _lengths(cfg: SkyRLTrainConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    engine = cfg.generator.inference_engine
    wanted = {"training": longest_sequence(cfg)}
    if cfg.generator.eval_sampling_params is not None:
        responses = cfg.generator.eval_sampling_params.max_generate_length
        wanted["evaluation"] = (cfg.generator.max_input_length or 0) + responses
    limit = engine.engine_init_kwargs.get("max_model_len")
    for phase, tokens in wanted.items():
        if isinstance(limit, int) and tokens > limit:
            fix = (
                f"{phase} generates sequences of up to {tokens} tokens (max_input_length + max_generate_length): "
                f"set at least {tokens}"
            )
            yield Problem(f"{_E}engine_init_kwargs.max_model_len", limit, fix)
    positions = hf.get("max_position_embeddings")
    longest = max(wanted.values())
    if isinstance(positions, int) and longest > positions and cfg.trainer.rope_scaling is None:
        fix = (
            f"sequences of up to {longest} tokens exceed the model's {positions} positions: lower it or "
            "max_generate_length, or set trainer.rope_scaling"
        )
        yield Problem("generator.max_input_length", cfg.generator.max_input_length, fix)
    if not engine.enable_chunked_prefill and engine.max_num_batched_tokens < longest:
        fix = f"with enable_chunked_prefill=false it must be at least {longest}, the length of the longest sequence"
        yield Problem(f"{_E}max_num_batched_tokens", engine.max_num_batched_tokens, fix)


def _external(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    engine = cfg.generator.inference_engine
    urls = engine.remote_urls or engine.external_server_urls or engine.external_proxy_url
    if not engine.run_engines_locally and not urls and not (engine.enable_registry and engine.registry_min_engines):
        fix = (
            f"the run has no engines: set {_E}remote_urls or external_server_urls, let engines join "
            "(enable_registry=true and registry_min_engines=1), or set this key to true"
        )
        yield Problem(f"{_E}run_engines_locally", False, fix)
    if engine.enable_registry and (changed := distribution_changes(cfg.generator.sampling_params)):
        fix = (
            f"engines that join return log-probs after {', '.join(changed)}, but the run's own engines before: "
            "remove these sampling parameters"
        )
        yield Problem(f"{_E}enable_registry", True, fix)
    if engine.enable_registry and cfg.trainer.placement.colocate_all:
        fix = "engines that join cannot share the trainer's GPUs: set trainer.placement.colocate_all=false"
        yield Problem(f"{_E}enable_registry", True, fix)
    if cfg.trainer.placement.colocate_all and (urls or not engine.run_engines_locally):
        fix = "engines that this run does not start cannot share the trainer's GPUs: set it to false"
        yield Problem("trainer.placement.colocate_all", True, fix)


def _lora(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Check how adapters are sent to the engines."""
    lora, merge = cfg.trainer.policy.model.lora, cfg.trainer.policy.megatron_config.lora_config.merge_lora
    yield from adapter_problems(cfg)
    if len(lora.adapters) > 1 and lora.sync_mode == "merged":
        fix = "several adapters cannot be merged into one set of engine weights: set lora.sync_mode=memory"
        yield Problem(ADAPTERS, ", ".join(lora.adapters), fix)
    if lora.sync_mode == "memory" and merge:
        fix = "sends only the adapter: set trainer.policy.megatron_config.lora_config.merge_lora=false"
        yield Problem("trainer.policy.model.lora.sync_mode", "memory", fix)
    elif lora.sync_mode == "merged" and not merge:
        fix = "sends merged weights: set trainer.policy.megatron_config.lora_config.merge_lora=true"
        yield Problem("trainer.policy.model.lora.sync_mode", "merged", fix)
    elif lora.rank and lora.sync_mode == "memory":
        engine = cfg.generator.inference_engine
        if not engine.run_engines_locally or engine.enable_registry or engine.backend != "vllm":
            fix = (
                "only vLLM engines that this run starts can receive adapters alone: set it to merged, and set "
                "trainer.policy.megatron_config.lora_config.merge_lora=true"
            )
            yield Problem("trainer.policy.model.lora.sync_mode", "memory", fix)
        least = 2 * max(len(lora.adapters), 1)
        slots = engine.engine_init_kwargs.get("max_loras", least)
        if not isinstance(slots, int) or slots < least:
            several = f" of each of {len(lora.adapters)} adapters" if len(lora.adapters) > 1 else ""
            fix = f"an engine holds the current and the next version{several}: set at least {least}"
            yield Problem(f"{_E}engine_init_kwargs.max_loras", slots, fix)
