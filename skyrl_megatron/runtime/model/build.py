"""Build this rank's part of a model from a HF config and a layout. The only importer of ``GPTModel``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F

from bridges.family import MegatronModelConfig
from bridges.rules import padded_rows
from skyrl_megatron import device as devices
from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.config.layout import PREFIX, ParallelConfig, layout_problems, stage_layers
from skyrl_megatron.config.rules import passthrough_keys as keys
from skyrl_megatron.config.rules.megatron_rules import MEASURE
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.plugins import FAMILY_LAYERS
from skyrl_megatron.runtime.loss_scale import SUMMED_GRADIENTS
from skyrl_megatron.runtime.model.attention import PackedAttention
from skyrl_megatron.runtime.model.description import (
    TRANSFORMER_ENGINE,
    HfModel,
    describe,
    read_hf_model,
    use_transformer_engine,
    without_max_logit,
    without_qk_clip,
)
from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement, give_placement
from skyrl_megatron.runtime.model.layer_spec import SEGMENTED_LATENT, block_spec, layer_spec
from skyrl_megatron.runtime.model.moe import router_class
from skyrl_megatron.runtime.model.mtp import DraftHead
from skyrl_megatron.runtime.model.rotary import PackedRotary
from skyrl_megatron.runtime.model.scaled_weights import built_without_memory
from skyrl_megatron.runtime.parallel_state import ProcessGroups

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "quick_gelu": quick_gelu}


def transformer_config(
    model: HfModel,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    use_te: bool = False,
    on_meta: bool = False,
    prefix: str = PREFIX,
) -> TransformerConfig:
    """Return the ``TransformerConfig`` (``MLATransformerConfig`` for multi-latent attention) of a model in a layout.

    ``overrides`` (``transformer_config_kwargs``) are fields applied last. Other values of fields of the layout and of
    the model are rejected, because they have separate settings. Raises ConfigError for an unknown or rejected field,
    and with Megatron's message if Megatron rejects the combination.
    """
    overrides = dict(overrides or {})
    cls = MLATransformerConfig if model.megatron.multi_latent_attention else TransformerConfig
    fields_of_class = {field.name for field in dataclasses.fields(cls)}
    layout = _layout_fields(parallel)
    key = f"{prefix}transformer_config_kwargs"
    problems = [
        Problem(f"{key}.{name}", value, f"megatron's {cls.__name__} has no such field")
        for name, value in overrides.items()
        if name not in fields_of_class
    ]
    problems += [
        Problem(f"{key}.{name}", value, f"set by the layout ({layout[name]}); set {prefix}* instead")
        for name, value in overrides.items()
        if name in layout and value != layout[name]
    ]
    # A value that only repeats the model's is no conflict.
    of_model = {field.name: field.default for field in dataclasses.fields(cls)} | dict(model.megatron.transformer)
    problems += [
        Problem(f"{key}.{name}", value, keys.MODEL)
        for name, value in overrides.items()
        if keys.TRANSFORMER.refused.get(name) == keys.MODEL and value != of_model.get(name)
    ]
    biased = model.layout_shape.num_experts and model.megatron.transformer.get("add_bias_linear")
    if biased and parallel.etp > 1:
        fix = "experts with biases cannot be split: set it to 1 and raise expert_model_parallel_size instead"
        problems.append(Problem(f"{prefix}expert_tensor_parallel_size", parallel.etp, fix))
    name, biased = "moe_router_enable_expert_bias", bool(of_model["moe_router_enable_expert_bias"])
    if bool(overrides.get(name, biased)) != biased:
        fix = f"the model has {'an' if biased else 'no'} expert bias: remove this setting"
        problems.append(Problem(f"{prefix}{name}", overrides[name], fix))
    if problems:
        raise ConfigError(problems)
    # Configuration files have names; Megatron compares enum members.
    if isinstance(backend := overrides.get("attention_backend"), str):
        overrides["attention_backend"] = AttnBackend[backend]
    fields = {
        **_common_fields(dtype, use_te, on_meta),
        "apply_rope_fusion": use_te and _has_fused_rotary(model.megatron),
        **model.megatron.transformer,
        "activation_func": _activation(model.megatron.activation),
        **layout,
        **overrides,
    }
    try:
        config = cls(**fields)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError([Problem(key, overrides, f"Megatron rejects it: {error}")]) from error
    # Facts of a family that TransformerConfig has no field for; the layers of this package read them.
    for name, value in model.megatron.attributes.items():
        setattr(config, name, value)
    return config


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation function, with ``trainer.exact_rollouts`` the engine's."""
    if exact_ops.active() and name == "silu":
        return partial(exact_ops.with_gradient, exact_ops.silu, F.silu)
    return _ACTIVATIONS[name]


