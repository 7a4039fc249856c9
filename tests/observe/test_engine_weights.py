"""Engines that hold other weights than the trainer sends, and the slow way that weights may take: told in time."""

import json
import re
from pathlib import Path

import pytest

from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron_observe.preflight.model_checks import engine_weights
from tests.bridges.tiny_models import tiny_config

E = "generator.inference_engine."


PLAIN = [
    f"{E}engine_init_kwargs.load_format=dummy",
    f"{E}engine_init_kwargs.hf_overrides.quantization_config=null",
]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def folder_of(folder, quantised):
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3_moe") | {"quantization_config": quantised}))
    return folder


@pytest.fixture
def fp8_folder(tmp_path):
    return folder_of(tmp_path, BLOCKS)


def found(*args, training=True, gpus=8):
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *args])
    return list(engine_weights(PlannedRun(cfg, Hardware(gpus, 1), training)))


@pytest.mark.parametrize("quantised", [BLOCKS, {"quant_method": "mxfp8"}])
def test_engines_of_a_folder_in_a_form_that_can_be_sent_are_allowed(tmp_path, quantised):
    (told,) = found(f"trainer.policy.model.path={folder_of(tmp_path, quantised)}")
    assert isinstance(told, NotChecked) and quantised["quant_method"] in told.what and "first weight sync" in told.why


@pytest.mark.parametrize(
    ("quantised", "why"),
    [
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        (BLOCKS | {"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
    ],
)
def test_other_forms_are_refused_with_the_ways_to_bfloat16(tmp_path, quantised, why):
    folder = folder_of(tmp_path, quantised)
    (problem,) = found(f"trainer.policy.model.path={folder}")
    assert problem.key == "trainer.policy.model.path" and why in problem.fix
    assert f"python -m bridges import --hf {folder} --dtype bf16" in problem.fix
    assert all(each in problem.fix for each in PLAIN)


@pytest.mark.parametrize(
    ("quantised", "why"),
    [
        (BLOCKS, "need AMX .* which this processor lacks"),
        (BLOCKS | {"weight_block_size": [128, 64]}, r"blocks of 128 columns, not weight_block_size=\[128, 64\]"),
        ({"quant_method": "mxfp8"}, "no kernels for mxfp8 on CPUs"),
    ],
)
def test_engines_on_cpu_say_what_vllm_lacks(tmp_path, quantised, why):
    if "AMX" in why and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has AMX")
    model = f"trainer.policy.model.path={folder_of(tmp_path, quantised)}"
    (problem,) = found(model, gpus=0)
    assert re.search(why, problem.fix) and all(each in problem.fix for each in PLAIN)
    assert found(model, *PLAIN, gpus=0) == []
    assert found(model, PLAIN[1], gpus=0)[0].fix.startswith(
        "engines that hold bfloat16 weights cannot load this quantised folder"
    )


def test_a_frozen_base_may_stay_quantised_where_engines_get_it_merged(fp8_folder):
    lora = [f"trainer.policy.model.path={fp8_folder}", "trainer.policy.model.lora.rank=4"]
    (problem,) = found(*lora)
    assert all(each in problem.fix for each in PLAIN)
    assert found(*lora, *PLAIN) == []
    for missing in (lora, PLAIN[1:]), (lora, PLAIN[:1]):
        assert len(found(*(each for part in missing for each in part))) == 1, missing
    assert len(found(*lora, *PLAIN, "trainer.policy.model.lora.sync_mode=memory")) == 1


def test_engines_that_quantise_for_themselves_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    (problem,) = found(f"trainer.policy.model.path={tmp_path}", f"{E}engine_init_kwargs.quantization=fp8")
    assert problem.key == f"{E}engine_init_kwargs.quantization" and "remove this key" in problem.fix
    assert found(f"trainer.policy.model.path={tmp_path}") == []


def test_engines_that_draft_are_told_what_stays_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v3", num_nextn_predict_layers=1)))
    model, key = f"trainer.policy.model.path={tmp_path}", f"{E}engine_init_kwargs.speculative_config"
    drafts, trained = (
        f"{key}={{method: mtp, num_speculative_tokens: 1}}",
        "trainer.policy.megatron_config.mtp.train=true",
    )
    (told,) = found(model, drafts)
    assert "mtp.train=true" in str(told) and "speculative_config" in str(told)
    assert found(model, drafts, training=False) == found(model, drafts, trained) == []
    for other in (
        "{method: ngram, num_speculative_tokens: 1}",
        "{method: mtp, model: /else, num_speculative_tokens: 1}",
    ):
        (told,) = found(model, f"{key}={other}", trained)
        assert "weight sync does not update the draft model" in str(told)


def test_drafted_tokens_are_sampled_from_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v3", num_nextn_predict_layers=1)))
    args = [f"trainer.policy.model.path={tmp_path}", "trainer.policy.megatron_config.mtp.train=true"]
    args += [f"{E}engine_init_kwargs.speculative_config={{method: mtp, num_speculative_tokens: 1}}"]
    assert found(*args, "generator.sampling_params.top_p=0.9") == []  # GPUs return what is sampled from
    (problem,) = found(*args, "generator.sampling_params.top_p=0.9", f"{E}return_sampling_support=false")
    assert "with top_p=0.9 the log-probs" in problem.fix


@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_no_weights_are_sent_it_is_fine(fp8_folder, elsewhere):
    args = [f"trainer.policy.model.path={fp8_folder}", f"{E}engine_init_kwargs.quantization=fp8"]
    args += [f"{E}run_engines_locally={str(not elsewhere).lower()}"]
    assert found(*args, training=elsewhere) == []
