"""This rank's part of a model, built from a HF config and a layout. The only importer of ``GPTModel``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bridges.shard import padded_rows
from skyrl_megatron import device as devices
from skyrl_megatron.config.rules.layout import PREFIX, ParallelConfig, layout_problems, stage_layers
from skyrl_megatron.errors import ConfigError
from skyrl_megatron.runtime.hf.model import HfModel, read_hf_model
from skyrl_megatron.runtime.model.draft import DraftHead
from skyrl_megatron.runtime.model.layer_choice import TRANSFORMER_ENGINE, describe, use_transformer_engine
from skyrl_megatron.runtime.model.layer_spec import block_spec, layer_spec
from skyrl_megatron.runtime.model.rotary import PackedRotary
from skyrl_megatron.runtime.model.router import router_class
from skyrl_megatron.runtime.model.scaled_weights import built_without_memory
from skyrl_megatron.runtime.model.transformer_config import transformer_config
from skyrl_megatron.runtime.model.value_head import ValueHead
from skyrl_megatron.runtime.parallel_state import ProcessGroups

Head = Literal["lm", "value"]
_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_CHOSEN_BACKENDS = {name: value for name, value in os.environ.items() if name.startswith(_BACKENDS)}
"""The user's own choice of attention kernels, from before any model was built."""


@dataclass(frozen=True, slots=True)
class ModelChunks:
    """This rank's part of a model."""

    chunks: list[GPTModel]
    """One per virtual pipeline stage (one without virtual pipelining), first to last."""
    config: TransformerConfig
    hf: HfModel
    parallel: ParallelConfig
    head: Head

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary without padding."""
        return self.hf.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary padded to a multiple of tp; logits have a tp-th of it as columns."""
        return padded_rows(self.hf.vocab_size, self.parallel.tp)

    @property
    def layer_kind(self) -> str:
        """Whose layers these are, and why not Transformer Engine's if they are not."""
        return describe(self.hf, self.config.transformer_impl == TRANSFORMER_ENGINE)

    def layers(self, pp_rank: int, chunk: int) -> range:
        """Return the global numbers (from 0) of the layers in a chunk of a stage."""
        return stage_layers(self.parallel, self.config.num_layers, pp_rank, chunk)


def build_model(
    source: str | Path | Mapping[str, Any] | HfModel,
    groups: ProcessGroups,
    *,
    dtype: torch.dtype | None = None,
    head: Head = "lm",
    seed: int = 0,
    transformer_config_kwargs: Mapping[str, Any] | None = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    prefix: str = PREFIX,
    frozen: bool = False,
) -> ModelChunks:
    """Build this rank's chunks of the model in a HF folder (or of a config), with weights unset (see ``load_hf``).

    ``dtype``: of the parameters, default ``device.default_dtype()``. ``head``: logits, or a critic's values from a
    head that starts from ``seed``.
    ``transformer_config_kwargs``: fields of Megatron's ``TransformerConfig``, applied last. ``model_config_kwargs``:
    changes to ``config.json``. ``device``: of the parameters; ``torch.device("meta")`` allocates nothing. ``frozen``:
    the weights will not learn, so that those of a quantised folder get their memory when they are loaded.
    Layers are Transformer Engine's on a GPU, if they can express the model, else those of ``layer_spec.py``.

    Raises ModelLoadError for a bad folder or unsupported model, ConfigError for a layout that does not fit the model,
    a field that Megatron does not know, or layers that cannot be had (``layer_choice.py``).
    """
    model = (
        source
        if isinstance(source, HfModel)
        else read_hf_model(source, changes=model_config_kwargs, trust_remote_code=trust_remote_code)
    )
    parallel = groups.parallel
    problems = layout_problems(parallel, model.layout_shape, prefix)
    if problems:
        raise ConfigError(problems)
    on_meta = device is not None and device.type == "meta"
    asked = (transformer_config_kwargs or {}).get("transformer_impl")
    use_te = use_transformer_engine(model, asked, on_meta=on_meta, prefix=prefix)
    config = transformer_config(
        model,
        parallel,
        dtype=dtype or devices.default_dtype(),
        overrides=transformer_config_kwargs,
        use_te=use_te,
        on_meta=on_meta,
        prefix=prefix,
    )
    place = torch.device("meta") if on_meta else contextlib.nullcontext()
    memory = built_without_memory() if frozen and model.is_quantised else contextlib.nullcontext()
    with place, memory, _quiet_deprecation(), _attention_environment():
        chunks = [_chunk(model, config, groups, stage, head, use_te, seed) for stage in range(parallel.vpp)]
    if not on_meta:
        target = device or devices.device()
        chunks = [chunk.to(target) for chunk in chunks]
    return ModelChunks(chunks, config, model, parallel, head)


