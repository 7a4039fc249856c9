"""What a model folder holds besides weights: config, tokenizer, generation config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bridges.errors import BridgeError
from bridges.files import refuse_outside, refuse_special
from bridges.plan import PREDICTION_LAYERS
from bridges.staging import write_file

# Small files of a HF folder that belong to a model besides weights and config; its licence goes with it.
ASSETS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json",
    "chat_template*", "*.model", "*.tiktoken", "preprocessor_config.json", "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
HF_SUBFOLDER = "huggingface"  # config, tokenizer and generation config inside a Megatron folder; never weights
CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HF_DTYPE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of ``bf16``, ``fp16``, ``fp32`` or None (keep what is stored)."""
    if name is None:
        return None
    if name not in CAST_TO:
        raise BridgeError(f"--dtype {name} is not known; use one of {', '.join(CAST_TO)}")
    return CAST_TO[name]


def output_config(config: Mapping[str, Any], dtype: torch.dtype | None, drop_mtp: bool) -> dict[str, Any]:
    """Return the output's ``config.json``: the input's, with its dtype and number of prediction layers made true.

    ``quantization_config`` goes: what is written is never quantised.
    """
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype in HF_DTYPE:
        for key in ("dtype", "torch_dtype"):
            if key in result:
                result[key] = HF_DTYPE[dtype]
    if drop_mtp:
        result |= {key: 0 for key in PREDICTION_LAYERS if key in result}
    return result


def asset_files(source: Path) -> list[Path]:
    """Return the small files of a HF folder besides ``config.json``.

    Raises :class:`BridgeError` for special files, and for links to files elsewhere, which would be published with the
    model.
    """
    found = []
    for path in (path for pattern in ASSETS for path in sorted(source.glob(pattern))):
        refuse_special(path)
        if path.is_file() and path.suffix != ".safetensors":
            refuse_outside(path, source)
            found.append(path)
    return found


def copy_assets(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    """Copy tokenizer and generation config from ``source`` to ``target`` and write ``config`` beside them.

    Raises :class:`BridgeError` as :func:`asset_files` does.
    """
    target.mkdir(exist_ok=True)
    for path in asset_files(source):
        write_file(target / path.name, path.read_bytes())
    write_file(target / "config.json", (json.dumps(config, indent=2) + "\n").encode())
