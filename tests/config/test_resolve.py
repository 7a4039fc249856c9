"""Derived values: filled where nobody set them, followed after changes, adapted to the machine."""

import os

import pytest
import yaml

from skyrl_megatron import device
from skyrl_megatron.config import MegatronConfig, SamplingParams, SkyRLTrainConfig, resolve
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.resolve import run_folder, save_config
from skyrl_megatron.errors import SkyRLMegatronWarning
from tests.config import golden

CPU, GPU = Hardware(0, 1), Hardware(8, 1)


def parse(*args):
    return SkyRLTrainConfig.from_cli_overrides(list(args))


@pytest.mark.parametrize("name", golden.RUNS)
def test_resolved_configurations_are_as_recorded(name):
    recorded = (golden.FOLDER / f"{name}.yaml").read_text()
    assert golden.text(name) == recorded, "if this change is meant: python -m tests.config.golden"
    assert yaml.safe_load(recorded)


def test_values_follow_from_others():
    cfg = parse("trainer.max_prompt_length=100", "generator.sampling_params.max_generate_length=20")
    assert cfg.generator.max_input_length == 100 and cfg.trainer.algorithm.max_seq_len == 120
    assert cfg.generator.eval_sampling_params == SamplingParams(temperature=0.0, max_generate_length=20)
    assert cfg.trainer.ref.model.path == cfg.trainer.policy.model.path
    cfg = parse("trainer.rope_theta=1e6", "trainer.rope_scaling={factor: 2}", "generator.rope_theta=5")
    assert cfg.generator.rope_theta == 5.0 and cfg.generator.rope_scaling == {"factor": 2}
    cfg.generator.rope_scaling["factor"] = 3
    assert cfg.trainer.rope_scaling == {"factor": 2}


def test_set_values_stay():
    given = {
        "generator.max_input_length": 700,
        "generator.max_turns": 2,
        "trainer.algorithm.temperature": 0.9,
        "trainer.algorithm.max_seq_len": 33,
        "trainer.ref.model.path": "/other",
        "generator.eval_sampling_params.temperature": 0.6,
        "generator.sampling_params.max_generate_length": 50,
    }
    cfg = SkyRLTrainConfig.from_cli_overrides(given)
    resolve.derive(cfg)
    assert (cfg.generator.max_input_length, cfg.trainer.algorithm.temperature) == (700, 0.9)
    assert (cfg.trainer.algorithm.max_seq_len, cfg.trainer.ref.model.path) == (33, "/other")
    assert cfg.generator.eval_sampling_params == SamplingParams(temperature=0.6, max_generate_length=50)


def test_derived_values_follow_a_later_change():
    cfg = parse()
    cfg.trainer.max_prompt_length = 64
    cfg.trainer.policy.megatron_config.expert_model_parallel_size = 4
    cfg.trainer.algorithm.temperature = 0.5
    resolve.derive(cfg)
    assert cfg.generator.max_input_length == 64 and cfg.trainer.algorithm.max_seq_len == 64 + 1024
    assert cfg.trainer.ref.megatron_config.expert_model_parallel_size == 4
    assert cfg.trainer.algorithm.temperature == 0.5


def test_untouched_layouts_take_the_policys():
    policy = "trainer.policy.megatron_config.tensor_model_parallel_size=4"
    cfg = parse(policy, "trainer.placement.policy_num_gpus_per_node=4")
    assert cfg.trainer.ref.megatron_config == cfg.trainer.critic.megatron_config == cfg.trainer.policy.megatron_config
    assert cfg.trainer.ref.megatron_config is not cfg.trainer.policy.megatron_config
    assert cfg.trainer.placement.ref_num_gpus_per_node == 4
    # set to its default on purpose
    cfg = parse(policy, "trainer.ref.megatron_config.tensor_model_parallel_size=1")
    assert cfg.trainer.ref.megatron_config == MegatronConfig()


def test_lora_sync_mode_and_merging_go_together():
    lora = "trainer.policy.model.lora."
    merge = "trainer.policy.megatron_config.lora_config.merge_lora"
    assert parse().trainer.policy.model.lora.sync_mode == "merged"
    assert parse(f"{merge}=false").trainer.policy.model.lora.sync_mode == "memory"
    assert not parse(f"{lora}sync_mode=memory").trainer.policy.megatron_config.lora_config.merge_lora


