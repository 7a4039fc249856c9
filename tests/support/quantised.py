"""Quantised copies of a HF folder, and what they mean by other code than ours."""

from __future__ import annotations

import json
import shutil

BLOCK = (16, 32)
"""Of fp8: small, so that the tiny models' matrices are no multiples of it and their shards begin inside of blocks."""
KINDS = ("fp8", "int8 channels", "int8 groups", "int8 with activations")
_GROUP = 8


def quantise(folder, root, kind):
    """Write ``folder`` quantised to ``root/quantised``, and the same in bfloat16 to ``root/plain``; return both."""
    from safetensors.torch import load_file

    kept, plain = {}, {}
    make = _fp8 if kind == "fp8" else _int8
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "layers" in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            quantised, plain[name] = make(tensor, kind)
            kept |= {name.removesuffix("weight") + end: value for end, value in quantised.items()}
        else:
            kept[name] = plain[name] = tensor.bfloat16()
    _write(folder, root / "quantised", kept, {"quantization_config": _config(kind)})
    _write(folder, root / "plain", plain, {})
    return root / "quantised", root / "plain"


def _write(like, folder, tensors, config):
    from safetensors.torch import save_file

    shutil.copytree(like, folder)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"} | config))


def _config(kind):
    if kind == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    group = {"targets": ["Linear"], "weights": _scheme(kind).weights.model_dump(mode="json")}
    name = "int-quantized" if kind == "int8 with activations" else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


def _fp8(weight, kind):
    """Scales of 8 bits of precision, as whose products with fp8 are exact in fp32; the definition in fp64."""
    import torch

    rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, BLOCK, strict=True))
    scale = torch.empty(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(len(scale)):
        for column in range(scale.shape[1]):
            scale[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    scale = (scale * 1.01).bfloat16().float()
    every = scale[rows][:, columns]
    values = (weight / every).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, (values.double() * every.double()).bfloat16()


def _scheme(kind):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"strategy": "group", "group_size": _GROUP} if kind == "int8 groups" else {"strategy": "channel"}
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="int", **group))


def _int8(weight, kind):
    """As compressed-tensors writes and reads it."""
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    width = _GROUP if kind == "int8 groups" else weight.shape[1]
    scale = (weight.view(len(weight), -1, width).abs().amax(-1) / 127 * 1.01).bfloat16()
    scheme = _scheme(kind)
    compressor = IntQuantizationCompressor if kind == "int8 with activations" else PackedQuantizationCompressor
    values = compressor.compress({"weight": weight.bfloat16(), "weight_scale": scale}, scheme)
    return values, compressor.decompress(values, scheme)["weight"]