def _has_fused_rotary(megatron: MegatronModelConfig) -> bool:
    """Return whether a fused rotary kernel computes what the model needs.

    The kernel of multi-latent attention supports only YaRN (transformer_config.py rejects the rest). Transformer
    Engine's kernel for packed sequences ignores YaRN's ``mscale`` (models/common/embeddings/rope_utils.py). With
    interleaved pairs it depends on the version of Transformer Engine and is untested.
    """
    if megatron.multi_latent_attention:
        return bool(megatron.transformer["rope_type"] == "yarn")
    interleaved = megatron.transformer.get("rotary_interleaved", False)
    return not interleaved and bool(megatron.model.get("position_embedding_type") != "yarn")


def _layout_fields(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "sequence_parallel": parallel.sequence_parallel,
        # Batched sends between two interleaved stages are matched in the wrong order and give wrong gradients.
        "overlap_p2p_comm": parallel.uses_overlapped_p2p,
        "batch_p2p_comm": not parallel.uses_overlapped_p2p,
    }


def _common_fields(dtype: torch.dtype, use_te: bool, on_meta: bool) -> dict[str, Any]:
    """Return the fields that do not depend on the model: dtype, variable lengths, fused kernels if they exist."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "transformer_impl": "transformer_engine" if use_te else "local",
        "bias_activation_fusion": use_te,
        "bias_dropout_fusion": use_te,
        "masked_softmax_fusion": use_te,
        "persist_layer_norm": use_te,
        "moe_permute_fusion": use_te,
        "gradient_accumulation_fusion": False,  # needs apex; ``optimizer.fuse_gradients`` sets it layer by layer
        # Fused gradients of a call's first micro-batch would replace those of an earlier call, not be added.
        "disable_parameter_transpose_cache": True,
        **SUMMED_GRADIENTS,
        # Weights come from a checkpoint. With on_meta, torch.device("meta") decides where modules create them.
        "perform_initialization": False,
        "use_cpu_initialization": on_meta and not use_te,
        "init_model_with_meta_device": on_meta,
        "attention_backend": AttnBackend.auto,
    }


_RETURNS_HIDDEN = "returns_hidden_states"


def returns_hidden_states(output_layer: Any) -> bool:
    """Return whether :func:`return_hidden_states` changed this output layer to return hidden states."""
    return getattr(output_layer, _RETURNS_HIDDEN, False)


def return_hidden_states(chunk: Any, groups: ProcessGroups) -> Tensor:
    """Make the last chunk return [b, s, H] instead of [b, s, V_padded / tp]; return the head's weight.

    The output layer keeps its weight, checkpoint key and hooks. Only its ``forward`` is replaced: it returns the
    hidden states, gathered over tp under sequence parallelism. The backward pass sums their gradient over tp, because
    each tp rank computes the contribution of its vocabulary columns.
    """

    def return_hidden(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if chunk.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
        return hidden, None

    chunk.output_layer.forward = return_hidden
    setattr(chunk.output_layer, _RETURNS_HIDDEN, True)
    tied = chunk.share_embeddings_and_output_weights
    weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    return weight


class ValueHead(torch.nn.Module):
    """Linear layer H → 1 that replaces ``GPTModel.output_layer``; replicated on all tp ranks.

    Initialised from a normal distribution with standard deviation 1 / (H + 1), equal on all ranks. Computes in fp32,
    because values are a regression.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, *, seed: int = 0) -> None:
        super().__init__()
        self.groups, self.sequence_parallel = groups, config.sequence_parallel
        hidden = config.hidden_size
        weight = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed), device="cpu") / (hidden + 1)
        parameter: Any = torch.nn.Parameter(weight.to(config.params_dtype))
        parameter.sequence_parallel = config.sequence_parallel  # its gradient is summed over tp
        self.weight: torch.nn.Parameter = parameter

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Map [s, b, H] (s / tp under sequence parallelism) → ([s, b, 1] float32 on every tp rank, None)."""
        values = hidden.float() @ self.weight.float().t()
        if self.sequence_parallel:
            # Every tp rank computes the same loss, so a rank keeps the gradient of its own tokens.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare the replicated tensor ``output_layer.weight`` [1, H]."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.groups.tp, dp_cp_group=self.groups.dp_cp
        )
        return sharded


Head = Literal["lm", "value"]
_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_CHOSEN_BACKENDS = {name: value for name, value in os.environ.items() if name.startswith(_BACKENDS)}
"""The user's choice of attention kernels, read before any model is built."""


