"""Validation: each rule with its key, all problems at once, and what only warns."""

import json

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import model_dimensions, read_hf_config
from skyrl_megatron.config.layout import ParallelConfig
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import AlgorithmError, ConfigError, Problem, SkyRLMegatronWarning
from tests.bridges.tiny_models import tiny_config

GPUS = Hardware(8, 1)
E = "generator.inference_engine."
A = "trainer.algorithm."
M = "trainer.policy.megatron_config."
K = M + "transformer_config_kwargs."
O = M + "optimizer_config_kwargs."  # noqa: E741
AWARE = O + "use_precision_aware_optimizer=true"
LORA = "trainer.policy.model.lora."

ADAPTERS = "trainer.policy.model.lora.adapters"
RANK = "trainer.policy.model.lora.rank=8"

CP2 = [f"{M}context_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=2", f"{E}num_engines=2"]


EP2 = [f"{M}expert_model_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=2", f"{E}num_engines=2"]
MOVES = f"{M}moe_expert_moves=auto"
OVERLAP, FLEX = f"{K}overlap_moe_expert_parallel_comm=true", f"{M}moe_token_dispatcher_type=flex"
GPUS_2 = "trainer.placement.policy_num_gpus_per_node=2"
NODES_OF_6 = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=6"]
NODES_OF_6 += ["generator.n_samples_per_prompt=6"]
BIG_ENGINE = ["trainer.placement.colocate_all=false", f"{E}tensor_parallel_size=16"]
"""One that takes two nodes."""


def problems(*args, hardware=GPUS):
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args])
    return find_problems(cfg, hardware)


def test_the_default_is_valid_on_gpus_and_on_cpu():
    assert problems() == [] and problems(hardware=Hardware(0)) == []


