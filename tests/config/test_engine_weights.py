"""Engines that hold other weights than the trainer sends, and the slow way that weights may take: told in time."""

import json

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.entrypoints.checks.engine_weights import engine_weights
from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
from skyrl_megatron.errors import SkyRLMegatronWarning
from tests.bridges.tiny_models import tiny_config

E = "generator.inference_engine."


@pytest.fixture
def fp8_folder(tmp_path):
    config = tiny_config("qwen3_moe") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def found(*args, training=True):
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args])
    return list(engine_weights(PlannedRun(cfg, Hardware(8, 1), training)))


def test_an_fp8_checkpoint_is_refused_with_the_way_to_bfloat16(fp8_folder):
    (problem,) = found(f"trainer.policy.model.path={fp8_folder}")
    assert problem.key == "trainer.policy.model.path" and "fp8 layers" in problem.fix
    assert f"python -m bridges import --hf {fp8_folder} --dtype bf16" in problem.fix


def test_a_frozen_base_may_stay_quantised_where_engines_get_it_merged(fp8_folder):
    kwargs = [
        f"{E}engine_init_kwargs.load_format=dummy",
        f"{E}engine_init_kwargs.hf_overrides.quantization_config=null",
    ]
    lora = [f"trainer.policy.model.path={fp8_folder}", "trainer.policy.model.lora.rank=4"]
    (problem,) = found(*lora)
    assert all(each in problem.fix for each in kwargs)
    assert found(*lora, *kwargs) == []
    for missing in (lora, kwargs[1:]), (lora, kwargs[:1]), (lora[:1], kwargs):
        assert len(found(*(each for part in missing for each in part))) == 1, missing
    assert len(found(*lora, *kwargs, "trainer.policy.model.lora.sync_mode=memory")) == 1


def test_quantised_engines_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    (problem,) = found(f"trainer.policy.model.path={tmp_path}", f"{E}engine_init_kwargs.quantization=fp8")
    assert problem.key == f"{E}engine_init_kwargs.quantization" and "leave it out" in problem.fix
    assert found(f"trainer.policy.model.path={tmp_path}") == []


def test_engines_that_draft_are_told_what_stays_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v3", num_nextn_predict_layers=1)))
    model, key = f"trainer.policy.model.path={tmp_path}", f"{E}engine_init_kwargs.speculative_config"
    drafts, trained = (
        f"{key}={{method: mtp, num_speculative_tokens: 1}}",
        "trainer.policy.megatron_config.mtp.train=true",
    )
    (told,) = found(model, drafts)
    assert "mtp.train trains it" in str(told) and "speculative_config" in str(told)
    assert found(model, drafts, training=False) == found(model, drafts, trained) == []
    for other in (
        "{method: ngram, num_speculative_tokens: 1}",
        "{method: mtp, model: /else, num_speculative_tokens: 1}",
    ):
        (told,) = found(model, f"{key}={other}", trained)
        assert "syncs do not send what engines draft with" in str(told)


def test_drafted_tokens_are_sampled_from_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v3", num_nextn_predict_layers=1)))
    args = [f"trainer.policy.model.path={tmp_path}", "trainer.policy.megatron_config.mtp.train=true"]
    args += [f"{E}engine_init_kwargs.speculative_config={{method: mtp, num_speculative_tokens: 1}}"]
    assert found(*args, "generator.sampling_params.top_p=0.9") == []  # GPUs return what is sampled from
    (problem,) = found(*args, "generator.sampling_params.top_p=0.9", f"{E}return_sampling_support=false")
    assert "of what top_p=0.9 samples from" in problem.fix


@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_no_weights_are_sent_it_is_fine(fp8_folder, elsewhere):
    args = [f"trainer.policy.model.path={fp8_folder}", f"{E}engine_init_kwargs.quantization=fp8"]
    args += [f"{E}run_engines_locally={str(not elsewhere).lower()}"]
    assert found(*args, training=elsewhere) == []


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["trainer.placement.policy_num_nodes=2"], "policy_num_nodes=2"),
        (
            ["trainer.placement.policy_num_gpus_per_node=4", f"{E}num_engines=2", f"{E}data_parallel_size=2"],
            "data_parallel_size=2",
        ),
    ],
)
def test_shared_gpus_that_gloo_has_to_serve_are_told(args, why):
    engines = [] if any("num_engines" in arg for arg in args) else [f"{E}num_engines=2"]
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args, *engines])
    with pytest.warns(SkyRLMegatronWarning, match=f"{why}: weights travel .* host memory .* colocate_all=false"):
        assert find_problems(cfg, Hardware(8, 2)) == []
