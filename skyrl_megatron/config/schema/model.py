"""Which model is trained, and whether through a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

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
    """How the first adapter matrix starts. The second starts at zero, so that training begins from the base model;
    with `zero` it is the first that is zero."""
    sync_mode: Annotated[str | None, OneOf("memory", "merged")] = None
    """What travels to the engines: `memory` sends adapters alone, to engines that hold the base model (and
    `engine_init_kwargs.max_loras` versions at once, default 2 of each), `merged` the base weights with the adapter
    added. None: `merged` if `megatron_config.lora_config.merge_lora`, else `memory`."""
    train_attn: bool = True
    """Whether layers of attention get adapters."""
    train_mlp: bool = True
    """Whether dense layers, experts and shared experts get adapters."""
    train_unembed: bool = False
    """Whether `all-linear` includes the output layer. Needs `sync_mode=merged` and a model whose output layer is not
    its embedding."""
    use_rslora: bool = False
    """Scale by `alpha / √rank` (arXiv:2312.03732) instead of `alpha / rank`."""
    adapters: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Several adapters trained together: name → what it has otherwise than the others, of `lora` and of
    `policy.optimizer_config` (`{math: {}, code: {lr: 1e-5, alpha: 32}}`, or just `{math,code}`). A data row's
    `adapter` says which one answers it. More than one need `sync_mode=memory`."""
    adapter_path: str | None = None
    """A PEFT folder, or the name of one on the Hugging Face hub (`org/name` or `org/name@revision`), that training
    starts from. Must have the rank, alpha and layers that are set here, and be an adapter of `policy.model.path`."""


@dataclass
class ModelConfig(BaseConfig):
    """A Hugging Face model."""

    path: str | None = None
    """Folder with `config.json` and safetensors, or the name of a model on the Hugging Face hub (`org/name`); a folder
    of that name wins."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Train an adapter instead of the weights."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (`trainer.hub_commits` says which commit it is). None: the default branch;
    for the reference what the policy has, if it is the same model."""
