"""A model of an unknown family beside the known ones: the nearest, tensor by tensor, and a table to start from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bridges.families import get_family, supported
from bridges.family import Family
from bridges.hf_io import HfFolder
from bridges.megatron_bridge import told
from bridges.rows import Row, Shape

PARTS = ("layer", "attention", "window", "delta_net", "dense", "moe", "embedding", "head")
"""The fields of a :class:`Family` that hold rows."""
_NUMBERS = (
    (re.compile(r"\.layers\.\d+\."), ".layers.{layer}."),
    (re.compile(r"\.experts\.\d+\."), ".experts.{expert}."),
)


@dataclass(frozen=True, slots=True)
class Likeness:
    """The tensors of a folder beside a family's table. Names have ``{layer}`` and ``{expert}`` for numbers.

    ``shapes``: all names of the folder → shape of the first such tensor. ``rows``: part of the table and row by name,
    of those that the table has. ``missing``: names of the table that the folder lacks, optional rows left out, and
    parts of the table of which it has nothing.
    """

    family: Family
    shapes: Mapping[str, Shape]
    rows: Mapping[str, tuple[str, Row]]
    missing: tuple[str, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the folder without a row."""
        return tuple(name for name in self.shapes if name not in self.rows)

    @property
    def share(self) -> float:
        """Names that both have, of all names."""
        return len(self.rows) / (len(self.shapes) + len(self.missing))


def nearest(folder: HfFolder) -> Likeness:
    """Return the likeness to the family that has most names in common with a HF folder."""
    shapes: dict[str, Shape] = {}
    for name, shape in folder.shapes().items():
        shapes.setdefault(_without_numbers(name), tuple(shape))
    families = (get_family(model_type) for model_type in supported())
    return max((likeness(family, shapes) for family in families), key=lambda found: found.share)


def likeness(family: Family, shapes: Mapping[str, Shape]) -> Likeness:
    """Compare a table with names and shapes of a folder."""
    table = {part: getattr(family, part) for part in PARTS}
    rows: dict[str, tuple[str, Row]] = {}
    for part in PARTS:
        for row in table[part]:
            for name in row.hf_names:
                if name in shapes:
                    rows.setdefault(name, (part, row))  # of two rows for a tensor, as released models have it
    used = {part for part, _ in rows.values()}
    missing = (
        name
        for part in PARTS
        if part in used
        for row in table[part]
        if row.when is None
        for name in row.hf_names
        if name not in shapes
    )
    return Likeness(family, shapes, rows, tuple(dict.fromkeys(missing)))


def report(found: Likeness) -> str:
    """Say tensor by tensor what the nearest family has."""
    width = max(map(len, (*found.shapes, *found.missing)))
    lines = [
        f"nearest family: {found.family.model_type}, which has {len(found.rows)} of {len(found.shapes)} tensors and "
        f"{len(found.missing)} that are not here"
    ]
    for name, shape in found.shapes.items():
        _, row = found.rows.get(name, (None, None))
        target = f"→ {row.megatron}, {type(row).__name__}" if row else "has no row"
        lines.append(f"  {name:<{width}}  {list(shape)!s:<16}  {target}")
    lines += [f"  {name:<{width}}  {'':<16}  not here" for name in found.missing]
    return "\n".join(lines)


def facts(found: Likeness) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "nearest": found.family.model_type,
        "share": round(found.share, 3),
        "rows": {name: row.megatron for name, (_, row) in found.rows.items()},
        "unknown": {name: list(found.shapes[name]) for name in found.unknown},
        "missing": list(found.missing),
    }


def skeleton(found: Likeness, config: Mapping[str, Any]) -> str:
    """Write a table to start from, for ``bridges/families/<model_type>.py``: the nearest family's rows of the tensors
    that are here, and a line for each of the others. ``config``: ``config.json``."""
    model_type = str(config.get("model_type"))
    near = found.family.model_type
    kinds = sorted({type(row).__name__ for _, row in found.rows.values()})
    parts = "\n".join(_part(found, part) for part in PARTS)
    architecture = next(iter(config.get("architectures") or [""]))
    return f'''"""{model_type}: what is its own, in a line."""

from __future__ import annotations

from bridges.families.{near} import FAMILY as NEAREST
from bridges.family import Family
from bridges.rows import {", ".join(kinds)}

FAMILY = Family(
    model_type="{model_type}",
    architecture="{architecture}",
    read_shape=NEAREST.read_shape,  # write both anew where the config has other keys or options
    read_megatron=NEAREST.read_megatron,
{parts}
)'''


def _part(found: Likeness, part: str) -> str:
    """Write the field of one part of the table."""
    here = {id(row): row for of, row in found.rows.values() if of == part}
    lines = [f"        {_spelled(row)}," for row in here.values()]
    if part == "layer":
        lines += [f"        # no row: {name} {list(found.shapes[name])}" for name in found.unknown]
    return "\n".join([f"    {part}=(", *lines, "    ),"])


def _spelled(row: Row) -> str:
    """Write a row as it is written in a table."""
    words = [repr(row.megatron), repr(row.hf), repr(row.shape)]
    defaults = {field.name: field.default for field in fields(row)}
    words += [
        f"{name}={getattr(row, name)!r}"
        for name, default in defaults.items()
        if name not in ("megatron", "hf", "shape") and getattr(row, name) != default
    ]
    return f"{type(row).__name__}({', '.join(words)})".replace("'", '"')


def _without_numbers(name: str) -> str:
    for pattern, placeholder in _NUMBERS:
        name = pattern.sub(placeholder, name, count=1)
    return name


def compared(path: Path, megatron_bridge: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return facts and text for the HF folder of an unknown family, table to start from included.

    ``megatron_bridge``: a folder with Megatron-Bridge, see :func:`bridges.megatron_bridge.located`."""
    folder = HfFolder(path)
    found = nearest(folder)
    table = skeleton(found, folder.config)
    other = told(megatron_bridge, str(next(iter(folder.config.get("architectures") or [""]))), found.shapes)
    return facts(found) | {"skeleton": table, "megatron_bridge": other}, f"{report(found)}\n\n{table}\n\n{other}"
