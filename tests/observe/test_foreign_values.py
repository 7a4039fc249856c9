"""Values of a model's configuration and of Megatron's fields that no rank or engine computes with, and overrides that
would make engines another model than the trainer's: one problem each, under the key that was set."""

import pytest

from tests.bridges.tiny_models import tiny_config

P, E = "trainer.policy.", "generator.inference_engine.engine_init_kwargs."
M, O = f"{P}megatron_config.", f"{E}hf_overrides"  # noqa: E741
K, C = f"{M}transformer_config_kwargs", f"{P}model_config_kwargs"
SIZES = dict(hidden_size=64, num_hidden_layers=4, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tests.support.whole_folder import write_whole_folder

    folder = tmp_path_factory.mktemp("models")
    grouped = dict(head_dim=32, num_key_value_heads=2)
    sizes = {"qwen3_moe": SIZES | grouped, "gpt_oss": SIZES | grouped, "deepseek_v3": SIZES}
    return {name: write_whole_folder(folder / name, tiny_config(name, **sizes[name])) for name in sizes}


@pytest.fixture
def problems(folders):
    def found(keys, family="qwen3_moe", training=True):
        from skyrl_megatron.checks import PlannedRun
        from skyrl_megatron.config import SkyRLTrainConfig
        from skyrl_megatron.config.hardware import Hardware
        from skyrl_megatron_observe.preflight.model_checks import model_files

        paths = {f"trainer.{role}.model.path": str(folders[family]) for role in ("policy", "ref")}
        run = PlannedRun(SkyRLTrainConfig.from_cli_overrides(paths | keys), Hardware(8), training=training)
        return [(each.key, each.fix) for each in model_files(run) if hasattr(each, "key")]

    return found


WRONG = {
    "another count for engines": ({f"{O}.num_experts_per_tok": 1}, f"{O}.num_experts_per_tok", "set trainer.policy.m"),
    "another epsilon for engines": ({f"{O}.rms_norm_eps": 1e-3}, f"{O}.rms_norm_eps", "set trainer.policy.m"),
    "quantised engines": (
        {f"{O}.quantization_config": {"quant_method": "fp8"}},
        f"{O}.quantization_config",
        "another",
    ),
    "no mapping": ({O: "banana"}, O, "a mapping"),
    "more experts than there are": ({f"{C}.num_experts_per_tok": 400}, f"{C}.num_experts_per_tok", "use 1 to 4"),
    "no experts": ({f"{M}model_config_kwargs.num_experts_per_tok": 0}, f"{M}model_config_kwargs.num_e", "use 1 to 4"),
    "fewer than none": ({f"{C}.num_experts_per_tok": -1}, f"{C}.num_experts_per_tok", "use 1 to 4"),
    "no number": ({f"{C}.num_experts_per_tok": "two"}, f"{C}.num_experts_per_tok", "a whole number"),
    "no epsilon": ({f"{C}.rms_norm_eps": -1.0}, f"{C}.rms_norm_eps", "at least 0"),
    "a key that is not read": ({f"{C}.rope_theta": 5.0}, f"{C}.rope_theta", "trainer.rope_theta"),
    "no rotation": ({f"{C}.rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, f"{C}.rope", "above 0"),
    "another norm": ({f"{K}.normalization": "LayerNorm"}, f"{K}.normalization", "describes the model"),
    "Megatron's default": ({f"{K}.gated_linear_unit": False}, f"{K}.gated_linear_unit", "describes the model"),
    "fewer layers": ({"trainer.ref.megatron_config.transformer_config_kwargs.num_layers": 2}, "trainer.ref.", "model"),
    "a part of another attention": (
        {K: {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}},
        f"{K}.recompute_modules",
        "multi_latent_attention",
    ),
    "another dispatcher": ({f"{K}.moe_flex_dispatcher_backend": "ncclep"}, f"{K}.moe_flex_dispatcher", "'flex'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_is_one_problem_under_its_key(problems, case):
    keys, key, says = WRONG[case]
    ((found, fix),) = problems(keys)
    assert found.startswith(key) and says in fix and "fetch the file again" not in fix and "\n" not in fix


RANGES = [
    ("gpt_oss", "num_experts_per_tok", 99),
    ("gpt_oss", "sliding_window", -1),
    ("deepseek_v3", "num_experts_per_tok", 400),
    ("deepseek_v3", "n_group", 3),
    ("deepseek_v3", "topk_group", 0),
    ("deepseek_v3", "topk_group", 9),
]


@pytest.mark.parametrize(("family", "name", "value"), RANGES)
def test_numbers_with_which_no_model_computes(problems, family, name, value):
    ((key, fix),) = problems({f"{C}.{name}": value}, family)
    assert key == f"{C}.{name}" or name in fix


RIGHT = [
    {f"{O}.num_experts_per_tok": 2},
    {f"{O}.num_experts_per_tok": 1, f"{C}.num_experts_per_tok": 1},
    {f"{O}.quantization_config": None},
    {f"{K}.normalization": "RMSNorm", f"{K}.num_layers": 4},
    {f"{K}.attention_dropout": 0.1},
]


def test_what_agrees_is_no_problem(problems):
    for keys in RIGHT:
        assert problems(keys) == [], keys
    assert problems({f"{O}.num_experts_per_tok": 1}, training=False) == []  # engines alone


VLLM = {
    "name of a backend": "speculative_config={method: mtp, num_speculative_tokens: 1, attention_backend: FLASH_ATTN}",
    "dashes": "speculative_config={method: mtp, num-speculative-tokens: 1}",
    "vLLM's default": "cudagraph_capture_sizes=null",
    "capital letters": "quantization=FP8",
}


@pytest.mark.process
@pytest.mark.parametrize("case", VLLM)
def test_what_validators_of_vllm_accept_is_no_problem(case):
    """They change values before the types are compared."""
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.preflight.foreign_values import foreign_values

    def found(argument):
        cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", f"{E}{argument}"])
        return [*foreign_values(PlannedRun(cfg, Hardware(8)))]

    assert found(VLLM[case]) == []
    (problem,) = found("speculative_config={method: mtp, num_speculative_tokens: 1, attention_backend: banana}")
    assert problem.key == f"{E}speculative_config.attention_backend"


@pytest.mark.process
def test_a_sampling_key_is_not_blamed_for_another():
    from skyrl_megatron.inference.vllm.values import sampling_faults

    assert [*sampling_faults({"temperature": 3.0, "ignore_eos": True}, {"ignore_eos": True})] == []
    both = {"ignore_eos": True, "min_tokens": -1, "stop_token_ids": [3]}
    ((key, value, _),) = sampling_faults(both, both)
    assert (key, value) == ("min_tokens", -1)


def test_training_samples_are_no_matter_of_an_evaluation():
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.validate import find_problems

    def found(training):
        keys = ["trainer.logger=console", "generator.sampling_params.repetition_penalty=1.2"]
        return find_problems(SkyRLTrainConfig.from_cli_overrides(keys), Hardware(8), training=training)

    (problem,) = found(True)
    assert problem.key == "generator.sampling_params.repetition_penalty" and found(False) == []
