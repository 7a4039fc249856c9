"""What happens to each key of the dictionaries that are handed to Megatron and vLLM.

Every field of Megatron-Core 0.19.2's ``TransformerConfig`` and ``OptimizerConfig``, and of vLLM 0.32's engine
arguments and ``SamplingParams``, is in one of four places: passed on, read by this package, set by another key, or
refused with the reason. A field of Megatron is passed on if a module that this trainer runs reads it and a test shows
what it changes. :mod:`.passthrough` enforces the tables; ``tests/config/test_passthrough.py`` compares them with the
installed types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.config.fields import Bounds, OneOf


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The fields of one type."""

    owner: str
    """The type's name in messages."""
    module: str
    type_name: str
    passed_on: frozenset[str]
    """The other package reads them."""
    read_here: frozenset[str]
    """This package reads them, and passes them on where the other package does too."""
    own_keys: Mapping[str, str]
    """Field → the configuration key that sets it; one that begins with a dot is in the same section."""
    refused: Mapping[str, str]
    """Field → why it is refused, and what to do. The other package's default is accepted: it changes nothing."""
    as_it_is: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Refused field → the values that are accepted instead of the default, because runs have them."""
    limits: Mapping[str, Bounds | OneOf] = field(default_factory=dict)
    """Field → limits of its values, or of each in a list, that the other package does not check."""

    @property
    def names(self) -> frozenset[str]:
        """All fields."""
        return self.passed_on | self.read_here | frozenset(self.own_keys) | frozenset(self.refused)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return field → reason of reason → fields, separated by spaces."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


# ------------------------------------------------------------------ Megatron-Core
_VARYING = "packed micro-batches vary in length: remove this key"
_DELAYED = "delays weight gradients beyond the hooks that count them: remove this key"
_INFERENCE = "is an option of Megatron's inference, but vLLM runs inference here: remove this key"
MODEL = "describes the model: change its config.json with model_config_kwargs, which engines get too"
"""Reason of fields that :func:`skyrl_megatron.runtime.model.build.transformer_config` compares with the model."""
_NOT_READ = "no code that this trainer runs reads it: remove this key"
_SET_HERE = "the trainer sets it: remove this key"
_UNTESTED = "no test of this trainer shows what it does: remove this key"
_OWN_STEP = "the trainer has its own optimizer step, without timers and FP8 buffers: remove this key"
_LOW_PRECISION = "packed sequences are not padded to the sizes of FP8 and FP4 GEMMs: remove this key"
_STAGES = "set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage of megatron_config instead"

TRANSFORMER = KeyTable(
    owner="Megatron's TransformerConfig",
    module="megatron.core.transformer.transformer_config",
    type_name="MLATransformerConfig",
    passed_on=frozenset(
        """
            apply_rope_fusion attention_backend attention_dropout bias_activation_fusion bias_dropout_fusion
            hidden_dropout moe_flex_dispatcher_backend moe_input_jitter_eps moe_permute_fusion
            moe_router_bias_update_rate moe_router_fusion moe_shared_expert_overlap recompute_method
            recompute_modules recompute_num_layers
        """.split()
    ),
    read_here=frozenset(
        """
            dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss gradient_accumulation_fusion log_max_attention_logit
            overlap_moe_expert_parallel_comm overlap_p2p_comm qk_clip qk_clip_alpha qk_clip_threshold
            recompute_granularity transformer_impl
        """.split()
    ),
    own_keys={
        **{
            name: f".{name}"
            for name in (
                "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size moe_aux_loss_coeff "
                "moe_enable_routing_replay moe_grouped_gemm moe_per_layer_logging moe_router_dtype "
                "moe_router_enable_expert_bias moe_router_load_balancing_type moe_router_score_function "
                "moe_token_dispatcher_type moe_z_loss_coeff num_layers_in_first_pipeline_stage "
                "num_layers_in_last_pipeline_stage pipeline_model_parallel_size tensor_model_parallel_size "
                "virtual_pipeline_model_parallel_size"
            ).split()
        },
        "batch_invariant_mode": "trainer.exact_rollouts",
        "deterministic_mode": "trainer.deterministic",
        "mtp_loss_scaling_factor": ".mtp.loss_scale",
        "sequence_parallel": ".tensor_model_parallel_size",
        **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "trainer.bf16"),
    },
    refused={
        **_by_reason(
            {
                MODEL: """
                    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias
                    apply_query_key_layer_scaling attention_output_gate attention_softmax_in_fp32 beta_fast beta_slow
                    dsa_indexer_head_dim dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_topk
                    experimental_attention_variant ffn_hidden_size fp32_residual_connection gated_linear_unit
                    glu_linear_offset hidden_size kv_channels kv_lora_rank layernorm_epsilon
                    layernorm_zero_centered_gamma linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
                    linear_num_key_heads linear_num_value_heads linear_value_head_dim moe_apply_probs_on_input
                    moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_group_topk moe_router_num_groups
                    moe_router_pre_softmax moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate
                    moe_shared_expert_intermediate_size mscale mscale_all_dim multi_latent_attention no_rope_freq
                    normalization num_attention_heads num_layers num_moe_experts num_query_groups
                    original_max_position_embeddings q_lora_rank qk_head_dim qk_l2_norm qk_layernorm
                    qk_pos_emb_head_dim rope_type rotary_base rotary_interleaved rotary_percent rotary_scaling_factor
                    softmax_scale softmax_type v_head_dim window_attn_skip_freq window_size
                    moe_router_topk_limited_devices
                """,
                _SET_HERE: """
                    batch_p2p_comm calculate_per_token_loss deallocate_pipeline_outputs
                    disable_parameter_transpose_cache finalize_model_grads_func flash_attention_version
                    grad_scale_func grad_sync_func init_model_with_meta_device moe_grad_scale_func
                    moe_hybridep_pad_uneven_dispatch_inputs mtp_grad_scale_func no_sync_func param_sync_func
                    perform_initialization timers use_cpu_initialization variable_seq_lengths
                """,
                "the weights come from a checkpoint: remove this key": """
                    embedding_init_method embedding_init_method_std init_method init_method_std
                    output_layer_init_method is_hybrid_model
                """,
                "the trainer computes log-probs and losses itself: remove this key": """
                    cross_entropy_fusion_impl cross_entropy_loss_fusion defer_embedding_wgrad_compute
                    wgrad_deferral_limit
                """,
                "drops or pads tokens of experts, which engines do not do: remove this key": """
                    moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity
                    moe_token_drop_policy
                """,
                "chooses experts that the engine does not choose: remove this key": """
                    moe_router_force_biased moe_router_force_load_balancing moe_router_quantile_balancing_ema
                """,
                "needs timers, which this trainer does not have: remove this key": "barrier_with_L1_time",
                "recomputes experts: add moe to recompute_modules instead": "moe_layer_recompute",
                _STAGES: """
                    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
                    pipeline_model_parallel_layout
                """,
                _LOW_PRECISION: """
                    activation_func_fp8_input_store first_last_layers_bf16 fp4_quantizer_factory fp4_recipe
                    fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
                    fp8_multi_head_attention fp8_output_proj fp8_quantizer_factory fp8_recipe fp8_wgrad
                    moe_router_padding_for_quantization num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
                    quant_recipe tp_only_amax_red moe_router_padding_for_fp8
                """,
                _VARYING: """
                    cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_warmup_steps
                    delay_offload_until_cuda_graph enable_cuda_graph external_cuda_graph moe_ncclep_static_shape
                    moe_ncclep_zero_copy moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
                    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size cuda_graph_scope
                """,
                "needs user buffers of one sequence length, but " + _VARYING: """
                    tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
                    tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
                    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
                """,
                _DELAYED: "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad",
                _INFERENCE: """
                    cache_mla_latents flash_decode inference_cuda_graph_scope inference_disable_triton_nvls_kernels
                    inference_fuse_tp_communication inference_grouped_gemm_backend
                    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
                    mlp_chunks_for_prefill nccl_all_reduce_for_prefill
                """,
                _NOT_READ: """
                    apply_residual_connection_post_layernorm cuda_graph_use_single_mempool dsa_indexer_k_norm_epsilon
                    dsa_indexer_k_norm_fp32 dsa_indexer_rotate_activation dsa_indexer_scoring_relu
                    dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend inference_rng_tracker
                    inference_sampling_seed mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
                    mamba_training_ssm_states_dtype masked_softmax_fusion max_seqlen_per_dp_cp_rank
                    moe_pad_experts_for_cuda_graph_inference moe_token_dropping pipeline_model_parallel_comm_backend
                    tp_comm_bootstrap_backend use_grouped_gemm_for_dense_mlp use_inference_optimized_layers
                    use_mamba_mem_eff_path use_te_rng_tracker
                """,
                _UNTESTED: """
                    ep_overlap_early_attn_memory_release mrope_section mtp_detach_heads mtp_hybrid_override_pattern
                    mtp_standalone mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
                    mup_embedding_mult mup_output_mult mup_width_mult activation_offload_fraction autocast_dtype
                    batch_p2p_sync clone_scatter_output_in_embedding config_logger_dir cp_comm_type cpu_offloading
                    cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
                    cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights delta_offload_bytes_across_pp_ranks
                    distribute_saved_activations enable_autocast experimental_attention_variant_loss_scale_func
                    expert_gtp_weight_remat_size fine_grained_activation_offloading
                    fine_grained_offloading_max_inflight_offloads fused_residual_rmsnorm fused_single_qkv_rope
                    gtp_weight_remat_size hetereogenous_dist_checkpoint heterogeneous_block_specs
                    high_priority_a2a_comm_stream hybrid_context_parallel kitchen_attention_backend
                    memory_efficient_layer_norm microbatch_group_size_per_vp_stage min_offloaded_tensor_size
                    mlp_chunks_for_training moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
                    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_mlp_glu_interleave_size
                    moe_permute_fusion_into_hybridep moe_shared_expert_glu_interleave_size moe_single_grouped_bias
                    moe_single_grouped_weight num_microbatches_with_partial_activation_checkpoints offload_modules
                    overlap_p2p_comm_warmup_flush persist_layer_norm symmetric_ar_type test_mode
                    use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert use_kitchen
                    use_kitchen_attention use_mup use_ring_exchange_p2p use_te_activation_func
                    use_transformer_engine_op_fuser moe_deepep_num_sms moe_hybridep_num_sms
                    disable_bf16_reduced_precision_matmul tensor_parallel_num_weight_shards
                    expert_tensor_parallel_num_weight_shards
                """,
            }
        ),
        "moe_enable_deepep": "an old name: remove this key, and set megatron_config.moe_token_dispatcher_type=flex",
        "fp8": "packed sequences are not padded to the sizes of FP8 GEMMs: remove this key to train in bf16",
        "fp4": "packed sequences are not padded to the sizes of FP4 GEMMs: remove this key to train in bf16",
        "fp8_param": "needs FP8 parameter gathering, which this trainer does not have: remove this key",
        "fp4_param": "needs FP4 parameter gathering, which this trainer does not have: remove this key",
        "hierarchical_context_parallel_sizes": (
            "this trainer does not create hierarchical process groups: remove this key and set context_parallel_size"
        ),
        "mtp_num_layers": (
            "multi-token-prediction layers are copied unchanged (`python -m bridges inspect` lists them as "
            "passthrough): remove this key, and set mtp.train=true to train them"
        ),
        "mla_down_proj_fusion": (
            "fuses two weights that loading, weight sync and checkpoints need under separate names: remove this key"
        ),
    },
    as_it_is={
        **dict.fromkeys("batch_p2p_comm masked_softmax_fusion persist_layer_norm".split(), (True, False)),
        **dict.fromkeys(
            "calculate_per_token_loss deallocate_pipeline_outputs disable_parameter_transpose_cache "
            "moe_hybridep_pad_uneven_dispatch_inputs variable_seq_lengths".split(),
            (True,),
        ),
        "cp_comm_type": (None, "p2p"),
        "perform_initialization": (False,),
    },
    limits={
        **dict.fromkeys(("attention_dropout", "hidden_dropout", "moe_input_jitter_eps"), Bounds(0, 1)),
        "moe_router_bias_update_rate": Bounds(0),
        "recompute_method": OneOf("uniform", "block"),
        "recompute_modules": OneOf(
            *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
        ),
        "recompute_num_layers": Bounds(1),
    },
)

OPTIMIZER = KeyTable(
    owner="Megatron's OptimizerConfig",
    module="megatron.core.optimizer.optimizer_config",
    type_name="OptimizerConfig",
    passed_on=frozenset(
        """
            adam_eps apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr decoupled_weight_decay exp_avg_dtype
            exp_avg_sq_dtype main_params_dtype optimizer_cpu_offload optimizer_offload_fraction
            overlap_cpu_optimizer_d2h_h2d store_param_remainders use_precision_aware_optimizer
        """.split()
    ),
    read_here=frozenset(
        """
            grad_norm_skip_threshold log_num_zeros_in_grad main_grads_dtype muon_coefficient_type
            muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_nesterov muon_num_ns_steps
            muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode use_distributed_optimizer
        """.split()
    ),
    own_keys={
        "lr": ".optimizer_config.lr",
        "min_lr": ".optimizer_config.min_lr",
        "weight_decay": ".optimizer_config.weight_decay",
        "adam_beta1": ".optimizer_config.adam_betas",
        "adam_beta2": ".optimizer_config.adam_betas",
        "clip_grad": ".optimizer_config.max_grad_norm",
        "optimizer": ".optimizer_config.optimizer",
        "overlap_param_gather": ".megatron_config.ddp_config.overlap_param_gather",
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), "trainer.bf16"),
    },
    refused=_by_reason(
        {
            "belongs to an optimizer that this trainer does not have (adam, muon): remove this key": """
                adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method lion_beta1 lion_beta2 sgd_momentum
                soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo
                use_layer_wise_distributed_optimizer
            """,
            "belongs to training in fp16, which needs a loss scaler: remove this key": """
                hysteresis initial_loss_scale loss_scale loss_scale_window min_loss_scale
            """,
            _OWN_STEP: """
                barrier_with_L1_time fp8_recipe optimizer_cuda_graph overlap_param_gather_with_optimizer_step
                reuse_grad_buf_for_mxfp8_param_ag timers
            """,
            _SET_HERE: "pin_cpu_grads pin_cpu_params",
            _UNTESTED: "config_logger_dir use_torch_optimizer_for_cpu_offload",
        }
    ),
    limits={
        **dict.fromkeys(("adam_eps", "decoupled_lr", "decoupled_min_lr"), Bounds(0)),
        "grad_norm_skip_threshold": Bounds(0, open_low=True),
        "optimizer_offload_fraction": Bounds(0, 1),
    },
)

# ------------------------------------------------------------------ vLLM
_E = "generator.inference_engine."
_DISTRIBUTION = (
    "changes what every request samples: remove this key, and set generator.sampling_params or eval_sampling_params"
)
_STALE_BLOCKS = (
    "its blocks of earlier weights would be found again after a weight sync (vLLM's hashes of blocks do not cover the "
    "weights): remove this key"
)
_PLACED = "this run places the ranks of engines: remove this key, and set the sizes of generator.inference_engine"
_WEIGHTS = "weight sync finds the engine's parameters by name, shape and rank, which this changes: remove this key"
_OTHER_MODEL = "engines must run the model that is trained: remove this key, and set trainer.policy.model"
_TEXT = "engines get text only: remove this key"
_UNTESTED_ENGINE = "no test of this package shows what it does: remove this key"

ENGINE = KeyTable(
    owner="vLLM's engine arguments",
    module="vllm.engine.arg_utils",
    type_name="AsyncEngineArgs",
    passed_on=frozenset(
        """
            all2all_backend async_scheduling attention_backend attention_config aux_output_config block_size
            compilation_config cpu_distributed_timeout_seconds cudagraph_capture_sizes cudagraph_metrics
            disable_custom_all_reduce disable_hybrid_kv_cache_manager distributed_timeout_seconds
            enable_flashinfer_autotune enable_logging_iteration_details enable_mfu_metrics kernel_config
            kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample linear_backend
            long_prefill_token_threshold mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype
            max_cudagraph_capture_size max_logprobs max_num_scheduled_tokens moe_backend num_gpu_blocks_override
            optimization_level otlp_traces_endpoint performance_mode prefill_schedule_interval
            prefix_caching_hash_algo profiler_config safetensors_load_strategy scheduler_reserve_full_isl
            sparse_indexer_topk_backend structured_outputs_config use_fp64_gumbel use_tqdm_on_load watermark
        """.split()
    ),
    read_here=frozenset(
        {
            *("hf_overrides", "kv_cache_memory_bytes", "load_format", "max_loras", "max_model_len", "quantization"),
            "speculative_config",
        }
    ),
    own_keys={
        **{
            name: f"{_E}{name}"
            for name in (
                "data_parallel_size distributed_executor_backend enable_chunked_prefill enable_prefix_caching "
                "enable_return_routed_experts enforce_eager fully_sharded_loras gpu_memory_utilization "
                "max_num_batched_tokens max_num_seqs pipeline_parallel_size served_model_name tensor_parallel_size"
            ).split()
        },
        "dtype": f"{_E}model_dtype",
        "enable_expert_parallel": f"{_E}expert_parallel_size",
        "return_sampling_mask": f"{_E}return_sampling_support",
        "disable_log_stats": f"{_E}enable_ray_prometheus_stats",
        "enable_sleep_mode": "trainer.placement.colocate_all",
        "model": "trainer.policy.model.path",
        "revision": "trainer.policy.model.revision",
        "seed": "trainer.seed",
        "trust_remote_code": "trainer.trust_remote_code",
        **dict.fromkeys(("enable_lora", "max_lora_rank"), "trainer.policy.model.lora.rank"),
        "lora_target_modules": "trainer.policy.model.lora.target_modules",
    },
    refused=_by_reason(
        {
            _DISTRIBUTION: "generation_config logits_processors override_generation_config watermark_config",
            "log-probs must be those of the sampling distribution: remove this key": "logprobs_mode",
            "replaces sampled tokens by a trace: remove this key": "enable_trace_replay",
            _STALE_BLOCKS: "kv_offloading_backend kv_offloading_size kv_transfer_config",
            _PLACED: """
                cp_kv_cache_interleave_size data_parallel_address data_parallel_backend data_parallel_external_lb
                data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
                data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dcp_comm_backend
                dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size device_ids dp_sync_interval
                master_addr master_port nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
                prefill_context_parallel_size disable_nccl_for_dp_synchronization ray_workers_use_nsight
            """,
            _WEIGHTS: """
                cpu_offload_gb cpu_offload_params elastic_ep_max_dp_size enable_elastic_ep enable_ep_weight_filter
                enable_eplb eplb_config expert_placement_strategy model_class_overrides model_impl offload_backend
                offload_group_size offload_num_in_group offload_params offload_prefetch_step quantization_config
            """,
            _OTHER_MODEL: """
                code_revision config_format convert diffusion_config disable_sliding_window download_dir
                hf_config_path hf_token io_processor_plugin model_weights pooler_config runner skip_tokenizer_init
                tokenizer tokenizer_mode tokenizer_revision
            """,
            _TEXT: """
                allowed_local_media_path allowed_media_domains default_mm_loras disable_chunked_mm_input
                ec_manager_config enable_mm_embeds enable_mm_processor_stats enable_prompt_embeds
                enable_tower_connector_lora interleave_mm_strings language_model_only limit_mm_per_prompt
                media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
                mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
                mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
                mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb
                mm_tensor_ipc renderer_num_workers skip_mm_profiling video_pruning_method video_pruning_rate
            """,
            "this package sets it: remove this key": """
                additional_config enable_cumem_allocator enable_mixed_moe_lora_format max_cpu_loras
                sleep_mode_offload_cudagraph sleep_preserve_parameter_names stream_interval tokens_only
                weight_transfer_config worker_cls worker_extension_cls
            """,
            "requests above it would be refused, and this run queues requests itself: remove this key": """
                max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
            """,
            "vLLM 0.32 ignores it: remove this key": "disable_cascade_attn max_parallel_loading_workers",
            _UNTESTED_ENGINE: """
                collect_detailed_traces gdn_prefill_backend mamba_backend aggregate_engine_logging
                allow_deprecated_quantization custom_histogram_buckets dbo_decode_token_threshold
                dbo_prefill_token_threshold enable_batch_sharded_sampling enable_dbo enable_fault_tolerance
                enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests enable_mamba_cache_stochastic_rounding
                enable_mamba_shared_prefix_checkpoint enable_moe_shared_loras ec_transfer_config engram_config
                kv_events_config kv_sharing_fast_prefill prefix_cache_retention_interval reasoning_config
                swa_bounded_replay enable_nccl_comm_suspend enable_shm_tensor_arena fail_on_environ_validation
                fault_tolerance_config ignore_patterns ir_op_priority jit_monitor_mode jit_monitor_verbose
                kda_decode_backend kda_prefill_backend log_config_file log_level logging_config
                long_prefill_token_threshold_adaptive lora_dtype mamba_cache_philox_rounds mamba_config
                mamba_ssu_algorithm max_lora_cls_labels model_loader_extra_config per_request_spec_decode_metrics
                prefix_match_unit pt_load_map_location reasoning_parser reasoning_parser_plugin replayssm_buffer_len
                safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls scheduling_policy
                show_hidden_metrics_for_version shutdown_timeout specialize_active_lora spec_method spec_model
                spec_tokens ubatch_size use_replayssm
            """,
        }
    ),
    as_it_is={
        **dict.fromkeys(
            "additional_config enable_mixed_moe_lora_format language_model_only logprobs_mode max_cpu_loras "
            "sleep_preserve_parameter_names weight_transfer_config worker_extension_cls".split(),
            (),
        ),
        "generation_config": ("vllm",),
        "mamba_backend": ("triton",),
    },
    limits=dict.fromkeys(
        "cpu_distributed_timeout_seconds distributed_timeout_seconds kv_cache_memory_bytes "
        "num_gpu_blocks_override".split(),
        Bounds(1),
    ),
)

MASKS = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
"""Sampling keys that exclude tokens. The support holds what they leave."""
WEIGHTS = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling keys that change the probabilities of tokens. No support describes them."""
_ONE_REQUEST = "the run takes each answer at once, when it is whole: remove this key"
_DECODED_HERE = "the run decodes responses itself: remove this key"

