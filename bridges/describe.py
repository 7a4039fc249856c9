"""What a model folder holds, from its config and headers alone: nothing is loaded."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from bridges.plan import Plan
from bridges.source import MegatronSource, open_source


def inspect(path: Path, template: Path | None = None) -> dict[str, Any]:
    """Return architecture, parameters (all and active per token), dtypes, bytes and layout of a HF or Megatron folder.

    Active parameters: all but those of experts that a token is not routed to; the embedding counts in full. Buffers
    and multi-token-prediction layers are not counted.
    """
    source = open_source(path, template)
    plan = Plan.of(source.config)
    shapes = source.shapes()
    plan.check(shapes, str(path))
    config = plan.family.config(source.config)
    experts = plan.shape.dims.get("E", 0)
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    sizes = [(math.prod(entry.shape), entry.is_expert) for entry in plan.entries if not entry.is_buffer]
    total = sum(size for size, _ in sizes)
    active = sum(size * chosen // experts if is_expert else size for size, is_expert in sizes)
    bytes_by_dtype: Counter[str] = Counter()
    for name, shape in shapes.items():
        kind = source.dtype(name)
        bytes_by_dtype[str(kind).removeprefix("torch.")] += math.prod(shape) * kind.itemsize
    return {
        "path": str(path),
        "model_type": plan.family.model_type,
        "architecture": plan.family.architecture,
        "layers": len(plan.shape.moe),
        "moe_layers": sum(plan.shape.moe),
        "experts": experts,
        "experts_per_token": chosen,
        "parameters": total,
        "active_parameters": active,
        "tensors": len(shapes),
        "carried_tensors": sum(map(plan.is_passthrough, shapes)),
        "dtypes": dict(bytes_by_dtype),
        "bytes": sum(bytes_by_dtype.values()),
        "disk_bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "layout": _layout(source, path),
    }


def _layout(source: Any, path: Path) -> str:
    if isinstance(source, MegatronSource):
        files = len(list(path.glob("*.distcp")))
        chunks = sum(len(stored.chunks) for stored in source.checkpoint.tensors.values())
        stacked = any(not entry.is_expert and source.places[entry.name].axes for entry in source.plan.entries)
        layers = "layers stacked" if stacked else "layers by name"
        return f"Megatron torch_dist, {layers}, {chunks} chunks in {files} file{'s' * (files != 1)}"
    files = len(list(path.glob("*.safetensors")))
    method = getattr(source, "method", None)
    stored = f", {method} (sizes are those after dequantisation)" if method else ""
    return f"HF safetensors, {files} file{'s' * (files != 1)}{stored}"