# Arguments → key of the one problem, words of its fix.
RULES = {
    # batch sizes
    "mini > train": (["trainer.train_batch_size=128"], "trainer.policy_mini_batch_size", "at most"),
    "mini does not divide": (["trainer.policy_mini_batch_size=96"], "trainer.policy_mini_batch_size", "divide"),
    "mini·n against dp": (
        ["trainer.placement.policy_num_gpus_per_node=3", f"{E}num_engines=3", "generator.n_samples_per_prompt=1"],
        "trainer.policy_mini_batch_size",
        "multiple of the policy's dp=3",
    ),
    "micro does not divide": (
        ["trainer.micro_train_batch_size_per_gpu=7"],
        "trainer.micro_train_batch_size_per_gpu",
        "1280 sequences",
    ),
    "train·n below dp": (
        [
            "trainer.train_batch_size=1",
            "trainer.policy_mini_batch_size=1",
            "generator.n_samples_per_prompt=2",
            "trainer.placement.colocate_policy_ref=false",
            "trainer.placement.colocate_all=false",
            "trainer.placement.ref_num_gpus_per_node=4",
        ],
        "trainer.train_batch_size",
        "at least 4",
    ),
    "token budget below a sequence": (
        ["trainer.max_tokens_per_microbatch=1535"],
        "trainer.max_tokens_per_microbatch",
        "1536 tokens",
    ),
    # algorithm
    "unknown estimator": ([f"{A}advantage_estimator=grop"], f"{A}advantage_estimator", "choose one of grpo"),
    "unknown loss": ([f"{A}policy_loss_type=ppo"], f"{A}policy_loss_type", "choose one of regular"),
    "gae without critic": ([f"{A}advantage_estimator=gae"], "trainer.critic.model.path", "needs a critic"),
    "KL twice": ([f"{A}use_kl_in_reward=true"], f"{A}use_kl_in_reward", "would count the KL term twice"),
    "step-wise gae": (
        [
            f"{A}advantage_estimator=reinforce++",
            "generator.step_wise_trajectories=true",
        ],
        f"{A}advantage_estimator",
        "step_wise_trajectories",
    ),
    "observations of step-wise rows": (
        [
            f"{A}observation_loss_coef=0.1",
            "generator.max_turns=2",
            "generator.step_wise_trajectories=true",
        ],
        f"{A}observation_loss_coef",
        "observations are prompts",
    ),
    "dynamic sampling of one": (
        ["generator.n_samples_per_prompt=1", f"{A}dynamic_sampling.type=filter"],
        f"{A}dynamic_sampling.type",
        "zero variance",
    ),
    "greedy training": (
        ["generator.sampling_params.temperature=0"],
        "generator.sampling_params.temperature",
        "above 0",
    ),
    "tis without cap": ([f"{A}use_tis=true"], f"{A}use_tis", "above 0"),
    "correction with clip_cov": (
        [f"{A}policy_loss_type=clip_cov", f"{A}off_policy_correction.tis_ratio_type=token"],
        f"{A}policy_loss_type",
        "no off-policy correction",
    ),
    "two corrections": (
        [f"{A}policy_loss_type=cispo", f"{A}cispo.anchor=rollout", f"{A}off_policy_correction.tis_ratio_type=token"],
        f"{A}off_policy_correction.tis_ratio_type",
        "already",
    ),
    "two corrections of a clipped loss": (
        [f"{A}ratio_anchor=rollout", f"{A}off_policy_correction.tis_ratio_type=token"],
        f"{A}off_policy_correction.tis_ratio_type",
        "ratio_anchor=rollout already",
    ),
    "loss without rollout log-probs": (
        [f"{A}policy_loss_type=dppo", "generator.sampling_params.logprobs=null"],
        "generator.sampling_params.logprobs",
        "dppo",
    ),
    "limits upside down": (
        [f"{A}off_policy_correction.geo_mask_low=2"],
        f"{A}off_policy_correction.geo_mask_low",
        "below geo_mask_high",
    ),
    "covariance upside down": ([f"{A}clip_cov.clip_cov_lb=9"], f"{A}clip_cov.clip_cov_lb", "clip_cov_ub"),
    # optimizer and checkpoints
    "one beta": (
        ["trainer.policy.optimizer_config.adam_betas=[0.9]"],
        "trainer.policy.optimizer_config.adam_betas",
        "two numbers",
    ),
    "min_lr above lr": (["trainer.policy.optimizer_config.min_lr=1"], "trainer.policy.optimizer_config.min_lr", "lr="),
    "decay inside warm-up": (
        ["trainer.policy.optimizer_config.num_decay_steps=3", "trainer.policy.optimizer_config.num_warmup_steps=3"],
        "trainer.policy.optimizer_config.num_decay_steps",
        "exceed",
    ),
    "resume without path": (["trainer.resume_mode=from_path"], "trainer.resume_path", "needs"),
    "path without resume": (["trainer.resume_path=/x"], "trainer.resume_path", "from_path"),
    "run name leaves the folder": (["trainer.run_name=../x"], "trainer.run_name", "folder"),
    # generation
    "single turn from elsewhere": (["generator.max_input_length=600"], "generator.max_input_length", "single turn"),
    "context below prompt": (
        ["generator.max_turns=2", "generator.max_input_length=100"],
        "generator.max_input_length",
        "at least",
    ),
    "batched turns": (["generator.batched=true", "generator.max_turns=2"], "generator.batched", "max_turns=2"),
    "batched template": (
        ["generator.batched=true", "generator.chat_template_kwargs.a=1"],
        "generator.batched",
        "chat_template_kwargs",
    ),
    "merging without steps": (
        ["generator.merge_stepwise_output=true"],
        "generator.merge_stepwise_output",
        "step_wise_trajectories=true",
    ),
    "merging with replay": (
        [
            "generator.merge_stepwise_output=true",
            "generator.step_wise_trajectories=true",
            f"{M}moe_enable_routing_replay=true",
            f"{E}enable_return_routed_experts=true",
        ],
        "generator.merge_stepwise_output",
        "no recorded experts",
    ),
    "engine ep": (
        [f"{E}tensor_parallel_size=2", f"{E}expert_parallel_size=4", "trainer.placement.policy_num_gpus_per_node=2"],
        f"{E}expert_parallel_size",
        "= 2",
    ),
    "engine across nodes": (
        [
            f"{E}tensor_parallel_size=2",
            "trainer.placement.policy_num_nodes=2",
            f"{E}distributed_executor_backend=mp",
        ],
        f"{E}tensor_parallel_size",
        "divide policy_num_gpus_per_node=1, or be a multiple",
    ),
    "engine too short": (
        [f"{E}engine_init_kwargs.max_model_len=1000", "generator.eval_sampling_params.max_generate_length=1"],
        f"{E}engine_init_kwargs.max_model_len",
        "1536 tokens",
    ),
    "no chunked prefill": (
        [f"{E}enable_chunked_prefill=false", f"{E}max_num_batched_tokens=1000", f"{E}max_num_seqs=256"],
        f"{E}max_num_batched_tokens",
        "1536",
    ),
    "no engine anywhere": (
        [f"{E}run_engines_locally=false", "trainer.placement.colocate_all=false"],
        f"{E}run_engines_locally",
        "remote_urls",
    ),
    "nobody has to join": (
        [f"{E}run_engines_locally=false", "trainer.placement.colocate_all=false", f"{E}enable_registry=true"],
        f"{E}run_engines_locally",
        "registry_min_engines=1",
    ),
    "joining and colocated": ([f"{E}enable_registry=true"], f"{E}enable_registry", "colocate_all=false"),
    "joining and truncated sampling": (
        [
            f"{E}enable_registry=true",
            "trainer.placement.colocate_all=false",
            "generator.sampling_params.top_p=0.9",
        ],
        f"{E}enable_registry",
        "log-probs after top_p=0.9",
    ),
    "joining and adapters alone": (
        [
            "trainer.policy.model.lora.rank=8",
            "trainer.policy.model.lora.sync_mode=memory",
            "trainer.placement.colocate_all=false",
            f"{E}enable_registry=true",
        ],
        "trainer.policy.model.lora.sync_mode",
        "vLLM engines that this run starts",
    ),
    "external and colocated": (
        [f"{E}external_server_urls=['http://a:1']"],
        "trainer.placement.colocate_all",
        "does not start",
    ),
    "adapter alone to engines elsewhere": (
        [
            "trainer.policy.model.lora.rank=8",
            "trainer.policy.model.lora.sync_mode=memory",
            "trainer.placement.colocate_all=false",
            f"{E}run_engines_locally=false",
            f"{E}external_server_urls=['http://a:1']",
        ],
        "trainer.policy.model.lora.sync_mode",
        "vLLM engines that this run starts",
    ),
    "one slot for adapters": (
        [
            "trainer.policy.model.lora.rank=8",
            "trainer.policy.model.lora.sync_mode=memory",
            f"{E}engine_init_kwargs.max_loras=1",
        ],
        f"{E}engine_init_kwargs.max_loras",
        "at least 2",
    ),
    "adapter alone and merged": (
        [f"{LORA}rank=4", f"{LORA}sync_mode=memory", f"{M}lora_config.merge_lora=true"],
        f"{LORA}sync_mode",
        "merge_lora=false",
    ),
    "adapters merged into one engine": (
        [RANK, f"{ADAPTERS}={{math,code}}"],
        ADAPTERS,
        "cannot be merged into one set of engine weights",
    ),
    "too few slots for several adapters": (
        [RANK, f"{ADAPTERS}={{math,code}}", f"{LORA}sync_mode=memory", f"{E}engine_init_kwargs.max_loras=3"],
        f"{E}engine_init_kwargs.max_loras",
        "of each of 2 adapters: set at least 4",
    ),
    "an adapter's unknown setting": (
        [RANK, f"{ADAPTERS}={{math: {{learning_rate: 1}}}}"],
        f"{ADAPTERS}.math.learning_rate",
        "policy.optimizer_config",
    ),
    "an adapter's way to the engines": (
        [RANK, f"{ADAPTERS}={{math: {{sync_mode: merged}}}}"],
        f"{ADAPTERS}.math.sync_mode",
        "settings of policy.model.lora",
    ),
    "an adapter's impossible setting": (
        [RANK, f"{ADAPTERS}={{math: {{lr: -1}}}}"],
        f"{ADAPTERS}.math.lr",
        "at least 0",
    ),
    "an adapter without a rank": ([RANK, f"{ADAPTERS}={{math: {{rank: 0}}}}"], f"{ADAPTERS}.math.rank", "at least"),
    "an adapter's name": ([RANK, f"{ADAPTERS}={{a/b: {{}}}}"], ADAPTERS, "letters, digits"),
    # layout and devices
    "world not divisible": (
        [f"{M}tensor_model_parallel_size=2"],
        f"{M}tensor_model_parallel_size",
        "must divide the 1 ranks",
    ),
    "experts not divisible": (
        [f"{M}expert_model_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=4", f"{E}num_engines=4"],
        f"{M}expert_model_parallel_size",
        "must divide the 4 ranks",
    ),
    "cp without packing": (
        [
            f"{M}context_parallel_size=2",
            "trainer.placement.policy_num_gpus_per_node=2",
            f"{E}num_engines=2",
            "trainer.use_sample_packing=false",
        ],
        f"{M}context_parallel_size",
        "use_sample_packing",
    ),
    "replay without routes": (
        [f"{M}moe_enable_routing_replay=true"],
        f"{M}moe_enable_routing_replay",
        "enable_return_routed_experts",
    ),
    "the policy's routes for its reference": (
        [
            f"{M}moe_enable_routing_replay=true",
            f"{E}enable_return_routed_experts=true",
            "trainer.ref.megatron_config.moe_enable_routing_replay=true",
            "trainer.ref.megatron_config.moe_routing_replay_source=trainer",
        ],
        "trainer.ref.megatron_config.moe_routing_replay_source",
        "before the policy has chosen experts",
    ),
    "replay of a critic": (
        [
            "trainer.critic.megatron_config.moe_enable_routing_replay=true",
            f"{E}enable_return_routed_experts=true",
            "trainer.critic.model.path=some/model",
            f"{A}advantage_estimator=gae",
        ],
        "trainer.critic.megatron_config.moe_enable_routing_replay",
        "only the policy and the reference",
    ),
    "routes without prefix caching": (
        [f"{E}enable_return_routed_experts=true", f"{E}enable_prefix_caching=false"],
        f"{E}enable_return_routed_experts",
        "enable_prefix_caching=true",
    ),
    "routes of engines elsewhere": (
        [
            f"{E}enable_return_routed_experts=true",
            f"{E}run_engines_locally=false",
            f"{E}remote_urls=['a:1']",
            "trainer.placement.colocate_all=false",
        ],
        f"{E}enable_return_routed_experts",
        "run_engines_locally",
    ),
    "replay with fused router": (
        [f"{M}moe_enable_routing_replay=true", f"{E}enable_return_routed_experts=true", f"{K}moe_router_fusion=true"],
        f"{K}moe_router_fusion",
        "cannot replay",
    ),
    "aux loss off": ([f"{M}moe_aux_loss_coeff=0.1"], f"{M}moe_aux_loss_coeff", "aux_loss"),
    "gather without reduce": (
        [f"{M}ddp_config.overlap_param_gather=true"],
        f"{M}ddp_config.overlap_param_gather",
        "overlap_grad_reduce=true",
    ),
    "fp8 parameters": ([f"{K}fp8_param=true"], f"{K}fp8_param", "remove this key"),
    "fp8 products": ([f"{K}fp8=hybrid"], f"{K}fp8", "bf16"),
    "overlapped tensor parallelism": ([f"{K}tp_comm_overlap=true"], f"{K}tp_comm_overlap", "remove this key"),
    "overlapped experts on one rank": ([OVERLAP], OVERLAP[:-5], "set trainer.policy.megatron_config.expert_model"),
    "overlapped stages": (
        [
            f"{M}expert_model_parallel_size=2",
            OVERLAP,
            f"{M}pipeline_model_parallel_size=2",
            "trainer.placement.policy_num_gpus_per_node=4",
            f"{E}num_engines=4",
        ],
        OVERLAP[:-5],
        "virtual_pipeline_model_parallel_size",
    ),
    "overlapped in fp32": ([*EP2, OVERLAP, "trainer.bf16=false"], OVERLAP[:-5], "trainer.bf16=true"),
    "overlapped and recomputed": (
        [*EP2, OVERLAP, f"{K}recompute_granularity=full"],
        OVERLAP[:-5],
        "recompute_granularity=auto",
    ),
    "overlapped and replayed": (
        [*EP2, OVERLAP, f"{M}moe_enable_routing_replay=true", f"{E}enable_return_routed_experts=true"],
        OVERLAP[:-5],
        "moe_enable_routing_replay=false",
    ),
    "overlapped and balanced by sequence": (
        [*EP2, OVERLAP, f"{M}moe_router_load_balancing_type=seq_aux_loss", f"{M}moe_aux_loss_coeff=0.1"],
        OVERLAP[:-5],
        "moe_router_load_balancing_type=aux_loss",
    ),
    "overlapped adapters": ([*EP2, OVERLAP, "trainer.policy.model.lora.rank=8"], OVERLAP[:-5], "lora.rank=0"),
    "moves on one rank": ([MOVES], MOVES[:-5], "set trainer.policy.megatron_config.expert_model"),
    "moves of state on the host": (
        [*EP2, MOVES, f"{M}optimizer_config_kwargs.optimizer_cpu_offload=true"],
        MOVES[:-5],
        "remove optimizer_config_kwargs.optimizer_cpu_offload",
    ),
    "moves and overlap": ([*EP2, MOVES, OVERLAP], MOVES[:-5], "overlap_moe_expert_parallel_comm"),
    "delayed gradients": ([f"{K}delay_wgrad_compute=true"], f"{K}delay_wgrad_compute", "remove this key"),
    "hierarchical cp": (
        [f"{K}hierarchical_context_parallel_sizes=[2,2]"],
        f"{K}hierarchical_context_parallel_sizes",
        "set context_parallel_size",
    ),
    "multi-token prediction": ([f"{K}mtp_num_layers=1"], f"{K}mtp_num_layers", "set mtp.train=true"),
    "a draft head and adapters": (
        [f"{M}mtp.train=true", "trainer.policy.model.lora.rank=8"],
        f"{M}mtp.train",
        "trains only adapters",
    ),
    "a draft head and replayed routes": (
        [f"{M}mtp.train=true", f"{M}moe_enable_routing_replay=true", f"{E}enable_return_routed_experts=true"],
        f"{M}mtp.train",
        "do not record the experts",
    ),
    "one down projection": ([f"{K}mla_down_proj_fusion=true"], f"{K}mla_down_proj_fusion", "remove this key"),
    "latents of an inference": ([f"{K}cache_mla_latents=true"], f"{K}cache_mla_latents", "vLLM runs inference here"),
    "clipped queries of AdamW": ([f"{K}qk_clip=true"], f"{K}qk_clip", "optimizer=muon"),
    "graphs of training": ([f"{K}cuda_graph_impl=local"], f"{K}cuda_graph_impl", "vary in length"),
    "narrow moments of the usual Adam": ([f"{O}exp_avg_dtype=bf16"], f"{O}exp_avg_dtype", f"{AWARE[len(O) :]}"),
    "narrow moments on the host": (
        [AWARE, f"{O}optimizer_cpu_offload=true", f"{O}exp_avg_sq_dtype=bf16"],
        f"{O}exp_avg_sq_dtype",
        "remove one of the two keys",
    ),
    "bf16 masters": ([AWARE, f"{O}main_params_dtype=bf16"], f"{O}main_params_dtype", "use fp16"),
    "types of gradients": ([AWARE, f"{O}main_grads_dtype=bf16"], f"{O}main_grads_dtype", "grad_reduce_in_fp32"),
    "no such type": ([f"{O}exp_avg_dtype=fp7"], f"{O}exp_avg_dtype", "use one of fp32, bf16"),
    "precision-aware and whole": (
        [AWARE, f"{O}use_distributed_optimizer=false"],
        f"{O}use_precision_aware_optimizer",
        "use_distributed_optimizer=true",
    ),
    "fp32 weights on the host": (
        ["trainer.bf16=false", f"{O}optimizer_cpu_offload=true"],
        f"{O}optimizer_cpu_offload",
        "trainer.bf16=true",
    ),
    "allgather": ([f"{M}moe_token_dispatcher_type=allgather"], f"{M}moe_token_dispatcher_type", "use alltoall"),
    "flex without DeepEP": ([*EP2, FLEX], f"{M}moe_token_dispatcher_type", "use alltoall"),
    "another dispatcher": (
        [*EP2, FLEX, f"{K}moe_flex_dispatcher_backend=ncclep"],
        f"{K}moe_flex_dispatcher_backend",
        "deepep or hybridep",
    ),
    "no such attention": ([f"{K}attention_backend=local"], f"{K}attention_backend", "auto, flash"),
    "flash without flash-attn": ([f"{K}attention_backend=flash"], f"{K}attention_backend", "use auto"),
    "unfused over cp": ([*CP2, f"{K}attention_backend=unfused"], f"{K}attention_backend", "use auto"),
    "no flash_attn over cp": ([*CP2, "trainer.flash_attn=false"], "trainer.flash_attn", "trainer.flash_attn=true"),
    "profiled rank": ([f"{M}torch_profiler_config.ranks=[1]"], f"{M}torch_profiler_config.ranks", "0 to 0"),
    "recompute of both kinds": (
        [f"{K}recompute_granularity=selective", f"{K}recompute_method=block"],
        f"{K}recompute_method",
        "recompute_granularity=full",
    ),
    "recompute half set": (
        [f"{K}recompute_granularity=full", f"{K}recompute_num_layers=null"],
        f"{K}recompute_num_layers",
        "full needs recompute_method",
    ),
    "recompute chosen twice": ([f"{K}recompute_num_layers=2"], f"{K}recompute_num_layers", "granularity=full"),
    "unknown recompute": (
        [f"{M}transformer_config_kwargs={{recompute_granularity: some}}"],
        f"{K}recompute_granularity",
        "selective",
    ),
    "adapters without a rank": (
        [f"{LORA}alpha=32", f"{LORA}target_modules=linear_qkv"],
        f"{LORA}rank",
        "alpha=32, target_modules=linear_qkv are set: set a rank, such as 16, or remove those keys",
    ),
    "type of adapters without a rank": (
        [f"{M}lora_config.lora_type=canonical_lora"],
        f"{LORA}rank",
        "lora_config.lora_type=canonical_lora is set: set a rank, such as 16, or remove that key",
    ),
    "adapter on the reference": (["trainer.ref.model.lora.rank=2"], "trainer.ref.model.lora.rank", "never trained"),
    "FSDP option": (
        ["trainer.policy.fsdp_config.cpu_offload=true"],
        "trainer.policy.fsdp_config.cpu_offload",
        "optimizer_cpu_offload",
    ),
    "FSDP mix": (
        ["trainer.ref.fsdp_config.mixed_precision.param_dtype=fp16"],
        "trainer.ref.fsdp_config.mixed_precision",
        "trainer.bf16",
    ),
    "engines against policy": ([f"{E}num_engines=2"], f"{E}num_engines", "set it to 1, or remove this key"),
    "reference elsewhere": (
        ["trainer.placement.ref_num_gpus_per_node=2"],
        "trainer.placement.ref_num_gpus_per_node",
        "policy_num_gpus_per_node=1",
    ),
    "more GPUs than a node has": (
        ["trainer.placement.ref_num_gpus_per_node=9", "trainer.placement.colocate_policy_ref=false"],
        "trainer.placement.ref_num_gpus_per_node",
        "",
    ),
    "more GPUs than there are": (
        ["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=8"],
        "trainer.placement.policy_num_gpus_per_node",
        "8 (policy) + 1 (engines) = 9 GPUs, but there are 8",
    ),
    "no model": (["trainer.policy.model.path=/no/such"], "trainer.policy.model.path", "no such folder: /no/such"),
}


