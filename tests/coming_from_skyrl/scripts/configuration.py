"""Configurations from the command line, from dicts, from a DictConfig; classes with keys of one's own."""

from dataclasses import dataclass

from omegaconf import OmegaConf

from skyrl_megatron.config.config import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
    make_config,
)

by_parts = SkyRLTrainConfig(data=DataConfig(train_data=["rows.parquet"]), trainer=TrainerConfig(seed=3))
by_list = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.model.path=acme/model", "trainer.seed=123"])
by_dict = SkyRLTrainConfig.from_cli_overrides({"trainer.policy.model.path": "acme/model", "trainer.seed": 123})
by_node = SkyRLTrainConfig.from_dict_config(
    OmegaConf.create({"trainer": {"policy": {"model": {"path": "acme/model"}}, "seed": 123}})
)


@dataclass
class MyAlgorithmConfig(AlgorithmConfig):
    my_param: int = 42


@dataclass
class MyGeneratorConfig(GeneratorConfig):
    tries: int = 3


MyConfig = make_config(algorithm_cls=MyAlgorithmConfig, generator_cls=MyGeneratorConfig)
mine = MyConfig.from_cli_overrides(["trainer.algorithm.my_param=7"])
plain = get_config_as_dict(mine)
text = get_config_as_yaml_str(mine)
