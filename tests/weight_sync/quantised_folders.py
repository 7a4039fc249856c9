"""HF folders in 8 bits, made by vLLM's own quantisers, and the bfloat16 folders that they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FP8 = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3")
FORMS: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8, scales 2^n": FP8 | {"scale_fmt": "ue8m0"},
    "mxfp8": dict(quant_method="mxfp8"),
    "mxfp8 of ModelOpt": dict(quant_method="modelopt", quant_algo="MXFP8"),
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(hidden_size=256, head_dim=64, moe_intermediate_size=256, num_experts=4, num_attention_heads=8),
    "deepseek_v3": dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, q_lora_rank=128)
    | dict(n_routed_experts=4),
}
"""Of blocks of 128 rows and columns, as engines of tp2 can hold them, and tp4 of a trainer cuts them."""
SIZES = {family: dict(num_hidden_layers=2, num_key_value_heads=4) | sizes for family, sizes in SIZES.items()}


def left_out(family: str, form: str) -> dict[str, list[str]]:
    """What the configuration leaves out: of Qwen3's routers one alone, as vLLM quantises those that it does not."""
    modules = ["lm_head"] + (["model.layers.0.mlp.gate"] if family == "qwen3_moe" else [])
    key = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}.get(form.split(",")[0], "ignore")
    if form == "mxfp8":  # the output layer is quantised, too
        modules = modules[1:]
    return {key: modules}


def is_quantised(name: str, family: str, form: str) -> bool:
    """Whether a release in that form would have a weight in 8 bits."""
    if name == "lm_head.weight":
        return form == "mxfp8"
    if name.endswith("mlp.gate.weight"):
        return family == "qwen3_moe" and "layers.0." not in name
    return "layers." in name and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def by_vllm(config: dict[str, Any], weight: Any) -> tuple[Any, Any]:
    """Values and scales of a matrix."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if config["quant_method"] != "fp8":
        return _mxfp8_e4m3_quantize_torch(weight)
    plain: Any = per_block_cast_to_fp8
    powers = config.get("scale_fmt") == "ue8m0"
    return plain._torchdynamo_orig_callable(weight, block_size=config["weight_block_size"], use_ue8m0=powers)


def write(root: Path, family: str, form: str, seed: int) -> tuple[Path, Path]:
    """Write a model in bfloat16 to ``root/plain`` and in 8 bits to ``root/quantised``; return both. There are a block
    of zeros and a NaN in it."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.support.tiny_models import write_tiny_model

    plain = write_tiny_model(family, root / "plain", seed, "bfloat16", **SIZES[family])
    tensors = load_file(plain / "model.safetensors")
    odd = sorted(name for name in tensors if name.endswith("experts.1.down_proj.weight"))
    tensors[odd[0]][:128, :128] = 0
    tensors[odd[-1]][200, 5], tensors[odd[-1]][3, 200] = torch.nan, 3e4
    save_file(tensors, plain / "model.safetensors")
    quantised = root / "quantised"
    shutil.copytree(plain, quantised)
    kept, config = {}, FORMS[form]
    suffix = "_scale_inv" if config["quant_method"] == "fp8" else "_scale"
    for name, tensor in tensors.items():
        kept[name] = tensor
        if is_quantised(name, family, form):
            values, scales = by_vllm(config, tensor)
            kept |= {name: values, name + suffix: scales}
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, quantised / "model.safetensors")
    written = json.loads((quantised / "config.json").read_text())
    written["quantization_config"] = config | left_out(family, form)
    (quantised / "config.json").write_text(json.dumps(written))
    return plain, quantised
