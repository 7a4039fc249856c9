"""HF folders that pass every check of files, of any size: their weights are a hole in a file that nothing reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write ``config.json``, all tensors that it asks for, a tokenizer and its chat template; returns ``folder``."""
    from bridges.plan import Plan
    from tests.support.tiny_models import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    ends = {"eos_token_id": 2, "pad_token_id": 0}  # as the tokenizer has them
    (folder / "config.json").write_text(json.dumps({**config, **ends}))
    header, end = {}, 0
    for name, shape in Plan.of(config).hf.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_sums(path: Path, rows: int = 8, **changes: Any) -> Path:
    """Write ``rows`` rows of the form of GSM8K as parquet; ``changes`` replace columns, and None leaves one out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "data_source": ["sums"] * rows,
        "prompt": [[{"role": "user", "content": f"{10 + n} + {20 + n}"}] for n in range(rows)],
        "env_class": ["gsm8k"] * rows,
        "reward_spec": [{"method": "rule", "ground_truth": str(30 + 2 * n)} for n in range(rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: values for name, values in (columns | changes).items() if values is not None}
    pq.write_table(pa.table(kept), path)
    return path
