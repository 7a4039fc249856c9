"""For every key that is passed on to Megatron or vLLM: a value, and where it must show.

``tests/config/test_passthrough.py`` compares the tables with ``config/rules/passthrough_keys.py``, so that a new key
fails until a test shows what it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class InAStep:
    """A field of Megatron that a training step of one rank shows (``tests/training/test_shown_keys.py``)."""

    value: Any
    calls: str = ""
    """A function, ``module:name``, that is called another number of times than without the key. Empty: the gradients
    are others."""
    says: str = ""
    """What Megatron says of a part that is missing here, which it asks for because of the key."""
    beside: tuple[tuple[str, Any], ...] = ()
    """Keys of ``megatron_config`` that the field needs."""


IN_A_STEP = {
    "transformer": {
        "apply_rope_fusion": InAStep(True, says="apply_rope_fusion is not available"),
        "attention_dropout": InAStep(0.5),
        "bias_activation_fusion": InAStep(True, calls="megatron.core.transformer.mlp:bias_swiglu_impl"),
        "bias_dropout_fusion": InAStep(
            True, calls="megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train"
        ),
        "gradient_accumulation_fusion": InAStep(False, calls="skyrl_megatron.runtime.optimizer:fuse_gradients"),
        "hidden_dropout": InAStep(0.5),
        "moe_flex_dispatcher_backend": InAStep(
            "hybridep", says="HybridEP is not installed", beside=(("moe_token_dispatcher_type", "flex"),)
        ),
        "moe_input_jitter_eps": InAStep(0.25),
        "moe_permute_fusion": InAStep(True, says="fused permutation is not available"),
        "moe_router_fusion": InAStep(True, says="fused_topk_with_score_function is not available"),
        "moe_shared_expert_overlap": InAStep(
            True, calls="megatron.core.transformer.moe.shared_experts:SharedExpertMLP.pre_forward_comm"
        ),
    },
    "optimizer": {
        "adam_eps": InAStep(0.5),
        "muon_coefficient_type": InAStep("simple"),
        "muon_extra_scale_factor": InAStep(0.5),
        "muon_fp32_matmul_prec": InAStep("medium"),
        "muon_momentum": InAStep(0.5),
        "muon_nesterov": InAStep(False),
        "muon_num_ns_steps": InAStep(2),
        "muon_scale_mode": InAStep("unit_rms_norm"),
    },
}

IN_AN_ENGINES_CONFIGURATION: dict[str, Any] = {
    "all2all_backend": "deepep_low_latency",
    "async_scheduling": False,
    "attention_backend": "TRITON_ATTN",
    "attention_config": {"flash_attn_version": 2},
    "aux_output_config": {"max_bytes": 1 << 20},
    "block_size": 32,
    "compilation_config": {"cudagraph_num_of_warmups": 3},
    "cpu_distributed_timeout_seconds": 78,
    "cudagraph_capture_sizes": [1, 2],
    "cudagraph_metrics": True,
    "disable_custom_all_reduce": True,
    "disable_hybrid_kv_cache_manager": True,
    "distributed_timeout_seconds": 77,
    "enable_flashinfer_autotune": False,
    "enable_logging_iteration_details": True,
    "enable_mfu_metrics": True,
    "hf_overrides": {"num_experts_per_tok": 1},
    "kernel_config": {"moe_backend": "batched_triton"},
    "kv_cache_dtype": "fp8",
    "kv_cache_dtype_skip_layers": ["1"],
    "kv_cache_memory_bytes": 1 << 26,
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 0.25,
    "linear_backend": "triton",
    "load_format": "dummy",
    "long_prefill_token_threshold": 64,
    "mamba_block_size": 64,
    "mamba_cache_dtype": "float32",
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float16",
    "max_cudagraph_capture_size": 4,
    "max_logprobs": 7,
    "max_model_len": 64,
    "max_num_scheduled_tokens": 128,
    "moe_backend": "triton",
    "num_gpu_blocks_override": 99,
    "optimization_level": 1,
    "otlp_traces_endpoint": "http://127.0.0.1:9/x",
    "performance_mode": "throughput",
    "prefill_schedule_interval": 3,
    "prefix_caching_hash_algo": "xxhash",
    "profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp"},
    "quantization": "fp8",
    "safetensors_load_strategy": "lazy",
    "scheduler_reserve_full_isl": False,
    "sparse_indexer_topk_backend": "torch",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    "structured_outputs_config": {"backend": "guidance"},
    "use_fp64_gumbel": True,
    "use_tqdm_on_load": False,
    "watermark": 0.05,
}
"""Argument → a value that an engine's configuration has (``tests/inference/test_engine_arguments.py``)."""