def _chunk(
    model: HfModel,
    config: TransformerConfig,
    groups: ProcessGroups,
    vpp_stage: int,
    head: Head,
    use_te: bool,
    seed: int,
) -> GPTModel:
    parallel = groups.parallel
    first = groups.is_first_stage and vpp_stage == 0
    last = groups.is_last_stage and vpp_stage == parallel.vpp - 1
    layers = stage_layers(parallel, config.num_layers, groups.pp.rank(), vpp_stage)
    stage = vpp_stage if parallel.vpp > 1 else None
    arguments = dict(model.megatron.model)
    arguments["vocab_size"] = padded_rows(model.vocab_size, parallel.tp)
    if head == "value":
        arguments["share_embeddings_and_output_weights"] = False
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=(
            _te_block_spec(config, model, groups, stage) if use_te else block_spec(config, model, layers, groups)
        ),
        pre_process=first,
        post_process=last,
        vp_stage=stage,
        pg_collection=groups.collection,
        **arguments,
    )
    if not use_te and hasattr(chunk, "rotary_pos_emb"):
        chunk.rotary_pos_emb = PackedRotary(chunk.rotary_pos_emb)
    if last and head == "value":
        chunk.output_layer = ValueHead(config, groups, seed=seed)
    if last and head == "lm" and model.plan.draft_layer is not None:
        layer = (
            _te_block_spec(config, model, groups, stage).layer_specs[-1]
            if use_te
            else layer_spec(config, model.megatron, True, model.plan.shape.kinds[-1][1], groups)
        )
        chunk.draft = DraftHead(config, layer, model.plan.draft_layer + 1, groups)
        chunk.draft.watch(chunk)
    return chunk


def _te_block_spec(
    config: TransformerConfig, model: HfModel, groups: ProcessGroups, stage: int | None
) -> TransformerBlockSubmodules:
    """Return Transformer Engine's layers with our router in the expert layers."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage, pp_rank=groups.pp.rank())
    for layer in spec.layer_specs or ():
        keywords = getattr(layer.submodules.mlp, "keywords", {})  # functools.partial(MoELayer or MLP, submodules=…)
        if hasattr(keywords.get("submodules"), "router"):
            keywords["submodules"] = dataclasses.replace(keywords["submodules"], router=router_class(model.megatron))
    return spec


@contextlib.contextmanager
def _attention_environment() -> Iterator[None]:
    """Let Megatron write ``attention_backend`` into the environment, where Transformer Engine reads it, and put back
    what the user set there: Megatron (models/common/language_module) refuses any other value, be it the user's or that
    of the last model in this process, such as a policy beside a critic."""
    for name in [name for name in os.environ if name.startswith(_BACKENDS)]:
        del os.environ[name]
    yield
    os.environ.update(_CHOSEN_BACKENDS)


@contextlib.contextmanager
def _quiet_deprecation() -> Iterator[None]:
    """Silence Megatron 0.19, which announces GPTModel's successor every time one is built."""
    logger = logging.getLogger(GPTModel.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