OVER_NODES = pytest.mark.filterwarnings("ignore:trainer.placement.colocate_all=true with policy_num_nodes")
"""Weights of models that share GPUs on several nodes travel slowly, of which a warning tells."""


@OVER_NODES
@pytest.mark.filterwarnings("ignore:settings without effect")
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    args, key, words = RULES[rule]
    found = problems(*args)
    assert [p for p in found if p.key == key and words in p.fix], found
    assert len(found) == 1 or rule in SEVERAL, found


SEVERAL = {"more GPUs than a node has", "no model"}
"""Rules whose breach breaks another one as well."""


@OVER_NODES
@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ([*BIG_ENGINE, f"{E}distributed_executor_backend=mp"], "distributed_executor_backend", "set it to ray"),
        ([*BIG_ENGINE, f"{E}data_parallel_size=2"], "data_parallel_size", "increase num_engines"),
        (
            [GPUS_2, f"{E}tensor_parallel_size=2", f"{E}distributed_executor_backend=uni"],
            "distributed_executor_backend",
            "tp · pp · dp = 2 ranks: set it to mp",
        ),
        (
            [*NODES_OF_6, f"{E}num_engines=3", f"{E}tensor_parallel_size=4"],
            "tensor_parallel_size",
            "divide policy_num_gpus_per_node=6, or be a multiple",
        ),
        (
            ["trainer.placement.policy_num_nodes=2", f"{E}num_engines=2", f"{E}weight_sync_routes=false"],
            "weight_sync_routes",
            "set it to true, or trainer.placement.colocate_all=false",
        ),
    ],
)
def test_engines_and_nodes(args, key, words):
    (problem,) = problems(*args, hardware=Hardware(8, 8))
    assert problem.key == f"{E}{key}" and words in problem.fix


