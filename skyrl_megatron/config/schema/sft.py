"""The configuration of supervised training (``skyrl-megatron sft``): that of every run, with the section ``sft``."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_megatron.config.derive import fill
from skyrl_megatron.config.schema.generator import DataConfig, GeneratorConfig
from skyrl_megatron.config.schema.run import SkyRLTrainConfig
from skyrl_megatron.config.schema.supervised import SFTConfig
from skyrl_megatron.config.schema.training import TrainerConfig


def rows_data() -> DataConfig:
    """Return the section ``data`` without data sets: those of other runs have prompts, not conversations."""
    data = DataConfig()
    data.train_data, data.val_data = [], []
    return data


def rows_trainer() -> TrainerConfig:
    """Return the section ``trainer`` with one model, whose ranks share their GPUs with nothing, and one loss."""
    trainer = TrainerConfig()
    trainer.placement.colocate_all = False
    trainer.algorithm.policy_loss_type = "cross_entropy"
    trainer.algorithm.use_kl_loss = False
    trainer.train_batch_size = 64
    return trainer


def rows_generator() -> GeneratorConfig:
    """Return the section ``generator`` without engines. Each row of the data is one sample."""
    generator = GeneratorConfig()
    generator.inference_engine.run_engines_locally = False
    generator.n_samples_per_prompt = 1
    return generator


@dataclass
class SFTTrainConfig(SkyRLTrainConfig):
    """Everything that supervised training needs."""

    data: DataConfig = field(default_factory=rows_data)
    """Data sets of conversations."""
    trainer: TrainerConfig = field(default_factory=rows_trainer)
    """Training. Batch sizes count rows."""
    generator: GeneratorConfig = field(default_factory=rows_generator)
    """The chat template. Nothing is sampled."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Conversations and their trained tokens."""

    def __post_init__(self) -> None:
        """Take one optimizer step per training step by default, and fill in the fields of every run."""
        fill(self, "trainer.policy_mini_batch_size", self.trainer.train_batch_size)
        super().__post_init__()
