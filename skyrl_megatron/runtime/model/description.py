"""Read a model's description from its HF folder, translate it for Megatron, and choose the layer implementation."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bridges.errors import BridgeError
from bridges.family import MegatronModelConfig
from bridges.files import read_hf_config, text_config, with_changes
from bridges.plan import Plan
from bridges.source import SCORE, Source
from skyrl_megatron import device
from skyrl_megatron.config.layout import PREFIX, ModelDimensions
from skyrl_megatron.errors import ConfigError, ModelLoadError, Problem, set_up


@dataclass(frozen=True, slots=True)
class HfModel:
    """The description of a model in ``config.json``."""

    path: Path | None
    """The folder; None if only a config was given."""
    config: Mapping[str, Any]
    """``config.json`` of the language model, with the changes applied."""
    written: Mapping[str, Any]
    """``config.json`` with the changes applied: of the language model, or of text and images."""
    plan: Plan
    """Every tensor with its HF and Megatron names."""
    megatron: MegatronModelConfig
    """Settings of the equivalent Megatron model."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, without padding for tp."""
        return self.plan.shape.dims["V"]

    @property
    def is_quantised(self) -> bool:
        """Whether the folder's weights are quantised."""
        return bool(self.config.get("quantization_config"))

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return "untied" not in self.plan.shape.flags

    @property
    def layout_shape(self) -> ModelDimensions:
        """The sizes that must be divisible by the degrees of a layout."""
        dims, moe = self.plan.shape.dims, self.plan.shape.moe
        return ModelDimensions(
            num_layers=len(moe),
            num_attention_heads=dims["A"],
            num_query_groups=dims.get("G", dims["A"]),
            ffn_hidden_size=0 if all(moe) else dims["F"],
            num_experts=dims.get("E", 0),
            moe_ffn_hidden_size=dims.get("M", 0),
            shared_expert_size=dims.get("S", 0),
            latent_rows=tuple(dims[row] for row in "RB" if dims.get(row)) if self.plan.shape.mla else (),
            delta_net_heads=dims.get("n", 0),
        )


def read_hf_model(
    source: str | Path | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    draft: bool = False,
) -> HfModel:
    """Read ``config.json`` of a folder, or a config as a dict, and translate it for Megatron.

    ``changes``: keys of the config to replace first (``model_config_kwargs``). ``draft``: include the
    multi-token-prediction layer. This function never runs code of the folder. A config with ``auto_map`` is rejected
    unless ``trust_remote_code``, because tokenizers and engines would run its code. Raises ModelLoadError, with file
    and fix, for a missing or broken folder or file, an unsupported ``model_type``, or an option that Megatron does not
    support.
    """
    path = None if isinstance(source, Mapping) else Path(source).expanduser()
    where = "config.json" if path is None else str(path / "config.json")
    try:
        config = dict(source) if isinstance(source, Mapping) else read_hf_config(Path(source).expanduser())
        if config.get("auto_map") and not trust_remote_code:
            raise ModelLoadError(
                f"{where}: auto_map would run code of the folder ({_first_value(config['auto_map'])}); set "
                "trainer.trust_remote_code=true if you trust it, or remove auto_map from the file"
            )
        # before the plan: a changed field may change which tensors there are
        config = with_changes(config, changes or {})
        plan = Plan.of(config, draft=draft)
        return HfModel(path, text_config(config), config, plan, plan.family.megatron_config(config))
    except BridgeError as error:
        raise ModelLoadError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def with_rotary(
    config: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, rope_theta: float | None
) -> dict[str, Any]:
    """Return the ``changes`` for :func:`read_hf_model` that set ``trainer.rope_scaling`` and ``rope_theta``.

    ``config`` may use ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``. The argument ``rope_scaling``
    replaces the scaling of the config; it has HF's keys (``rope_type``, ``factor``, …).
    """
    if not rope_scaling and rope_theta is None:
        return {}
    old = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope_theta or (rope_scaling or {}).get("rope_theta") or old.get("rope_theta") or config.get("rope_theta")
    new = dict(rope_scaling) if rope_scaling else old
    # a model with rotary embeddings on part of a head keeps that part under any scaling
    if "partial_rotary_factor" in old:
        new.setdefault("partial_rotary_factor", old["partial_rotary_factor"])
    if theta is not None:
        new["rope_theta"] = theta
    # the old key is removed: with two scalings the config would be ambiguous
    changes = {"rope_parameters": new, "rope_scaling": None}
    return changes if theta is None else changes | {"rope_theta": theta}


def _first_value(value: object) -> object:
    return next(iter(value.values()), value) if isinstance(value, Mapping) else value


LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Values of Megatron's ``transformer_impl``."""