@OVER_NODES
def test_an_engine_over_nodes_is_started_by_ray():
    assert problems(*BIG_ENGINE, hardware=Hardware(8, 8)) == []
    assert problems(*NODES_OF_6, f"{E}tensor_parallel_size=12", hardware=Hardware(8, 2)) == []


def test_selective_recompute_needs_nothing_undone():
    selective = f"{K}recompute_granularity=selective"
    kwargs = SkyRLTrainConfig.from_cli_overrides([selective]).trainer.policy.megatron_config.transformer_config_kwargs
    assert kwargs["recompute_method"] is None and kwargs["recompute_modules"] == ["core_attn"]
    assert problems(selective) == []
    assert problems(f"{M}transformer_config_kwargs={{recompute_granularity: selective}}") == []


def test_exchanges_of_experts_that_can_run():
    """With packages that this machine cannot know of, on other machines."""
    assert problems(*EP2, OVERLAP) == problems(*EP2, OVERLAP, f"{K}recompute_granularity=selective") == []
    assert problems(*EP2, MOVES) == problems(*EP2, f"{M}moe_expert_moves=none") == []
    assert problems(*EP2, MOVES, "trainer.policy.model.lora.rank=8") == []
    elsewhere = Hardware(8, 2, elsewhere=True)
    (problem,) = problems(*EP2, FLEX, MOVES, hardware=elsewhere)
    assert problem.key == MOVES[:-5] and "alltoall" in problem.fix
    hybrid = f"{K}moe_flex_dispatcher_backend=hybridep"
    assert problems(*EP2, FLEX, hardware=elsewhere) == problems(*EP2, FLEX, hybrid, hardware=elsewhere) == []
    (problem,) = problems(FLEX, hardware=elsewhere)
    assert "expert_model_parallel_size above 1" in problem.fix
    (problem,) = problems(*EP2, FLEX, f"{M}moe_router_dtype=fp64", hardware=elsewhere)
    assert problem.key == f"{M}moe_router_dtype"
    six = [f"{M}expert_model_parallel_size=6", "trainer.placement.policy_num_gpus_per_node=6", f"{E}num_engines=6"]
    six += ["generator.n_samples_per_prompt=6", FLEX]
    (problem,) = problems(*six, hardware=elsewhere)
    assert "no settings for 6 ranks" in problem.fix


