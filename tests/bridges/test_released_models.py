"""The tables at full size: parameter counts of released models, as their publishers state them, from configs alone."""

import math

import pytest

from tests.support.released_models import RELEASED_LATER

MLA = dict(
    kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_shared_experts=1, moe_layer_freq=1,
    norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", seq_aux=True, auto_map={"AutoConfig": "x.X"},
)  # fmt: skip
GPT_OSS = dict(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, num_experts_per_tok=4, sliding_window=128, rope_theta=150000,
)  # fmt: skip
YARN = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=4096, type="yarn")  # fmt: skip
# Buffers (routing correction biases) are counted where the publisher's safetensors count does.
RELEASED = {
    "Llama-3.1-8B": (8_030_261_248, dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0, max_position_embeddings=131072,
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                          original_max_position_embeddings=8192))),
    "Qwen2.5-0.5B": (494_032_768, dict(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, sliding_window=32768,
        use_sliding_window=False, max_window_layers=21)),
    "Qwen1.5-MoE-A2.7B": (14_315_784_192, dict(
        model_type="qwen2_moe", vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632)),
    "Qwen3-30B-A3B": (30_532_122_624, dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True)),
    "Mixtral-8x7B": (46_702_792_704, dict(
        model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)),
    "OLMoE-1B-7B": (6_919_161_856, dict(
        model_type="olmoe", vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16,
        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8)),
    "DeepSeek-V3": (671_026_419_200, dict(
        MLA, model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=256, q_lora_rank=1536, n_group=8, topk_group=4, num_experts_per_tok=8,
        first_k_dense_replace=3, rope_theta=10000, rope_scaling=YARN)),
    "Moonlight-16B-A3B": (15_960_110_208, dict(
        MLA, model_type="deepseek_v3", vocab_size=163840, hidden_size=2048, intermediate_size=11264,
        moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        n_shared_experts=2, n_routed_experts=64, q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=6,
        first_k_dense_replace=1, rope_theta=50000.0)),
    "Kimi-K2": (1_026_408_232_448, dict(
        MLA, model_type="kimi_k2", vocab_size=163840, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        n_routed_experts=384, q_lora_rank=1536, n_group=1, topk_group=1, num_experts_per_tok=8,
        first_k_dense_replace=1, rope_theta=50000.0, rope_scaling=YARN | {"factor": 32.0})),
    "gpt-oss-20b": (20_914_757_184, dict(
        GPT_OSS, model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32)),
    "gpt-oss-120b": (116_829_156_672, dict(
        GPT_OSS, model_type="gpt_oss", num_hidden_layers=36, num_local_experts=128)),
    **{name: (count, RELEASED_LATER[name]) for name, count in {
        "MiniMax-M2": 228_689_764_864,  # 230B
        "dots.llm1": 142_774_381_696,  # 142B
        "Solar-Open-100B": 102_651_799_552,  # 102.6B
        "GLM-4.7-Flash": 29_943_393_920,  # 30B
        "ERNIE-4.5-21B-A3B": 21_825_437_888,
        "ERNIE-4.5-300B-A47B": 299_484_163_264,
        "Hy3-preview": 295_033_543_488,  # 295B
        "Qwen3-Next-80B-A3B": 79_674_391_296,
        "Qwen3.5-35B-A3B": 34_660_610_688,  # the language model
        "MiMo-V2-Flash": 308_778_780_864,  # 309B
        "DeepSeek-V3.2": 671_877_944_064,  # 671B and, in each layer, 14 million of the indexer
        "GLM-5": 743_911_218_432,  # 744B
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_parameter_count(name):
    from bridges.plan import Plan
    from bridges.rules import module_name
    from bridges.tensor_names import canonical

    count, config = RELEASED[name]
    plan = Plan.of(config)
    assert sum(math.prod(entry.shape) for entry in plan.entries) == count
    assert sum(math.prod(shape) for shape in plan.hf.values()) == count
    assert plan.family.megatron_config(config).transformer["num_layers"] == config["num_hidden_layers"]
    for entry in plan.entries[:: max(1, len(plan.entries) // 500)]:
        assert plan.by_name[canonical(module_name(entry, "te"))] is entry
