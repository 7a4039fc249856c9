"""Names of tensors on disk that differ from those of a text model, and the bytes of each tensor in a file.

The folder of a model of text and images has its language model under ``model.language_model.``; Qwen3.5's released
folders fuse the experts of a layer: ``experts.gate_up_proj`` [E, 2M, H] and ``experts.down_proj`` [E, H, M]. A tensor
of one expert is a run of bytes of the fused tensor, so both are read and written in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bridges.errors import BridgeError
from bridges.files import holds_text_model, text_config
from bridges.rows import Shape

type FolderTensors = Mapping[str, tuple[Shape, torch.dtype]]
"""Name → shape and dtype of the tensors of a folder."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: dtype, shape, and its bytes ``[start, end)`` of the file."""

    file: str
    dtype: torch.dtype
    shape: Shape
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.start

    def rows(self, shape: Shape) -> Iterator[TensorInfo]:
        """Yield the tensors of ``shape`` that follow each other in this one."""
        size = math.prod(shape) * self.dtype.itemsize
        for start in range(self.start, self.end, size):
            yield replace(self, shape=shape, start=start, end=start + size)


_WITHIN = "model.language_model."
_FUSES_EXPERTS = frozenset({"qwen3_5_moe_text"})
"""Families whose released folders have fused experts; transformers saves them one by one."""
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def of_text_model(name: str) -> str:
    """Return a tensor's or module's name in a text model."""
    return f"model.{name.removeprefix(_WITHIN)}" if name.startswith(_WITHIN) else name


@dataclass(frozen=True, slots=True)
class DiskForm:
    """How a folder stores the language model's tensors. ``prefix``: in place of ``model.``. ``fused``: the experts."""

    prefix: str = "model."
    fused: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str] | None = None) -> DiskForm:
        """Return the form of a folder with ``config.json`` and tensors ``names``; None: as released."""
        within = holds_text_model(config)
        fused = text_config(config).get("model_type") in _FUSES_EXPERTS
        if names is not None:
            fused &= any(_FUSED.fullmatch(of_text_model(name)) for name in names)
        return cls(_WITHIN if within else "model.", fused and (within or names is not None))

    def name(self, own: str) -> str:
        """Return the name on disk of a tensor or module of the language model."""
        return own if own.startswith("model.visual.") else re.sub(r"^model\.", self.prefix, own)

    def stored(self, tensors: FolderTensors) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the tensors to declare in files for the tensors of a text model, in the same order."""
        declared: dict[str, tuple[Shape, torch.dtype]] = {}
        for name, (shape, dtype) in tensors.items():
            expert = _EXPERT.fullmatch(name) if self.fused else None
            if expert is None:
                declared[self.name(name)] = (shape, dtype)
                continue
            layer, number, part = expert.groups()
            rows = shape[0] if part == "down" else 2 * shape[0]
            fused = f"{self.name(layer)}.{'down' if part == 'down' else 'gate_up'}_proj"
            experts = max(int(number) + 1, declared[fused][0][0] if fused in declared else 0)
            declared[fused] = ((experts, rows, shape[1]), dtype)
        return declared

    def own(self, stored: Mapping[str, TensorInfo], where: str = "") -> dict[str, TensorInfo]:
        """Return the tensors in files by the names of a text model, those of fused experts one by one.

        transformers keeps the prefix in a text model that it takes out of a model of text and images. Raises
        :class:`BridgeError` with ``where``, the folder, for a tensor that is there twice.
        """
        renamed: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            for text_name, part in self._parts(of_text_model(name), info):
                if text_name in renamed:
                    raise BridgeError(
                        f"{where} has {text_name} twice, with and without the prefix {_WITHIN}; fetch the folder again"
                    )
                renamed[text_name] = part
        return renamed

    def _parts(self, name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        fused = _FUSED.fullmatch(name) if self.fused and len(info.shape) == 3 and info.nbytes else None
        fused = None if fused and info.shape[1] % 2 and fused[2] == "gate_up" else fused
        if fused is None:
            yield name, info
            return
        layer, kind = fused.groups()
        _, rows, columns = info.shape
        parts = ("down",) if kind == "down" else ("gate", "up")
        for number, piece in enumerate(info.rows((rows // len(parts), columns))):
            expert, part = divmod(number, len(parts))
            yield f"{layer}.{expert}.{parts[part]}_proj.weight", piece


AS_TEXT = DiskForm()