def test_tis_of_older_scripts():
    with pytest.warns(DeprecationWarning, match="off_policy_correction") as caught:
        cfg = parse("trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3")
    correction = cfg.trainer.algorithm.off_policy_correction
    assert len(caught) == 1
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 3.0)
    assert not cfg.trainer.algorithm.use_tis


def test_correction_asks_the_engine_for_logprobs():
    off = "generator.sampling_params.logprobs=null"
    assert parse(off).generator.sampling_params.logprobs is None
    mask = "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.1"
    assert parse(off, mask).generator.sampling_params.logprobs == 1


def test_home_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = parse("trainer.ckpt_path=~/c", "data.train_data=['~/a.parquet','x']", "trainer.policy.model.path=~/m")
    assert cfg.trainer.ckpt_path == "/home/me/c" and cfg.data.train_data == ["/home/me/a.parquet", "x"]
    assert cfg.trainer.ref.model.path == "/home/me/m"


def test_cpu_replaces_defaults_only():
    cfg = parse("generator.inference_engine.max_num_seqs=4", "trainer.flash_attn=false")
    assert resolve.fit_to_hardware(cfg, CPU) == []
    assert cfg.trainer.bf16 is False
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    assert (engine.weight_sync_backend, engine.model_dtype) == (device.GLOO, "float32")
    assert placement.colocate_all and placement.colocate_policy_ref and cfg.trainer.deterministic
    assert resolve.fit_to_hardware(cfg, CPU) == [] and engine.weight_sync_backend == device.GLOO


def test_a_machine_that_turns_out_to_have_gpus_gets_the_defaults_back():
    cfg, fresh = parse("trainer.epochs=2"), parse("trainer.epochs=2")
    resolve.fit_to_hardware(cfg, CPU)
    resolve.fit_to_hardware(cfg, GPU)
    resolve.fit_to_hardware(fresh, GPU)
    assert cfg == fresh and cfg.generator.inference_engine.weight_sync_backend == device.NCCL


@pytest.mark.parametrize(
    "key",
    [
        f"generator.inference_engine.weight_sync_backend={device.NCCL}",
        "trainer.flash_attn=true",
    ],
)
def test_impossible_on_cpu_when_asked_for(key):
    (problem,) = resolve.fit_to_hardware(parse(key), CPU)
    assert problem.key == key.partition("=")[0] and "GPU" in problem.fix
    assert resolve.fit_to_hardware(parse(key), GPU) == []


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_fsdp_runs_as_megatron_with_one_notice(strategy):
    cfg = parse(f"trainer.strategy={strategy}")
    with pytest.warns(SkyRLMegatronWarning, match="only the Megatron backend") as caught:
        assert resolve.fit_to_hardware(cfg, GPU) == []
    assert len(caught) == 1 and cfg.trainer.strategy == "megatron"
    cfg = parse(f"trainer.strategy={strategy}", "trainer.policy.megatron_config.expert_model_parallel_size=2")
    with pytest.warns(SkyRLMegatronWarning):
        (problem,) = resolve.fit_to_hardware(cfg, GPU)
    assert problem.key.endswith("expert_model_parallel_size") and "strategy=megatron" in problem.fix


@pytest.mark.process
def test_gpus_are_counted_without_cuda(monkeypatch, tmp_path):
    if not device.driver_gpu_count():  # a machine without GPUs, where one can be told of two
        driver = tmp_path / "nvidia-smi"
        driver.write_text("#!/bin/sh\necho 'GPU 0: a (UUID: x)'\necho '  MIG 1g'\necho 'GPU 1: b (UUID: y)'\n")
        driver.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert local_hardware().gpus_per_node == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert local_hardware().gpus_per_node == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_hardware().is_cpu


def test_saved_configuration(tmp_path):
    cfg = parse(f"trainer.log_path={tmp_path}", "trainer.project_name=p", "trainer.run_name=r")
    path = save_config(cfg)
    assert path == run_folder(cfg) / "config.yaml" == tmp_path / "p" / "r" / "config.yaml"
    assert parse("--config", str(path)) == cfg
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]