def test_weights_in_8_bits_do_not_move(tmp_path):
    hf = tiny_config("qwen3_moe") | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    args = [*EP2, MOVES, "trainer.policy.model.lora.rank=8", f"trainer.policy.model.path={tmp_path}"]
    assert ["8 bits" in problem.fix for problem in problems(*args) if problem.key == MOVES[:-5]] == [True]


def test_options_of_gpus_are_refused_on_cpu():
    args = [f"{M}ddp_config.overlap_grad_reduce=true", f"{M}moe_token_dispatcher_type=flex"]
    found = problems(*args, hardware=Hardware(0))
    assert [p.key.rpartition(".")[2] for p in found] == ["moe_token_dispatcher_type", "overlap_grad_reduce"]
    assert all("GPU" in p.fix for p in found)


@pytest.mark.parametrize("degree", ["data", "expert"])
def test_layouts_that_engines_on_cpu_die_of_are_refused_there(degree):
    args = [f"{E}{degree}_parallel_size=2"] + [f"{E}tensor_parallel_size=2"] * (degree == "expert")
    args += ["trainer.placement.colocate_all=false"]
    (problem,) = problems(*args, hardware=Hardware(0))
    assert problem.key == f"{E}{degree}_parallel_size" and "first request" in problem.fix


# What the reference forbids and this trainer does not.
VALID = {
    "critic and gae": [f"{A}advantage_estimator=gae", "trainer.critic.model.path=some/model"],
    "replay with vpp": [
        f"{M}moe_enable_routing_replay=true",
        f"{E}enable_return_routed_experts=true",
        f"{M}pipeline_model_parallel_size=2",
        f"{M}virtual_pipeline_model_parallel_size=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        f"{E}num_engines=2",
        f"{E}distributed_executor_backend=ray",
    ],
    "engines by URL": [
        f"{E}remote_urls=['h:1']",
        f"{E}run_engines_locally=false",
        "trainer.placement.colocate_all=false",
    ],
    "engines that join": [
        f"{E}enable_registry=true",
        f"{E}registry_min_engines=2",
        f"{E}run_engines_locally=false",
        "trainer.placement.colocate_all=false",
    ],
    "endpoint": [f"{E}enable_http_endpoint=true"],
    "adapter": ["trainer.policy.model.lora.rank=8"],
    "neither KL": [f"{A}use_kl_loss=false"],
    "token budget instead of micro-batches": [
        "trainer.max_tokens_per_microbatch=4096",
        "trainer.micro_train_batch_size_per_gpu=7",
    ],
}