@dataclass(frozen=True, slots=True)
class ModelChunks:
    """This rank's part of a model."""

    chunks: list[GPTModel]
    """One per virtual pipeline stage (one without virtual pipelining), first to last."""
    config: TransformerConfig
    hf: HfModel
    parallel: ParallelConfig
    head: Head
    experts: ExpertPlacement
    """Which rank holds which experts."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding."""
        return self.hf.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Size of the vocabulary padded to a multiple of tp; a rank's logits have a tp-th of it."""
        return padded_rows(self.hf.vocab_size, self.parallel.tp)

    @property
    def layer_kind(self) -> str:
        """The implementation of the layers, and the reason if it is not Transformer Engine."""
        use_te = self.config.transformer_impl == TRANSFORMER_ENGINE
        attention = " with skyrl_megatron's attention" if use_te and self.config.own_attention else ""
        return describe(self.hf, use_te) + attention

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
    own_attention: bool = False,
) -> ModelChunks:
    """Build this rank's chunks of the model of a HF folder or config. ``load_hf`` sets the weights.

    ``dtype``: of the parameters, by default ``device.default_dtype()``. ``head``: ``lm`` for logits, ``value`` for a
    critic's values, with a head initialised from ``seed``. ``transformer_config_kwargs``: fields of Megatron's
    ``TransformerConfig``, applied last. ``model_config_kwargs``: changes to ``config.json``. ``device``: of the
    parameters; ``torch.device("meta")`` allocates nothing. ``frozen``: the weights are not trained; memory for the
    weights of a quantised folder is then allocated by ``load_hf``. On a GPU the layers are Transformer Engine's if
    they support the model, else those of ``layer_spec.py``. ``own_attention``: their core attention is
    :class:`PackedAttention` in any case, which packs of segments need.

    Raises ModelLoadError for a bad folder or an unsupported model. Raises ConfigError for a layout that does not fit
    the model, a field that Megatron does not know, or an unavailable ``transformer_impl``.
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
    # Asked only now, because it depends on the implementation of the layers.
    clips = (transformer_config_kwargs or {}).get("qk_clip")
    if clips and (why := without_qk_clip(model, parallel.tp, use_te)):
        raise ConfigError([Problem(f"{prefix}transformer_config_kwargs.qk_clip", clips, why)])
    measures = (transformer_config_kwargs or {}).get(MEASURE)
    if measures and (why := without_max_logit(use_te)):
        raise ConfigError([Problem(f"{prefix}transformer_config_kwargs.{MEASURE}", measures, why)])
    config = transformer_config(
        model,
        parallel,
        dtype=dtype or devices.default_dtype(),
        overrides=transformer_config_kwargs,
        use_te=use_te,
        on_meta=on_meta,
        prefix=prefix,
    )
    config.own_attention = own_attention or not use_te
    if own_attention:  # the fused kernel rotates tokens by the boundaries of the pack
        config.apply_rope_fusion = False
    allocation = torch.device("meta") if on_meta else contextlib.nullcontext()
    # The weights of a quantised base arrive in 8 bits; tensors of full size might not fit until then.
    memory = built_without_memory() if frozen and model.is_quantised else contextlib.nullcontext()
    with allocation, memory, _quiet_deprecation(), _attention_environment():
        chunks = [_chunk(model, config, groups, stage, head, use_te, seed) for stage in range(parallel.vpp)]
    if not on_meta:
        target = device or devices.device()
        chunks = [chunk.to(target) for chunk in chunks]
    # One object for all chunks: a move changes it once.
    experts = ExpertPlacement(config.num_moe_experts or 0, parallel.ep)
    for chunk in chunks:
        give_placement(chunk, experts)
    return ModelChunks(chunks, config, model, parallel, head, experts)


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
    # A head of width 1 cannot share the embedding's matrix.
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
    # Megatron's table is for positions 0 … n of one sequence, not for those of a pack.
    if config.own_attention and hasattr(chunk, "rotary_pos_emb"):
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
    """Return the spec of Transformer Engine's layers with our router in the expert layers, or also our attention."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage, pp_rank=groups.pp.rank())
    for layer in spec.layer_specs or ():
        keywords = getattr(layer.submodules.mlp, "keywords", {})  # functools.partial(MoELayer or MLP, submodules=…)
        if hasattr(keywords.get("submodules"), "router"):
            keywords["submodules"] = dataclasses.replace(keywords["submodules"], router=router_class(model.megatron))
        if config.own_attention:
            mixer = layer.submodules.self_attention
            mixer.submodules.core_attention = PackedAttention
            if model.megatron.multi_latent_attention:
                mixer.module = FAMILY_LAYERS.require(SEGMENTED_LATENT)
    return spec


@contextlib.contextmanager
def _attention_environment() -> Iterator[None]:
    """Let Megatron write ``attention_backend`` into the environment, and restore the user's variables afterwards.

    Transformer Engine reads the NVTE variables. Megatron (models/common/language_module) rejects values that differ
    from its own, also those of an earlier model in this process, such as a policy and a critic.
    """
    for name in [name for name in os.environ if name.startswith(_BACKENDS)]:
        del os.environ[name]
    yield
    os.environ.update(_CHOSEN_BACKENDS)


@contextlib.contextmanager
def _quiet_deprecation() -> Iterator[None]:
    """Silence the deprecation message that Megatron 0.19 logs for every GPTModel."""
    logger = logging.getLogger(GPTModel.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
