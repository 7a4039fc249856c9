"""Which model is trained, and whether through a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from skyrl_megatron.config.fields import Bounds, Count, NonNegativeInt, OneOf
from skyrl_megatron.config.schema.base import BaseConfig


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters (Hu et al., arXiv:2106.09685). Off while `rank` is 0."""

    rank: NonNegativeInt = 0
    """Rank of the adapter matrices; 0 trains all weights."""
    alpha: Count = 16
    """The adapter's output is scaled by `alpha / rank`."""
    dropout: Annotated[float, Bounds(0, 1)] = 0.0
    """Probability that an input of the adapter is dropped in training."""
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder through which other systems hand adapters to engines. No effect here: adapters travel through memory."""
    target_modules: str = "all-linear"
    """Which linear layers get an adapter: `all-linear`, or names separated by commas (`linear_qkv,linear_proj`)."""
    exclude_modules: str | None = None
    """Names, separated by commas, taken out of `target_modules`."""
    init_method: Annotated[str, OneOf("kaiming", "xavier", "normal", "zero")] = "kaiming"
    """How the first adapter matrix starts. The second starts at zero, so that training begins from the base model."""
    sync_mode: Annotated[str | None, OneOf("memory", "merged")] = None
    """What travels to the engines: `memory` sends the adapter alone, `merged` the base weights with the adapter added.
    None: `merged` if `megatron_config.lora_config.merge_lora`, else `memory`."""


@dataclass
class ModelConfig(BaseConfig):
    """A Hugging Face model."""

    path: str | None = None
    """Folder with `config.json` and safetensors, or the name of a model on the Hugging Face hub."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Train an adapter instead of the weights."""