@pytest.mark.filterwarnings("ignore:settings without effect")
@pytest.mark.parametrize("case", VALID)
def test_stays_valid(case):
    assert problems(*VALID[case]) == []


def test_registered_names_are_known():
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    name = "loss_of_this_test"
    PolicyLossRegistry.register(name, lambda *args, **kwargs: None)
    try:
        assert problems(f"{A}policy_loss_type={name}") == []
    finally:
        PolicyLossRegistry.unregister(name)
    assert [p.value for p in problems(f"{A}policy_loss_type={name}")] == [name]


def test_a_plugin_adds_rules(monkeypatch):
    from skyrl_megatron.config import validate
    from skyrl_megatron.plugins import Additions

    rules = Additions()
    monkeypatch.setattr(validate, "RULES", rules)

    @rules.register
    def odd_seeds(cfg, models):
        if cfg.trainer.seed % 2 == 0:
            yield Problem("trainer.seed", cfg.trainer.seed, "this loss wants an odd one: add 1")
        yield "seeds are a matter of taste"

    with pytest.warns(SkyRLMegatronWarning, match="matter of taste"):
        found = problems("trainer.seed=2")
    assert [p.fix for p in found] == ["this loss wants an odd one: add 1"]
    with pytest.warns(SkyRLMegatronWarning, match="matter of taste"):
        assert problems("trainer.seed=3") == []


