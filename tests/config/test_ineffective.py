"""Settings that change nothing in a run: named once, with the reason, and only where somebody asked for them."""

import warnings

import pytest

from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_yaml_str, make_config
from skyrl_megatron.config.fields import field_types, leaves, owner_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.rules.ineffective import _SWITCHES, INEFFECTIVE, ineffective_settings
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import SkyRLMegatronWarning
from tests.config import golden
from tests.config.values import another_value

pytestmark = pytest.mark.slow

CPU, GPUS = Hardware(0, 1), Hardware(8, 2)
QUIET = {"trainer.logger": "console", "trainer.policy.model.path": "some/model"}
KEYS = [key for key, _, _ in leaves(SkyRLTrainConfig)]


def told(arguments, hardware=GPUS):
    """The warning about settings without effect, or an empty string."""
    cfg = SkyRLTrainConfig.from_cli_overrides(QUIET | arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find_problems(cfg, hardware)
    said = [str(each.message) for each in caught if "without effect" in str(each.message)]
    assert len(said) <= 1
    return said[0] if said else ""


def keys_of(rule):
    for named in rule.keys.split():
        yield from [key for key in KEYS if key.startswith(named)] if named.endswith(".") else [named]


IDLE_BY_DEFAULT = {
    key: (rule.why, hardware)
    for hardware in (CPU, GPUS)
    for rule in reversed(INEFFECTIVE)
    if rule.when(SkyRLTrainConfig(), hardware)
    for key in keys_of(rule)
    if key not in _SWITCHES
}
for role in ("ref", "critic", "teacher"):  # left alone they say false, which asks for nothing
    del IDLE_BY_DEFAULT[f"trainer.{role}.megatron_config.dist_ckpt_optim_fully_reshardable"]


@pytest.mark.parametrize("key", sorted(IDLE_BY_DEFAULT))
def test_an_idle_setting_is_named_with_the_reason(key):
    why, hardware = IDLE_BY_DEFAULT[key]
    section, name = owner_of(SkyRLTrainConfig(), key) if "mixed_precision." not in key else (None, None)
    value = "fp16" if section is None else another_value(field_types(type(section))[name], getattr(section, name))
    if key == "generator.inference_engine.weight_sync_backend":
        value = "gloo"
    assert f"{key}={value}: {why}" in told({key: value}, hardware)


def test_every_rule_names_settings_that_are_there():
    for rule in INEFFECTIVE:
        assert rule.why and list(keys_of(rule)) and set(keys_of(rule)) <= set(KEYS), rule.keys


OTHERWISE_IDLE = {
    "trainer.ref.model.path": ({"trainer.algorithm.use_kl_loss": False}, "/x", "no separate reference model"),
    "trainer.algorithm.eps_clip_low": (
        {"trainer.algorithm.policy_loss_type": "sapo"},
        0.1,
        "is not regular, dual_clip",
    ),
    "trainer.micro_train_batch_size_per_gpu": (
        {"trainer.max_tokens_per_microbatch": 2048},
        2,
        "the size of micro-batches",
    ),
    "generator.inference_engine.num_engines": (
        {
            "generator.inference_engine.run_engines_locally": False,
            "generator.inference_engine.remote_urls": ["a:1"],
            "trainer.placement.colocate_all": False,
        },
        3,
        "does not start engines",
    ),
    "trainer.algorithm.off_policy_correction.tis_ratio_type": (
        {"trainer.algorithm.policy_loss_type": "importance_sampling"},
        "token",
        "no off-policy correction",
    ),
    "trainer.policy.optimizer_config.offload_after_step": (
        {"trainer.placement.colocate_all": False},
        False,
        "do not share GPUs",
    ),
}


@pytest.mark.parametrize("key", OTHERWISE_IDLE)
def test_what_another_setting_switches_off_is_named(key):
    others, value, why = OTHERWISE_IDLE[key]
    assert f"{key}={value}" in told(others | {key: value}) and why in told(others | {key: value})
    assert told({key: value}) == "" or key not in told({key: value})


def test_what_follows_from_others_is_nobodys_wish():
    """A role's copy of the policy's layout, and values filled in, also when a saved configuration is read back."""
    given = {
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
        "trainer.policy.megatron_config.moe_z_loss_coeff": 0.1,
        "trainer.placement.policy_num_gpus_per_node": 4,
        "generator.inference_engine.num_engines": 4,
    }
    assert told(given) == ""


@pytest.mark.parametrize("name", golden.RUNS)
def test_a_saved_configuration_names_nothing_new(name):
    from omegaconf import OmegaConf

    hardware, arguments = golden.RUNS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
        find_problems(cfg, hardware)
        again = SkyRLTrainConfig.from_dict_config(OmegaConf.create(get_config_as_yaml_str(cfg)))
        find_problems(again, hardware)
    assert list(ineffective_settings(cfg, hardware)) == list(ineffective_settings(again, hardware)) == []


def test_a_warning_is_given_once():
    cfg = SkyRLTrainConfig.from_cli_overrides(QUIET | {"trainer.disable_fast_tokenizer": True})
    with pytest.warns(SkyRLMegatronWarning, match="disable_fast_tokenizer=True"):
        find_problems(cfg, GPUS)
    find_problems(cfg, GPUS)  # warnings are errors here


def test_use_tis_is_told_once(capsys):
    from skyrl_megatron_tools.embedded import run_moe

    args = ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=2", "trainer.logger=console"]
    run_moe.main(["--check", "model=/no/model", "data.val_data=[]", *args])
    assert capsys.readouterr().err.count("use_tis") == 1


def test_bf16_without_gpus_is_told_and_counted_as_fp32():
    cfg = SkyRLTrainConfig.from_cli_overrides(QUIET | {"trainer.bf16": True})
    with pytest.warns(SkyRLMegatronWarning, match="bf16=true: without GPUs"):
        find_problems(cfg, CPU)
    assert cfg.trainer.bf16 is False
    find_problems(cfg, CPU)
    cfg = SkyRLTrainConfig.from_cli_overrides(QUIET | {"trainer.bf16": True})
    find_problems(cfg, GPUS)
    assert cfg.trainer.bf16 is True


def test_losses_and_sections_of_users_may_read_every_key():
    from dataclasses import dataclass

    from skyrl_megatron.config import AlgorithmConfig

    @dataclass
    class Mine(AlgorithmConfig):
        extra: int = 1

    cfg = make_config(algorithm_cls=Mine).from_cli_overrides(
        QUIET
        | {
            "trainer.algorithm.policy_loss_type": "mine",
            "trainer.algorithm.eps_clip_low": 0.1,
            "trainer.algorithm.clip_ratio_c": 4.0,
            "trainer.algorithm.extra": 2,
        }
    )
    find_problems(cfg, GPUS)
