"""The plan of one model: all its tensors by Megatron and HF name, and the check of a folder against it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridges.errors import BridgeError
from bridges.families import family_of, get_family, supported
from bridges.family import Family
from bridges.hf_config import reading
from bridges.rows import DRAFT_COPIES, ModelShape, Shape
from bridges.rules import Entry, expand


@dataclass(frozen=True)
class Plan:
    """Names and shapes of all tensors of one model, computed once.

    ``by_name``: canonical Megatron name → entry. ``hf``: HF name → shape on disk. ``stacked``: HF tensors that hold
    all experts of a layer. ``copies``: HF name → the tensor that it repeats in some folders (a tied output layer).
    ``hf_config``: ``config.json`` of the language model. ``passthrough``: name prefixes of tensors that are copied
    unchanged, of multi-token prediction and of images. ``draft_layer``: number of the multi-token-prediction layer if
    it is trained; its tensors are then among the entries. ``repeats``: HF names that this layer stores again although
    they repeat another tensor.
    """

    family: Family
    shape: ModelShape
    hf_config: Mapping[str, Any]
    entries: tuple[Entry, ...]
    by_name: Mapping[str, Entry]
    hf: Mapping[str, Shape]
    stacked: frozenset[str]
    copies: Mapping[str, str]
    passthrough: tuple[str, ...]
    draft_layer: int | None = None
    repeats: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], *, draft: bool = False) -> Plan:
        """Return the plan for ``config.json`` as a dict. ``draft``: include the multi-token-prediction layer.

        Raises :class:`BridgeError` if the model is not supported, or with ``draft`` if it has no trainable
        multi-token-prediction layer.
        """
        family = family_of(hf_config)
        config = family.config(hf_config)
        shape = family.shape(hf_config)
        more = max(getattr(config, name, 0) or 0 for name in PREDICTION_LAYERS)
        if draft:
            _require_draft(family, more)
        layer = len(shape.moe) if draft else None
        with reading(family.model_type):
            entries = expand(family, hf_config, draft=draft)
        repeats = {copy.format(layer=layer): name for copy, name in DRAFT_COPIES.items()} if draft else {}
        prediction = (*family.carried, *(f"model.layers.{len(shape.moe) + number}." for number in range(more)))
        copies = {} if "untied" in shape.flags else {"lm_head.weight": "model.embed_tokens.weight"}
        return cls(
            family,
            shape,
            family.own_config(hf_config),
            entries,
            {entry.name: entry for entry in entries},
            {piece.name: piece.shape for entry in entries for piece in entry.hf},
            frozenset(piece.name for entry in entries for piece in entry.hf if piece.index is not None),
            copies | repeats,
            (*(() if draft else prediction), *((VISION,) if hf_config.get("model_type") in family.within else ())),
            layer,
            {copy: copies.get(name, name) for copy, name in repeats.items()},
        )

    def is_passthrough(self, hf_name: str) -> bool:
        """Return whether a tensor is copied byte for byte: of multi-token prediction, or of images."""
        return hf_name.startswith(self.passthrough) if self.passthrough else False

    def is_prediction(self, hf_name: str) -> bool:
        """Return whether a tensor that is copied belongs to multi-token prediction."""
        return self.is_passthrough(hf_name) and not hf_name.startswith(VISION)

    def require_vision(self, copied: Iterable[str], fix: str) -> None:
        """Raise :class:`BridgeError` with ``fix`` if tensors of images are missing in ``copied``, the tensors that an
        export copies."""
        if VISION in self.passthrough and not any(name.startswith(VISION) for name in copied):
            raise BridgeError(
                f"config.json is of a model of text and images, and none of its tensors {VISION}… is there: {fix}"
            )

    def is_ignored(self, hf_name: str) -> bool:
        """Return whether the family declares that a tensor holds no weights."""
        return hf_name.endswith(self.family.ignored)

    def check(self, shapes: Mapping[str, Shape], where: str) -> None:
        """Compare a folder's tensors with the plan. Raises one :class:`BridgeError` with all differences."""
        extra = [
            name
            for name in shapes
            if not (name in self.hf or name in self.copies or self.is_passthrough(name) or self.is_ignored(name))
        ]
        missing = [name for name in self.hf if name not in shapes]
        problems = [f"unknown {name}{_nearest(name, missing or self.hf)}" for name in extra[:MANY]]
        problems += [f"missing {name}" for name in missing if name not in extra][:MANY]
        wrong = [name for name, shape in self.hf.items() if name in shapes and shapes[name] != shape]
        problems += [f"{name} is {list(shapes[name])}, expected {list(self.hf[name])}" for name in wrong[:MANY]]
        if problems:
            total = len(extra) + len(missing) + len(wrong)
            more = f"\n  … {total} differences in total" if total > len(problems) else ""
            raise BridgeError(
                f"{where}: the tensors do not match its config.json (model_type={self.family.model_type}):\n  "
                + "\n  ".join(problems)
                + more
                + "\nUse the config.json that belongs to these weights, or fetch the folder again."
            )


def without_output_layer(plan: Plan) -> Plan:
    """Return the plan of the same model without the output layer of the vocabulary, as a critic has it."""
    entries = tuple(entry for entry in plan.entries if entry.name != "output_layer.weight")
    kept = {piece.name for entry in entries for piece in entry.hf}
    return replace(
        plan,
        passthrough=tuple(prefix for prefix in plan.passthrough if prefix != VISION),
        entries=entries,
        by_name={entry.name: entry for entry in entries},
        hf={name: shape for name, shape in plan.hf.items() if name in kept},
    )


VISION = "model.visual."
"""Prefix of the tensors for images in a model of text and images."""
PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules")
"""Config keys for the number of multi-token-prediction layers."""
MANY = 8  # maximum number of reported differences of each kind


def _require_draft(family: Family, layers: int) -> None:
    """Raise :class:`BridgeError` unless the model has exactly one trainable multi-token-prediction layer."""
    trained = sorted(name for name in supported() if get_family(name).draft)
    if not family.draft:
        raise BridgeError(
            f"model_type={family.model_type}: multi-token-prediction layers of this family cannot be trained: remove "
            f"mtp.train, which supports {', '.join(trained)}"
        )
    if layers != 1:
        raise BridgeError(
            f"num_nextn_predict_layers={layers}: mtp.train needs exactly one multi-token-prediction layer: remove "
            "mtp.train"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names)[:2000], n=1, cutoff=0.8)
    return f" (nearest: {close[0]})" if close else ""
