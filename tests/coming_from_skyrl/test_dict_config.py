"""Configurations as Hydra hands them over: an omegaconf ``DictConfig``, locked, with all keys of its file."""

import pytest
from omegaconf import OmegaConf

from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.resolve import accepts_dict_config, typed_config
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import ConfigError
from skyrl_megatron.utils import validate_cfg

OVERRIDES = {
    "data.train_data": ["train.parquet"],
    "trainer.logger": "tensorboard",
    "trainer.policy.model.path": "acme/model",
    "trainer.placement.policy_num_gpus_per_node": 4,
    "trainer.max_prompt_length": 96,
    "generator.inference_engine.num_engines": 4,
    "generator.sampling_params.temperature": 0.7,
    "trainer.run_name": "r",
}
EIGHT = Hardware(gpus_per_node=8, nodes=1)
resolve = accepts_dict_config(find_problems)


def locked(overrides=OVERRIDES):
    cfg = OmegaConf.create({})
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    OmegaConf.set_struct(cfg, True)
    OmegaConf.set_readonly(cfg, True)
    return cfg


def typed():
    cfg = SkyRLTrainConfig.from_cli_overrides(OVERRIDES)
    assert not find_problems(cfg, EIGHT)
    return get_config_as_dict(cfg)


def test_it_is_checked_and_resolved_in_place_like_a_typed_one():
    cfg = locked()
    assert resolve(cfg, hardware=EIGHT) == []
    assert OmegaConf.to_container(cfg) == typed()
    assert cfg.generator.max_input_length == 96 and cfg.trainer.algorithm.temperature == 0.7
    assert OmegaConf.is_struct(cfg) and OmegaConf.is_readonly(cfg)
    assert get_config_as_dict(typed_config(cfg)) == typed(), "what an experiment makes of it"


def test_interpolations_are_those_of_omegaconf():
    r"""``\${x}`` is the text ``${x}``, once and for all."""
    given = {**OVERRIDES, "trainer.run_name": r"a \${b}", "trainer.project_name": "of ${trainer.seed}"}
    cfg = locked({**given, "trainer.seed": 7})
    assert resolve(cfg, EIGHT) == []
    assert (cfg.trainer.run_name, cfg.trainer.project_name) == ("a ${b}", "of 7")
    with pytest.raises(ConfigError, match=r"trainer\.project_name.*'trainer\.seed' not found"):
        resolve(locked(given), EIGHT)


def test_values_of_the_file_are_not_taken_for_wishes():
    """Hydra hands over every key of its file, so that a default there asks for nothing: the machine decides."""
    defaults = get_config_as_dict(SkyRLTrainConfig())
    cfg = typed_config(OmegaConf.create(defaults))
    assert not cfg.trainer.placement.is_set("colocate_all")
    asked = typed_config(OmegaConf.create({"trainer": {"placement": {"colocate_all": False}}}))
    assert asked.trainer.placement.is_set("colocate_all")


def test_what_hydra_composes():
    """The file that ``hydra.main(config_path=config_dir, config_name="ppo_base_config")`` reads has every key, so that
    overrides find theirs; what it does not change is as if it had not been named."""
    from skyrl_megatron.entrypoints.main_base import config_dir

    base = OmegaConf.load(f"{config_dir}/ppo_base_config.yaml")
    assert get_config_as_dict(typed_config(base)) == get_config_as_dict(SkyRLTrainConfig())
    OmegaConf.set_struct(base, True)
    given = [f"{key}={value}" for key, value in OVERRIDES.items()]
    composed = OmegaConf.merge(base, OmegaConf.from_dotlist(given))  # Hydra's way with key=value
    OmegaConf.set_struct(composed, True)
    assert resolve(composed, EIGHT) == []
    assert OmegaConf.to_container(composed) == typed()


@pytest.mark.around
def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"data\.train_data=.*/train\.parquet: no such file"):
        validate_cfg(locked(), EIGHT)
    with pytest.raises(ConfigError, match=r"trainer\.pol1cy.*unknown key"):
        validate_cfg(OmegaConf.create({"trainer": {"pol1cy": {}}}), EIGHT)
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        validate_cfg(OmegaConf.create({"trainer": {"seed": "soon"}}), EIGHT)
    flat = OmegaConf.create({"generator": {"num_inference_engines": 4}})
    with pytest.warns(DeprecationWarning):
        assert typed_config(flat).generator.inference_engine.num_engines == 4
