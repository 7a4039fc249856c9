"""Quantised HF folders seen as plain bf16: FP8 in blocks (DeepSeek-V3, Kimi-K2) and MXFP4 (gpt-oss).

FP8: ``w[i, j] = bf16(fp32(q[i, j]) · scale_inv[i // rows, j // columns])``, blocks as in ``weight_block_size``, the
last ones cut short (``inference/kernel.py`` of DeepSeek-V3). MXFP4: two 4-bit floats (E2M1, low nibble first) per
byte, 32 values share one power of two (OCP Microscaling Formats 1.0); on disk the matrix is transposed against the
bf16 layout. Tensors are dequantised one at a time as they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_io import HfFolder
from bridges.rows import Shape

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALE = "_scale_inv"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCKS, SCALES = "_blocks", "_scales"


def dequantize_fp8(quantized: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """Turn FP8 ``[m, n]`` and fp32 scales ``[⌈m/rows⌉, ⌈n/columns⌉]`` into bf16, a band of rows at a time."""
    rows, columns = block
    out = torch.empty(quantized.shape, dtype=torch.bfloat16)
    for band, scales in enumerate(scale_inv.float()):
        part = slice(band * rows, (band + 1) * rows)
        out[part] = quantized[part].float() * scales.repeat_interleave(columns)[: quantized.shape[1]]
    return out


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bytes ``[…, m, n/32, 16]`` and exponents ``[…, m, n/32]`` → bf16 ``[…, m, n]``."""
    values = torch.tensor(FP4_VALUES)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.int().sub(127).unsqueeze(-1))
    return scaled.to(torch.bfloat16).flatten(-2)


class DequantizedFolder:
    """A quantised HF folder under the names, shapes and dtype of its bf16 original."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        self.path: Path = folder.path
        quantization = folder.config["quantization_config"]
        self.method = quantization.get("quant_method")
        if self.method not in ("fp8", "mxfp4"):
            raise BridgeError(
                f"{self.path}/config.json: quant_method={self.method!r} cannot be dequantised exactly; use the bf16 "
                "release of the model, or one in fp8 or mxfp4"
            )
        rows, columns = quantization.get("weight_block_size") or (128, 128)
        self.block = (int(rows), int(columns))
        self.config = self._plain_config()
        self._shapes = self._fp8_shapes() if self.method == "fp8" else self._mxfp4_shapes()

    def _plain_config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.folder.config.items() if key != "quantization_config"}
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = "bfloat16"
        return config

    def _fp8_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, info in self.folder.tensors.items():
            if name.endswith(FP8_SCALE):
                if name.removesuffix(FP8_SCALE) not in self.folder.tensors:
                    raise BridgeError(f"{self.path}: {name} belongs to no tensor; fetch the folder again")
                continue
            shapes[name] = info.shape
            if info.dtype in FP8:
                scale = self.folder.tensors.get(name + FP8_SCALE)
                grid = tuple(-(-size // step) for size, step in zip(info.shape, self.block, strict=True))
                if scale is None or scale.shape != grid:
                    found = "missing" if scale is None else list(scale.shape)
                    raise BridgeError(
                        f"{self.path}: {name}{FP8_SCALE} is {found}, expected {list(grid)} for blocks of "
                        f"{list(self.block)}; fetch the folder again"
                    )
        return shapes

    def _mxfp4_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, info in self.folder.tensors.items():
            if name.endswith(BLOCKS):
                plain = name.removesuffix(BLOCKS)
                scale = self.folder.tensors.get(plain + SCALES)
                if scale is None or len(info.shape) != 4 or scale.shape != info.shape[:-1]:
                    found = "missing" if scale is None else list(scale.shape)
                    raise BridgeError(
                        f"{self.path}: {plain}{SCALES} is {found}, expected {list(info.shape[:-1])}; fetch the folder "
                        "again"
                    )
                experts, rows, groups, width = info.shape
                shapes[plain] = (experts, groups * width * 2, rows)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in self.folder.tensors):
                shapes[name] = info.shape
        return shapes

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor, as in a bf16 folder."""
        return dict(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """bf16 for what is dequantised, else the dtype on disk."""
        if name not in self.folder.tensors or self.folder.dtype(name) in FP8:
            return torch.bfloat16
        return self.folder.dtype(name)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor, or its slice ``[index]``, dequantised if it is quantised."""
        if name not in self.folder.tensors:
            blocks = self.folder.read(name + BLOCKS, index)
            scales = self.folder.read(name + SCALES, index)
            return dequantize_mxfp4(blocks, scales).transpose(-1, -2)
        tensor = self.folder.read(name, index)
        if tensor.dtype in FP8:
            return dequantize_fp8(tensor, self.folder.read(name + FP8_SCALE), self.block)
        return tensor
