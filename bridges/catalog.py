"""The families as a list and as BRIDGES.md, both generated from the tables.

``python -m bridges.catalog`` rewrites BRIDGES.md; a test fails when it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bridges.families import SUPPORTED, get_family, supported
from bridges.family import Family
from bridges.rows import Row
from bridges.verified import LAYOUTS

FILE = Path(__file__).resolve().parents[1] / "BRIDGES.md"
HEAD = """\
# Bridges: supported families and their tables

Generated from `bridges/families/*.py` by `python -m bridges.catalog`; do not edit. Shapes use the letters of
`bridges/rows.py` and are those on disk (of one expert where `stacked`). `split` is the dimension of the Megatron
tensor that is split over tp (over etp for experts); gate and up are split each on its own, q, k, v by KV group.

## Verified

Every family: names and shapes equal those transformers writes, round trips are bitwise through tensors and through
folders, splits over tp, etp and padded vocabularies are undone exactly. Logits and every parameter's gradient equal
those of transformers, fp32, in the layouts listed; the embedding of `pad_token_id` is trained like any other, where
transformers leaves it as it is.

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
    lines = ["all: names, shapes, bitwise round trip, exact splits; logits and gradients equal transformers in:"]
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
    """Return the text of BRIDGES.md."""
    families = [get_family(name) for name in SUPPORTED]
    summary = [
        f"| `{family.model_type}` | {', '.join(f'`{alias}`' for alias in family.aliases)} | {family.architecture} | "
        f"{layouts(family.model_type)} |"
        for family in families
    ]
    return HEAD + "\n".join(summary) + "\n" + "\n".join(map(_section, families)) + "\n"


if __name__ == "__main__":
    FILE.write_text(document())
    print(f"wrote {FILE}", file=sys.stderr)
