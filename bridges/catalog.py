"""The ``list`` and ``inspect`` commands, and the document of the supported families.

``python -m bridges.catalog`` writes docs/families.md, which is not in git (``launch/docs.sh``).
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from bridges.families import SUPPORTED, get_family, supported
from bridges.family import Family
from bridges.plan import Plan
from bridges.rows import Row
from bridges.source import MegatronSource, open_source
from bridges.verified import LAYOUTS


def inspect(path: Path, template: Path | None = None) -> dict[str, Any]:
    """Return architecture, parameters (all and active per token), dtypes, bytes and layout of a HF or Megatron folder.

    Active parameters exclude experts that a token is not routed to, and include the whole embedding. Buffers and
    multi-token-prediction layers are not counted. Raises :class:`BridgeError` for a bad or unsupported folder.
    """
    source = open_source(path, template)
    plan = Plan.of(source.config)
    shapes = source.shapes()
    plan.check(shapes, str(path))
    config = plan.family.config(source.config)
    experts = plan.shape.dims.get("E", 0)
    topk = getattr(config, "num_experts_per_tok", 0) or 0
    sizes = [(math.prod(entry.shape), entry.is_expert) for entry in plan.entries if not entry.is_buffer]
    total = sum(size for size, _ in sizes)
    active = sum(size * topk // experts if is_expert else size for size, is_expert in sizes)
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
        "experts_per_token": topk,
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
    stored = f", {method} (sizes are after dequantisation)" if method else ""
    return f"HF safetensors, {files} file{'s' * (files != 1)}{stored}"


FILE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
HEAD = """\
# Bridges: supported families and their tables

`python -m bridges.catalog` writes this page from `bridges/families/*.py`. Shapes are those on disk, in the letters of
`bridges/rows.py` (shape of one expert if `stacked`). `split` is the dimension of the Megatron tensor that is split
over tp (over etp for experts). Gate and up are split separately; q, k and v are split by KV group.

## Verified

For every family, names and shapes equal those of transformers, round trips through tensors and folders are bitwise
exact, and splits over tp, etp and padded vocabularies are exactly invertible. In the listed layouts, logits and the
gradients of all parameters equal those of transformers in fp32. The embedding of `pad_token_id` is trained like any
other; transformers does not train it.

| `model_type` | also | architecture | logits and gradients checked in |
|---|---|---|---|
"""


def layouts(model_type: str) -> str:
    """Return the layouts in which logits and gradients are checked, as text."""
    return ", ".join(LAYOUTS.get(model_type, ())) or "not checked yet"


def rows() -> list[dict[str, object]]:
    """Return one dictionary per family, for ``list --json``."""
    families = [get_family(name) for name in supported()]
    return [
        {
            "model_type": family.model_type,
            "aliases": list(family.aliases),
            "architecture": family.architecture,
            "exact": ["names", "shapes", "round trip", "split over tp/etp/vocabulary"],
            "parity_layouts": list(LAYOUTS.get(family.model_type, ())),
        }
        for family in families
    ]


def table() -> str:
    """Return the list as text."""
    lines = ["all: names, shapes, bitwise round trip, exact splits; logits and gradients equal transformers' in:"]
    for name in supported():
        family = get_family(name)
        also = f" ({', '.join(family.aliases)})" if family.aliases else ""
        lines.append(f"  {name + also:<24} {layouts(name)}")
    return "\n".join(lines)


def _row(row: Row) -> str:
    names = "<br>".join(f"`{name}`" for name in row.hf_names)
    notes = [type(row).__name__]
    notes += [f"when {row.when}"] if row.when else []
    notes += [word for word in ("stacked", "buffer", "vocab", "whole_under_te") if getattr(row, word)]
    split = "" if row.split is None else str(row.split)
    return f"| `{row.megatron}` | {names} | `{row.shape}` | {split} | {', '.join(notes)} |"


def _section(family: Family) -> str:
    groups = {
        "model": (*family.embedding, *family.head),
        "every layer": family.layer,
        "layers with full attention": family.attention,
        "layers with a sliding window": family.window,
        "layers with a gated delta net": family.delta_net,
        "layers without experts": family.dense,
        "layers with experts": family.moe,
    }
    lines = [f"\n## {family.model_type}", ""]
    for title, group in groups.items():
        if group:
            lines += [f"**{title}**", "", "| Megatron | HF | shape | split | |", "|---|---|---|---|---|"]
            lines += [*(_row(row) for row in group), ""]
    lines.append("Ignored on disk: " + ", ".join(f"`*{name}`" for name in family.ignored) + ".")
    return "\n".join(lines)


def document() -> str:
    """Return the text of docs/families.md."""
    families = [get_family(name) for name in SUPPORTED]
    summary = [
        f"| `{family.model_type}` | {', '.join(f'`{alias}`' for alias in family.aliases)} | {family.architecture} | "
        f"{layouts(family.model_type)} |"
        for family in families
    ]
    return HEAD + "\n".join(summary) + "\n" + "\n".join(map(_section, families)) + "\n"


if __name__ == "__main__":
    FILE.write_text(document())
