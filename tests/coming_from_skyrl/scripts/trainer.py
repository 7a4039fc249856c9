"""A trainer of one's own, an experiment that makes it, an entry point that Ray runs."""

import sys
from pathlib import Path

import algorithms
import ray
import torch
from omegaconf import DictConfig, OmegaConf

from skyrl_megatron.entrypoints.main_base import BasePPOExp, config_dir
from skyrl_megatron.envs import register
from skyrl_megatron.generators.base import GeneratorOutput
from skyrl_megatron.trainer import RayPPOTrainer
from skyrl_megatron.utils import initialize_ray, validate_cfg
from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry


class CustomTrainer(RayPPOTrainer):
    @torch.no_grad()
    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        generator_output["rewards"] = [reward - 0.25 for reward in generator_output["rewards"]]
        return super().postprocess_generator_output(generator_output, uids)


class CustomExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return CustomTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    register(id="digits", entry_point="digits:Digits")
    assert "above_median" in AdvantageEstimatorRegistry.list_available()
    exp = CustomExp(cfg)
    exp.run()


def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)

    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


assert algorithms.loss_of_the_registry and Path(config_dir).is_dir()

if __name__ == "__main__":  # in the place of Hydra's decorator: what it makes of the command line
    main(OmegaConf.from_cli(sys.argv[1:]))
