"""Where prompts come from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skyrl_megatron.config.schema.base import BaseConfig


@dataclass
class DataConfig(BaseConfig):
    """Datasets of prompts."""

    train_data: list[str] = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/train.parquet")])
    """Training prompts: paths of parquet, json or jsonl files, or data sets of the Hugging Face hub, written
    `org/name[@revision][:subset][:split]` (one part after the name is the split; default `train`)."""
    val_data: list[str] = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/validation.parquet")])
    """Evaluation prompts, in the same forms. An empty list turns evaluation off."""
