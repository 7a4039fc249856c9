"""Whose layers a model is built from: Transformer Engine's or those of ``layer_spec.py``; never slower ones unsaid."""

from __future__ import annotations

import importlib

from skyrl_megatron import device
from skyrl_megatron.config.rules.layout import PREFIX
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.hf.model import HfModel

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Values of Megatron's ``transformer_impl``."""


def use_transformer_engine(
    model: HfModel, asked: str | None = None, *, on_meta: bool = False, prefix: str = PREFIX
) -> bool:
    """Tell whether ``model`` gets Transformer Engine's layers: on a GPU, if they can express it.

    ``asked``: the user's ``transformer_config_kwargs.transformer_impl``. ``on_meta``: only if asked for, because those
    layers cannot be made without a GPU. Raises ConfigError on a GPU where Transformer Engine does not import, unless
    ``local`` is asked for, and where ``transformer_engine`` is asked for and cannot be had.
    """
    key = f"{prefix}transformer_config_kwargs.transformer_impl"
    if asked not in (None, LOCAL, TRANSFORMER_ENGINE):
        raise ConfigError([Problem(key, asked, f"must be {TRANSFORMER_ENGINE} or {LOCAL}, or left out")])
    missing = lacking(model)
    if asked == LOCAL or (missing and asked is None):
        return False
    if missing:
        fix = f"Transformer Engine's layers lack {missing}: leave it out, which takes {LOCAL} ones"
        raise ConfigError([Problem(key, asked, fix)])
    if on_meta:
        return asked == TRANSFORMER_ENGINE
    if not device.has_cuda():
        if asked is None:
            return False
        raise ConfigError([Problem(key, asked, f"needs a GPU: leave it out, which takes {LOCAL} layers here")])
    if reason := _import_error():
        fix = (
            f"this GPU run would be built from slower layers, because Transformer Engine does not import ({reason}): "
            f"run launch/setup.sh gpu, or set {LOCAL} to take them"
        )
        raise ConfigError([Problem(key, asked, fix)])
    return True


def lacking(model: HfModel) -> str | None:
    """Return what the model has that Megatron's Transformer Engine layers lack; None if they express it."""
    megatron = model.megatron
    if megatron.full_width_qk_norm:
        return "norms of q and k over all heads"
    if megatron.mla_norm_epsilon not in (None, megatron.transformer["layernorm_epsilon"]):
        return "another epsilon of the norms inside multi-latent attention"
    if megatron.transformer.get("experimental_attention_variant") == "gated_delta_net":
        return "gated delta nets of packed sequences in any layout"
    if "indexer" in megatron.attributes:
        return "attention to chosen keys in every layout"
    if "heads_by_layer" in megatron.attributes:
        return "attention whose heads differ by layer"
    if megatron.transformer.get("add_bias_linear"):
        return "experts with biases"
    return None


def describe(model: HfModel, use_te: bool) -> str:
    """Name the layers of a model in a few words, and why they are not Transformer Engine's if they are not."""
    if use_te:
        return "Transformer Engine"
    if missing := lacking(model):
        return f"skyrl_megatron's own (Transformer Engine's lack {missing})"
    return "skyrl_megatron's own"


def _import_error() -> str | None:
    """Return why Megatron does not see Transformer Engine; Megatron itself swallows an ImportError."""
    try:
        importlib.import_module("transformer_engine.pytorch")
        found = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    except Exception as error:  # a broken installation raises anything
        return f"{type(error).__name__}: {error}"
    return None if found else "Megatron does not find it"