@pytest.mark.parametrize("lacking", ["a name", "a function"])
def test_a_built_in_loss_without_a_name_or_a_function_cannot_be_imported(lacking):
    from skyrl_megatron.algorithms import losses
    from skyrl_megatron.config.table import LOSSES

    functions = dict(losses.BUILT_IN)
    if lacking == "a name":
        functions["nameless"] = functions["regular"]
    else:
        del functions["cispo"]
    with pytest.raises(AlgorithmError, match=r"policy loss: (nameless|cispo): .*config/table\.py"):
        losses.PolicyLossRegistry.add_builtins(LOSSES.rows, functions)
    assert sorted(losses.PolicyLossRegistry.list_available()) == sorted(losses.PolicyLossType)


def test_the_command_line_knows_every_built_in_name():
    from skyrl_megatron.config.schema.algorithm import AdvantageEstimator, PolicyLossType

    for name in PolicyLossType:
        assert not [p for p in problems(f"{A}policy_loss_type={name}") if "not registered" in p.fix]
    for name in AdvantageEstimator:
        assert not [p for p in problems(f"{A}advantage_estimator={name}") if "not registered" in p.fix]


# --- the model's config.json ---------------------------------------------------------------------------------------

MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "intermediate_size": 100,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ([f"{M}tensor_model_parallel_size=2"], f"{M}tensor_model_parallel_size", "3 KV groups"),
        ([f"{M}pipeline_model_parallel_size=4"], f"{M}pipeline_model_parallel_size", "6 layers"),
        ([f"{M}expert_tensor_parallel_size=3"], f"{M}expert_tensor_parallel_size", "32 rows"),
        ([f"{E}tensor_parallel_size=4", f"{E}num_engines=3"], f"{E}tensor_parallel_size", "6 attention heads"),
        (["generator.sampling_params.max_generate_length=2000"], "generator.max_input_length", "2048 positions"),
    ],
)
def test_rules_that_need_the_model(model, args, key, words):
    base = [
        f"trainer.policy.model.path={model}",
        "trainer.placement.policy_num_gpus_per_node=12",
    ]
    if not any(arg.startswith(f"{E}num_engines") for arg in args):
        base.append(f"{E}num_engines=12")
    found = problems(*base, *args, hardware=Hardware(16))
    assert [p for p in found if p.key == key and words in p.fix], found


