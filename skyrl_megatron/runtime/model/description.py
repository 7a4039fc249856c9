"""A model as its HF folder describes it: config, table of tensors, Megatron's settings, and which layers it is built
from.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridges.errors import BridgeError
from bridges.family import MegatronModelConfig
from bridges.files import read_hf_config
from bridges.plan import Plan
from skyrl_megatron import device
from skyrl_megatron.config.rules.layout import PREFIX, ModelDimensions
from skyrl_megatron.errors import ConfigError, ModelLoadError, Problem


@dataclass(frozen=True, slots=True)
class HfModel:
    """The description of a model in ``config.json``."""

    path: Path | None
    """The folder; None when only a config was given."""
    config: Mapping[str, Any]
    """``config.json``, changes applied."""
    plan: Plan
    """Every tensor by its HF and its Megatron name."""
    megatron: MegatronModelConfig
    """Settings of a Megatron model that computes the same."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding for tp not counted."""
        return self.plan.shape.dims["V"]

    @property
    def is_quantised(self) -> bool:
        """Whether the folder's weights are quantised."""
        return bool(self.config.get("quantization_config"))

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return "untied" not in self.plan.shape.flags

    @property
    def layout_shape(self) -> ModelDimensions:
        """The sizes that a layout must divide."""
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
    """Read ``config.json`` of a folder (or take it as a dict) and translate it for Megatron.

    ``changes``: keys of the config to replace first (``model_config_kwargs``). ``draft``: the layer of multi-token
    prediction is part of the model. No code of the folder is ever run; a
    config that names some is refused unless ``trust_remote_code``, because tokenizers and engines would run it.
    Raises ModelLoadError naming file and fix: folder or file missing or broken, an unsupported ``model_type`` (with
    the nearest one), an option that Megatron cannot express.
    """
    path = None if isinstance(source, Mapping) else Path(source).expanduser()
    where = "config.json" if path is None else str(path / "config.json")
    try:
        config = dict(source) if isinstance(source, Mapping) else read_hf_config(Path(source).expanduser())
        if config.get("auto_map") and not trust_remote_code:
            raise ModelLoadError(
                f"{where}: auto_map names code to be run from the folder ({_first_value(config['auto_map'])}); set "
                "trainer.trust_remote_code=true if you trust it, or take auto_map out of the file"
            )
        config |= dict(changes or {})
        plan = Plan.of(config, draft=draft)
        return HfModel(path, config, plan, plan.family.megatron_config(config))
    except BridgeError as error:
        raise ModelLoadError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def with_rotary(
    config: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, rope_theta: float | None
) -> dict[str, Any]:
    """Return the ``changes`` for :func:`read_hf_model` that set ``trainer.rope_scaling`` and ``rope_theta``.

    Both spellings of transformers are understood: ``rope_parameters``, and ``rope_scaling`` beside ``rope_theta``.
    ``rope_scaling`` replaces what the config says; keys as in HF (``rope_type``, ``factor``, …).
    """
    if not rope_scaling and rope_theta is None:
        return {}
    old = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope_theta or (rope_scaling or {}).get("rope_theta") or old.get("rope_theta") or config.get("rope_theta")
    new = dict(rope_scaling) if rope_scaling else old
    if "partial_rotary_factor" in old:
        new.setdefault("partial_rotary_factor", old["partial_rotary_factor"])
    if theta is not None:
        new["rope_theta"] = theta
    changes = {"rope_parameters": new, "rope_scaling": None}
    return changes if theta is None else changes | {"rope_theta": theta}


def _first_value(value: object) -> object:
    return next(iter(value.values()), value) if isinstance(value, Mapping) else value


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