OUTPUT: dict[str, Any] = {
    "allowed_token_ids": [7, 9],
    "bad_words": ["5"],
    "frequency_penalty": 2.0,
    "ignore_eos": True,
    "logit_bias": {9: 100.0},
    "min_tokens": 6,
    "presence_penalty": 2.0,
    "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
    "skip_reading_prefix_cache": True,
    "stop_token_ids": [9],
    "structured_outputs": {"regex": "[0-9]{40}"},
}
"""Sampling parameter → a value that an engine's answer shows (``tests/inference/test_sampling_keys.py``)."""

_ONE_VALUE = "tests/config/test_passthrough.py::test_is_refused_with_its_key_and_the_fix"
_INDEXER = "tests/bridges/test_indexer_loss.py::test_gradients_equal_transformers"
_RECOMPUTED = "tests/observe/test_activations.py::test_recomputed_layers_keep_what_the_budget_says"
_CLIP = "tests/parts/test_qk_clip.py::test_heads_above_the_threshold_shrink_to_it"
_STATE = "tests/te/test_adam.py::test_state_takes_what_check_counts"
_GROUPS = "tests/training/test_optimizer.py::test_fields_that_are_passed_on_reach_the_optimizer"
_HOST = "tests/checkpoint/test_hybrid_optimizer.py::test_offloaded_and_resumed"
_SKIPPED = "tests/training/test_optimizer.py::test_a_gradient_above_the_limit_is_skipped_as_by_megatron"
ELSEWHERE: dict[str, dict[str, str]] = {
    "transformer": {
        "attention_backend": "tests/runtime/test_gpu_settings.py::test_the_users_attention_kernels_are_kept",
        **dict.fromkeys(("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"), _INDEXER),
        "log_max_attention_logit": "tests/parts/test_qk_clip.py::test_logits_are_measured_without_the_clip",
        "moe_router_bias_update_rate": "tests/supervised/test_router.py::test_the_bias_follows_the_load",
        "overlap_moe_expert_parallel_comm": "tests/training/test_expert_overlap.py::test_the_step_is_the_same",
        "overlap_p2p_comm": "tests/training/test_shown_keys.py::test_stages_send_as_they_are_told",
        **dict.fromkeys(("qk_clip", "qk_clip_alpha", "qk_clip_threshold"), _CLIP),
        **{f"recompute_{name}": _RECOMPUTED for name in ("granularity", "method", "modules", "num_layers")},
        "transformer_impl": "tests/runtime/test_layer_choice.py::test_the_key_reaches_the_layers",
    },
    "optimizer": {
        **dict.fromkeys(
            ("apply_wd_to_qk_layernorm", "decoupled_lr", "decoupled_min_lr", "decoupled_weight_decay"), _GROUPS
        ),
        **dict.fromkeys(
            "exp_avg_dtype exp_avg_sq_dtype main_params_dtype store_param_remainders "
            "use_precision_aware_optimizer".split(),
            _STATE,
        ),
        **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload_fraction"), _HOST),
        "overlap_cpu_optimizer_d2h_h2d": (
            "tests/runtime/test_gpu_costs.py::test_the_host_optimizer_updates_while_it_copies"
        ),
        **dict.fromkeys(("grad_norm_skip_threshold", "log_num_zeros_in_grad"), _SKIPPED),
        "muon_tp_mode": "tests/parts/test_muon.py::test_blockwise",
        "use_distributed_optimizer": "tests/training/test_step.py::test_distributed_optimizer",
        **dict.fromkeys(("main_grads_dtype", "muon_scalar_optimizer", "muon_split_qkv"), _ONE_VALUE),
    },
    "engine": {"max_loras": "tests/inference/test_engine_arguments.py::test_slots_of_adapters_reach_the_engine"},
    "sampling": {},
}
"""Key → the test that shows it."""


def exists(test: str) -> bool:
    """Whether a test of :data:`ELSEWHERE` is there."""
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and bool(re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE))
