"""What starting an engine needs to know of the model's folder: its ``config.json``, and the memory it takes on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridges import json_file
from bridges.errors import BridgeError
from bridges.files import check_folder
from skyrl_megatron.config.hf_model import element_bytes, kv_bytes_per_token
from skyrl_megatron.errors import EngineError


def hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a HF folder, all of whose files vLLM may then open. Raises EngineError."""
    try:
        check_folder(folder)
        return json_file.read_hf_config(folder)
    except BridgeError as error:
        raise EngineError(f"{folder}: no readable config.json ({error}); give a HF folder as the model") from error


def cpu_kv_cache_bytes(folder: Path, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """Return room for ``max_num_seqs`` sequences of full length, in whole MiB.

    At most a quarter of the memory available now, and at least two such sequences.
    """
    import psutil

    a_sequence = _kv_bytes_per_token(folder, dtype) * (-(-max_model_len // 128) + 1) * 128
    wanted: int = min(a_sequence * max_num_seqs, psutil.virtual_memory().available // 4)
    return -(-max(wanted, 2 * a_sequence) // (1 << 20)) << 20


def _kv_bytes_per_token(folder: Path, dtype: str) -> int:
    """Return the bytes of a token; a file that leaves out a size has transformers' default of its family."""
    hf = hf_config(folder)
    try:
        return kv_bytes_per_token(hf, dtype)
    except KeyError:
        from bridges.hf_config import read_config  # loads transformers, which a file with all sizes need not wait for

    try:
        return kv_bytes_per_token(read_config(hf, str(hf.get("model_type"))).to_dict(), dtype)
    except (BridgeError, KeyError, TypeError) as error:
        raise EngineError(
            f"{folder}: config.json does not say how large its attention is ({error}); fetch the file again"
        ) from error


def cpu_weight_bytes(folder: Path, dtype: str) -> int:
    """Return the memory of the weights on CPU: as they are on disk, or more where ``dtype`` is wider."""
    hf = hf_config(folder)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return int(on_disk * max(element_bytes(dtype, hf) / element_bytes("auto", hf), 1))