SAMPLING = KeyTable(
    owner="vLLM's SamplingParams",
    module="vllm.sampling_params",
    type_name="SamplingParams",
    passed_on=frozenset(
        {*MASKS, *WEIGHTS, "ignore_eos", "repetition_detection", "skip_reading_prefix_cache", "stop_token_ids"}
    ),
    read_here=frozenset(),
    own_keys={
        "max_tokens": ".max_generate_length",
        **{
            name: f".{name}"
            for name in ("logprobs", "min_p", "repetition_penalty", "stop", "temperature", "top_k", "top_p")
        },
    },
    refused=_by_reason(
        {
            "each sample of a prompt is a request of its own: remove this key, and set generator.n_samples_per_prompt "
            "or eval_n_samples_per_prompt": "n",
            _ONE_REQUEST: "output_kind output_text_buffer_length skip_clone stream_interval",
            _DECODED_HERE: "detokenize include_stop_str_in_output skip_special_tokens spaces_between_special_tokens",
            "the run reads the log-prob of the sampled token only: remove this key": """
                flat_logprobs logprob_token_ids prompt_logprob_start prompt_logprob_token_ids prompt_logprobs
            """,
            "all samples of a prompt would be the same: remove this key, and set trainer.deterministic and "
            "trainer.seed": "seed",
            "no part of vLLM reads it without a custom logits processor: remove this key": "extra_args",
            "forces tokens that the policy did not sample: remove this key": """
                thinking_token_budget trace_decode_token_ids
            """,
            "engines of this run have no watermark: remove this key": "watermarking",
            "the run asks for the experts of tokens itself: remove this key": "routed_experts_prompt_start",
        }
    ),
    as_it_is={"include_stop_str_in_output": (True,)},  # the run sets it with `stop`
)
