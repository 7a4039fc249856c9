"""``trainer.exact_rollouts``: what breaks it is refused, and a step beyond the limit ends the run."""

import json

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.rules import exact_rules
from skyrl_megatron.errors import AlgorithmError, SkyRLMegatronWarning
from tests.config.test_validate import E, M, problems

EXACT = "trainer.exact_rollouts"
MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "max_position_embeddings": 4096,
}
K = f"{M}transformer_config_kwargs."
W = f"{E}engine_init_kwargs."
CPU = Hardware(0)
TWO = ["trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.colocate_all=false"]


def found(tmp_path, *args, hardware=CPU, **model):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | model))
    return problems(f"{EXACT}=true", f"trainer.policy.model.path={tmp_path}", *args, hardware=hardware)


def test_a_dense_model_on_cpu_may_be_exact(tmp_path):
    assert found(tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_may_share_each_tensor(tmp_path):
    """Those of the engine only as many as the trainer's, and only of a dense model."""
    split, both = [f"{M}tensor_model_parallel_size=2", *TWO], f"{E}tensor_parallel_size=2"
    assert found(tmp_path, *split) == found(tmp_path, *split, both) == []
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 100, "num_experts_per_tok": 2}
    assert found(tmp_path, *split, **experts) == []
    assert [p.key for p in found(tmp_path, *split, both, **experts)] == [f"{E}tensor_parallel_size"]


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        ([f"{M}tensor_model_parallel_size=4", *TWO], f"{M}tensor_model_parallel_size", "sums over so many ranks"),
        ([f"{M}context_parallel_size=2", *TWO], f"{M}context_parallel_size", "attention over ranks"),
        ([f"{E}tensor_parallel_size=2", *TWO], f"{E}tensor_parallel_size", "sums over so many ranks"),
        (["trainer.policy.model.lora.rank=8"], "trainer.policy.model.lora.rank", "another order"),
        ([f"{W}speculative_config={{method: ngram}}"], f"{W}speculative_config", "drafted tokens"),
        ([f"{W}quantization=fp8"], f"{W}quantization", "other kernels"),
        ([f"{W}kv_cache_dtype=fp8"], f"{W}kv_cache_dtype", "round keys"),
        ([f"{M}moe_router_dtype=fp64"], f"{M}moe_router_dtype", "float32"),
        (["trainer.use_sample_packing=false"], "trainer.use_sample_packing", "padded"),
        (["generator.sampling_params.logprobs=null"], "generator.sampling_params.logprobs", "log-probs"),
        (["trainer.rope_scaling={rope_type: yarn, factor: 2.0}"], EXACT, "rope_scaling"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_breaks_it_is_refused(tmp_path, args, key, words):
    assert [p for p in found(tmp_path, *args) if p.key == key and words in p.fix]


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_older_weights(tmp_path):
    run = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]
    assert [p for p in found(tmp_path, *run) if p.key == "trainer.fully_async.max_staleness_steps"]
    kept = found(tmp_path, "trainer.oversampling.ratio=0.5")
    assert [p for p in kept if p.key == "trainer.oversampling.unfinished" and "older weights" in p.fix]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss has no exact operations (they exist for llama, qwen2, qwen3, qwen3_moe"),
        ({"n_group": 4}, "n_group"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_without_exact_operations_are_refused(tmp_path, model, words):
    assert [p for p in found(tmp_path, **model) if p.key == EXACT and words in p.fix]


GPUS = Hardware(8, 1)
LOCAL = f"{K}transformer_impl=local"
WARNS = "trainer.rollout_gap_exceeded=warn"


@pytest.mark.filterwarnings("ignore")
def test_gpus_need_batch_invariant_kernels_and_leave_a_gap(tmp_path, monkeypatch):
    """Packages are asked for on the machine that the run is for."""
    monkeypatch.setattr(exact_rules, "find_spec", lambda name: None)

    def keys(*args, hardware=GPUS, **model):
        return {p.key: p.fix for p in found(tmp_path, *args, hardware=hardware, **model)}

    bare = keys()
    assert "not measured" in bare["trainer.max_rollout_gap"]
    assert "flash_attn_3" in bare[f"{K}transformer_impl"] and "setup.sh gpu" in bare[EXACT]
    assert set(keys(WARNS, LOCAL)) == {EXACT}
    elsewhere = Hardware(8, 1, elsewhere=True)
    assert keys(WARNS, hardware=elsewhere) == keys("trainer.max_rollout_gap=0.01", hardware=elsewhere) == {}
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 100, "num_experts_per_tok": 2}
    assert "products of experts" in keys(WARNS, hardware=elsewhere, **experts)[f"{K}transformer_impl"]
    assert keys(WARNS, LOCAL, hardware=elsewhere, **experts) == {}
    assert "computes in bfloat16" in keys(WARNS, f"{E}model_dtype=float32", hardware=elsewhere)[f"{E}model_dtype"]
    split = keys(WARNS, f"{M}tensor_model_parallel_size=2", *TWO, hardware=elsewhere)
    assert "sums over so many ranks" in split[f"{M}tensor_model_parallel_size"]


def test_the_limit_of_a_step():
    """What is larger ends the run or warns; a weight sync allows no difference only if the run does not."""
    from skyrl_megatron.config.rules.exact_rules import requires_equal_bits, rollout_gap_limit
    from skyrl_megatron.trainer.step_batch import check_rollout_gap

    def cfg(*args):
        return SkyRLTrainConfig.from_cli_overrides([*args])

    exact, some, warns = f"{EXACT}=true", "trainer.max_rollout_gap=0.1", "trainer.rollout_gap_exceeded=warn"
    name = "policy/rollout_train_logprobs_abs_diff_max"
    for args, limit, equal in [
        ([], None, False),
        ([exact], 0.0, True),
        ([exact, some], 0.1, False),
        ([some], 0.1, False),
        ([exact, warns], 0.0, False),
    ]:
        run = cfg(*args)
        assert (rollout_gap_limit(run), requires_equal_bits(run)) == (limit, equal)
        check_rollout_gap({}, run, 3)
        check_rollout_gap({name: 1.0 if limit is None else limit}, run, 3)
    for args, gap in [([exact], 1e-7), ([some], 0.2), ([some], float("nan"))]:
        with pytest.raises(AlgorithmError, match=r"step 3: .*explain-mismatch"):
            check_rollout_gap({name: gap}, cfg(*args), 3)
        with pytest.warns(SkyRLMegatronWarning, match=r"step 3: .*explain-mismatch"):
            check_rollout_gap({name: gap}, cfg(*args, warns), 3)


@pytest.mark.filterwarnings("error")
def test_a_warning_without_a_limit_has_no_effect():
    assert problems("trainer.rollout_gap_exceeded=warn", "trainer.max_rollout_gap=0.1") == []
    with pytest.raises(SkyRLMegatronWarning, match=r"rollout_gap_exceeded=warn.*any log-prob mismatch"):
        problems("trainer.rollout_gap_exceeded=warn")