def use_transformer_engine(
    model: HfModel, asked: str | None = None, *, on_meta: bool = False, prefix: str = PREFIX
) -> bool:
    """Return whether ``model`` is built from Transformer Engine's layers: on a GPU, if they support the model.

    ``asked``: the user's ``transformer_config_kwargs.transformer_impl``. ``on_meta``: use them only if asked for,
    because they cannot be built without a GPU. Raises ConfigError if ``transformer_engine`` is asked for and
    unavailable, and on a GPU if Transformer Engine cannot be imported, unless ``local`` is asked for.
    """
    key = f"{prefix}transformer_config_kwargs.transformer_impl"
    if asked not in (None, LOCAL, TRANSFORMER_ENGINE):
        raise ConfigError([Problem(key, asked, f"must be {TRANSFORMER_ENGINE} or {LOCAL}, or unset")])
    missing = unsupported_by_te(model)
    if asked == LOCAL or (missing and asked is None):
        return False
    if missing:
        fix = f"Transformer Engine's layers do not support {missing}: set it to {LOCAL} or remove it"
        raise ConfigError([Problem(key, asked, fix)])
    # before the question of a GPU: on meta nothing is computed, and --check runs on any machine
    if on_meta:
        return asked == TRANSFORMER_ENGINE
    if not device.has_cuda():
        if asked is None:
            return False
        raise ConfigError([Problem(key, asked, f"needs a GPU: set it to {LOCAL} or remove it")])
    if reason := _import_error():
        fix = (
            f"Transformer Engine cannot be imported ({reason}), so this GPU run would use slower layers: run "
            f"{set_up('gpu')}, or set {LOCAL} to use the slower layers"
        )
        raise ConfigError([Problem(key, asked, fix)])
    return True


def unsupported_by_te(model: HfModel) -> str | None:
    """Return the feature of the model that Megatron's Transformer Engine layers do not support; None if they do."""
    megatron = model.megatron
    if megatron.full_width_qk_norm:
        return "q and k norms over all heads"
    if megatron.mla_norm_epsilon not in (None, megatron.transformer["layernorm_epsilon"]):
        return "a different epsilon for the norms inside multi-latent attention"
    if megatron.transformer.get("experimental_attention_variant") == "gated_delta_net":
        return "gated delta nets with packed sequences in every layout"
    if "indexer" in megatron.attributes:
        return "sparse attention with an indexer in every layout"
    if "heads_by_layer" in megatron.attributes:
        return "attention heads that differ by layer"
    if megatron.transformer.get("add_bias_linear"):
        return "experts with biases"
    return None


def without_qk_clip(model: HfModel, tp: int, use_te: bool) -> str | None:
    """Return why QK-clip (``qk_clip.py``) cannot be used with a model, and what to do; None if it can."""
    megatron = model.megatron
    latent = megatron.multi_latent_attention
    if megatron.full_width_qk_norm or (megatron.transformer.get("qk_layernorm") and not latent):
        return "the norms of q and k bound the logits, whatever the weights are: remove this key"
    groups = megatron.transformer.get("num_query_groups") or 1
    if not latent and groups % tp:
        return f"heads of a KV group must be on one rank, and tensor_model_parallel_size={tp} exceeds {groups} groups"
    return without_max_logit(use_te)


def without_max_logit(use_te: bool) -> str | None:
    """Return why the largest attention logit cannot be measured, and what to do; None if it can."""
    if use_te:
        return (
            "Transformer Engine's attention is not asked for the largest logits here: set "
            f"transformer_config_kwargs.transformer_impl={LOCAL}, or remove this key"
        )
    return None


def describe(model: HfModel, use_te: bool) -> str:
    """Name the layer implementation of a model, and the reason if it is not Transformer Engine."""
    if use_te:
        return "Transformer Engine"
    if missing := unsupported_by_te(model):
        return f"skyrl_megatron's own (Transformer Engine does not support {missing})"
    return "skyrl_megatron's own"


def _import_error() -> str | None:
    """Return why Megatron cannot use Transformer Engine, else None; Megatron itself hides the ImportError."""
    try:
        importlib.import_module("transformer_engine.pytorch")
        found = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return None if found else "Megatron does not find it"


def check_tensors(plan: Plan, source: Source, head: Literal["lm", "value"], prefix: str) -> str | None:
    """Compare a folder with ``plan``; return the name of its value head's weight, None if it has none.

    ``prefix``: ``trainer.algorithm.value_head_prefix``; its tensor is preferred to :data:`SCORE`. A policy ignores
    value heads, a critic needs no LM head. Raises BridgeError for tensors that differ from the plan, and for a value
    head of a critic that is not [1, H] or has a bias.
    """
    shapes, where = dict(source.shapes()), str(source.path)
    of_value_head = {}
    for name in (f"{prefix}.weight", SCORE):
        for tensor in (name, _bias(name)):
            if tensor in shapes and tensor not in plan.hf:
                of_value_head[tensor] = shapes.pop(tensor)
    if head == "value":
        # a critic has no output layer: folders with and without one are both complete
        shapes = {name: shape for name, shape in plan.hf.items() if name == "lm_head.weight"} | shapes
    plan.check(shapes, where)
    if head == "lm":
        fix = "use the whole folder, or the text model that transformers takes out of it"
        plan.require_vision(shapes, f"{where} cannot be exported again: {fix}")
    weight = next((name for name in of_value_head if name.endswith(".weight")), None)
    if weight is None or head != "value":
        return None
    hidden = plan.shape.dims["H"]
    if of_value_head[weight] != (1, hidden):
        raise BridgeError(
            f"{where}: {weight} has shape {list(of_value_head[weight])}, a value head needs [1, {hidden}]: set "
            "trainer.algorithm.value_head_prefix to the critic's tensor, or use a folder without a value head to "
            "initialise a new one"
        )
    if _bias(weight) in of_value_head:
        raise BridgeError(f"{where}: {_bias(weight)}: a bias of the value head is not supported; remove the tensor")
    return weight


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