@pytest.mark.parametrize(
    ("family", "degree", "words"),
    [
        ("mimo_v2_flash", "tensor_model_parallel_size=4", "2 KV groups"),  # of layers without a window
        ("glm_moe_dsa", "tensor_model_parallel_size=4", "6 attention heads"),
        ("deepseek_v32", "tensor_model_parallel_size=4", "6 attention heads"),
        ("qwen3_next", "context_parallel_size=3", "key heads"),
        *((each, "expert_model_parallel_size=3", "8 experts") for each in ("mimo_v2_flash", "glm_moe_dsa")),
        *((each, "pipeline_model_parallel_size=2", "3 layers") for each in ("mimo_v2_flash", "glm_moe_dsa")),
        *((each, "context_parallel_size=2", None) for each in ("mimo_v2_flash", "glm_moe_dsa", "deepseek_v32")),
        *((each, "tensor_model_parallel_size=2", None) for each in ("mimo_v2_flash", "glm_moe_dsa", "deepseek_v32")),
    ],
)
def test_layouts_of_families_whose_layers_differ(tmp_path, family, degree, words):
    """Those that are verified are not in the way; of others the size that is not shared out is named."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family)))
    base = ["trainer.placement.policy_num_gpus_per_node=12", f"{E}num_engines=12"]
    found = problems(f"trainer.policy.model.path={tmp_path}", *base, M + degree, hardware=Hardware(16))
    found = [p for p in found if p.key == M + degree.partition("=")[0]]
    assert not found if words is None else any(words in p.fix for p in found), found


LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    "hf, words",
    [
        (LATENT, "supports only YaRN"),
        (LATENT | YARN, None),
        ({"rope_parameters": {"rope_type": "yarn"}}, "mscale"),
        ({}, None),
    ],
    ids=["latent", "latent with YaRN", "YaRN", "plain"],
)
def test_fused_rotary_kernels_that_rotate_otherwise(hf, words):
    from skyrl_megatron.config.rules.megatron_rules import megatron_problems

    cfg = SkyRLTrainConfig.from_cli_overrides([f"{K}apply_rope_fusion=true"])
    found = list(megatron_problems(cfg, "policy", M, GPUS, hf))
    assert [problem.key for problem in found] == [f"{K}apply_rope_fusion"] * (words is not None)
    assert words is None or (words in found[0].fix and found[0].fix.endswith("remove this key"))


@pytest.mark.parametrize(
    ("args", "hf", "words"),
    [
        ([f"{K}dsa_indexer_use_sparse_loss=true"], {"index_topk": 2048}, None),
        ([], {"index_topk": 2048}, "dsa_indexer_use_sparse_loss=true"),
        ([f"{K}dsa_indexer_use_sparse_loss=true"], MOE, "the model has no indexer"),
    ],
    ids=["sparse", "dense", "no indexer"],
)
def test_the_loss_of_an_indexer(args, hf, words):
    from skyrl_megatron.config.rules.megatron_rules import megatron_problems

    cfg = SkyRLTrainConfig.from_cli_overrides([f"{K}dsa_indexer_loss_coeff=0.1", *args])
    found = list(megatron_problems(cfg, "policy", M, GPUS, hf))
    assert [problem.key for problem in found] == [f"{K}dsa_indexer_loss_coeff"] * (words is not None)
    assert words is None or words in found[0].fix


def test_experts_with_biases_cannot_be_cut(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"model_type": "gpt_oss"}))
    args = ["trainer.placement.policy_num_gpus_per_node=2", f"{E}num_engines=2", f"{M}expert_tensor_parallel_size=2"]
    (problem,) = problems(f"trainer.policy.model.path={tmp_path}", *args)
    assert problem.key == f"{M}expert_tensor_parallel_size" and "biases" in problem.fix


def test_degrees_that_follow_from_others():
    parallel = ParallelConfig(world_size=32, tp=2, pp=2, cp=2, ep=4)
    assert (parallel.dp, parallel.dp_cp, parallel.edp) == (4, 8, 4)
    assert parallel.alignment == 8 and ParallelConfig(world_size=2, tp=2).alignment == 2


def test_sizes_of_the_families():
    shape = model_dimensions(MOE)
    assert (shape.ffn_hidden_size, shape.moe_ffn_hidden_size, shape.num_experts) == (0, 32, 8)
    deepseek = {
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "intermediate_size": 200,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 30,
        "qk_rope_head_dim": 10,
        "q_lora_rank": None,
    }
    shape = model_dimensions(deepseek)
    assert (shape.ffn_hidden_size, shape.shared_expert_size, shape.latent_rows) == (200, 48, (40,))
    mixtral = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 4, "intermediate_size": 50}
    shape = model_dimensions(mixtral)
    assert (shape.ffn_hidden_size, shape.moe_ffn_hidden_size, shape.num_query_groups) == (0, 50, 4)
    assert model_dimensions({"model_type": "x"}) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json"),
        ('{"a": 1,\n]', "line 2"),
        ("[1]", "must hold a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_broken_model_folder(tmp_path, content, words):
    if isinstance(content, bytes):
        (tmp_path / "config.json").write_bytes(content)
    elif content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_hf_config(SkyRLTrainConfig.from_cli_overrides({"trainer.policy.model.path": str(tmp_path)}))
    assert caught.value.problems[0].key == "trainer.policy.model.path"


# --- files, warnings -----------------------------------------------------------------------------------------------


def test_warnings_that_do_not_stop_a_run(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.warns(SkyRLMegatronWarning, match="WANDB_API_KEY"):
        find_problems(SkyRLTrainConfig(), GPUS)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    find_problems(SkyRLTrainConfig(), GPUS)
    args = ["generator.max_turns=2", "generator.sampling_params.stop=['x']"]
    args += ["generator.append_eos_token_after_stop_str_in_multi_turn=false"]
    with pytest.warns(SkyRLMegatronWarning, match="end-of-sequence"):
        find_problems(SkyRLTrainConfig.from_cli_overrides(args), GPUS)


def test_all_problems_at_once():
    cfg = SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.logger=console",
            f"{A}use_kl_in_reward=true",
            f"{M}tensor_model_parallel_size=3",
            f"{E}num_engines=4",
        ]
    )
    found = find_problems(cfg, GPUS)
    keys = {problem.key for problem in found}
    assert {f"{A}use_kl_in_reward", f"{M}tensor_model_parallel_size", f"{E}num_engines"} <= keys
    assert all(problem.fix for problem in found)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trainer.use_sample_packing=false"], "use_sample_packing=true"),
        ([], "set trainer.max_tokens_per_microbatch"),
        ([f"{M}transformer_config_kwargs.hidden_dropout=0.1"], "remove"),
        ([f"{M}transformer_config_kwargs.apply_rope_fusion=true"], "remove"),
        (["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.dropout=0.1"], "lora.dropout=0"),
    ],
)
def test_shared_prefixes_say_what_they_cannot(args, words):
    """With ``always`` each reason is an error before the start; with ``auto`` rows are then computed separately."""
    shared = [*args, *(["trainer.max_tokens_per_microbatch=1024"] if args else [])]

    def found(value):
        every = problems(*shared, f"trainer.share_prefixes={value}", hardware=Hardware(0))
        return [p for p in every if p.key == "trainer.share_prefixes"]

    [problem] = found("always")
    assert words in problem.fix and "auto or never" in problem.fix
    assert not found("auto")
