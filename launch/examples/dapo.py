"""Train with DAPO (arXiv:2503.14476): a trainer, an experiment and configuration keys of one's own.

    python launch/examples/dapo.py [--check] [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base`` and two more. Of the paper's four parts the first three are
settings, with other defaults here; the fourth is :class:`DAPOTrainer`.

1. Clip higher: ``eps_clip_high`` is above ``eps_clip_low``, and nothing ties the policy to a reference.
2. Dynamic sampling: prompts whose responses all got the same reward make room for others.
3. Token-level loss: ``loss_reduction=token_mean``, the package's default.
4. Soft overlong punishment: the last ``overlong_buffer_len`` tokens before ``max_generate_length`` cost reward.
"""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config import AlgorithmConfig, DynamicSamplingConfig, make_config
from skyrl_megatron.config.fields import Bounds
from skyrl_megatron.entrypoints.main_base import BasePPOExp
from skyrl_megatron.generators.base import GeneratorOutput
from skyrl_megatron.trainer import RayPPOTrainer
from skyrl_megatron.types import TrainingBatch


@dataclass
class DAPOAlgorithmConfig(AlgorithmConfig):
    """``trainer.algorithm`` with DAPO's defaults and the keys of its length penalty."""

    eps_clip_high: float = 0.28
    use_kl_loss: bool = False
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=lambda: DynamicSamplingConfig(type="filter"))
    overlong_buffer_len: Annotated[int, Bounds(0)] = 256
    """Tokens before ``max_generate_length`` in which the penalty grows from 0 to its full size. 0: no penalty."""
    overlong_buffer_penalty_factor: float = 1.0
    """What a response of ``max_generate_length`` tokens loses."""


def overlong_penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """Return what a response of ``length`` tokens loses, at most ``factor`` (equation 13 of the paper, positive)."""
    beyond = length - (longest - buffer)
    return factor * min(max(beyond / buffer, 0.0), 1.0) if buffer else 0.0


class DAPOTrainer(RayPPOTrainer):
    """Takes the penalty off the reward of each response's last token.

    Not before dynamic sampling, which goes by the environment's rewards alone: length must not make a prompt look
    useful. Reported rewards are the environment's for the same reason.
    """

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        algorithm: Any = self.cfg.trainer.algorithm
        longest = self.cfg.generator.sampling_params.max_generate_length
        buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
        given: Any = generator_output["rewards"]  # by token: postprocess_generator_output saw to that
        penalties = [overlong_penalty(len(row), longest, buffer, factor) for row in generator_output["response_ids"]]
        rewards = [
            [*row[:-1], row[-1] - penalty] if len(row) else row for row, penalty in zip(given, penalties, strict=True)
        ]
        self.metrics["reward/overlong_penalty"] = sum(penalties) / len(penalties)
        return super().convert_to_training_input({**generator_output, "rewards": rewards}, uids)


class DAPOExp(BasePPOExp):
    """An experiment with that trainer."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        return DAPOTrainer(*args, **kwargs)


if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    sys.exit(main(experiment=DAPOExp, config=make_config(algorithm_cls=DAPOAlgorithmConfig)))
