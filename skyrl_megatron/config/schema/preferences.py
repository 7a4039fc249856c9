"""The configuration of training on preferences (``skyrl-megatron dpo`` and ``reward``): that of supervised training,
with the section ``dpo`` or ``reward`` in place of ``sft``."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_megatron.config.derive import fill
from skyrl_megatron.config.schema.generator import DataConfig, GeneratorConfig
from skyrl_megatron.config.schema.run import SkyRLTrainConfig
from skyrl_megatron.config.schema.sft import rows_data, rows_generator, rows_trainer
from skyrl_megatron.config.schema.supervised import DPOConfig, RewardConfig
from skyrl_megatron.config.schema.training import TrainerConfig


@dataclass
class DPOTrainConfig(SkyRLTrainConfig):
    """Everything that training on preferences needs."""

    data: DataConfig = field(default_factory=rows_data)
    """Data sets of preferences."""
    trainer: TrainerConfig = field(default_factory=rows_trainer)
    """Training. Batch sizes count rows of the data: pairs, or labelled answers."""
    generator: GeneratorConfig = field(default_factory=rows_generator)
    """The chat template. Nothing is sampled."""
    dpo: DPOConfig = field(default_factory=DPOConfig)
    """The loss, and the answers."""

    def __post_init__(self) -> None:
        """Take one optimizer step per training step by default, and fill in the fields of every run."""
        fill(self, "trainer.policy_mini_batch_size", self.trainer.train_batch_size)
        super().__post_init__()


@dataclass
class RewardTrainConfig(SkyRLTrainConfig):
    """Everything that training a reward model needs."""

    data: DataConfig = field(default_factory=rows_data)
    """Data sets of pairs."""
    trainer: TrainerConfig = field(default_factory=rows_trainer)
    """Training. Batch sizes count pairs."""
    generator: GeneratorConfig = field(default_factory=rows_generator)
    """The chat template. Nothing is sampled."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The answers."""

    def __post_init__(self) -> None:
        """Take one optimizer step per training step by default, and fill in the fields of every run."""
        fill(self, "trainer.policy_mini_batch_size", self.trainer.train_batch_size)
        super().__post_init__()
