"""A model of an unknown family next to the known ones: the nearest, tensor by tensor, and a table to start from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridges.errors import BridgeError
from bridges.families import get_family, supported
from bridges.family import Family
from bridges.hf_io import HfFolder
from bridges.rows import Row, Shape

CALLED = {
    "can_handle": ("path",),
    "from_hf_pretrained": ("path",),
    "import_ckpt": ("hf_model_id", "megatron_path"),
    "export_ckpt": ("megatron_path", "hf_path"),
}
"""What the steps of the guide call of ``AutoBridge``, with which arguments: those of release 0.3.1."""
RELEASE, WANTS = "0.3.1", {"megatron-core": "<0.17", "transformers": "<5"}
"""The newest release that was read, and what it asks for."""
GUIDE = "docs/guides/other-families.md"
_OF_MEGATRON = ("embedding.", "decoder.", "output_layer.", "mtp.", "language_model.")


@dataclass(frozen=True, slots=True)
class Converter:
    """A class of Megatron-Bridge that converts an architecture. ``rows``: name on disk, ``*`` for a number → name in
    Megatron, of those that stand in its source as they are."""

    release: str
    name: str
    path: Path
    rows: Mapping[str, str]


def located(folder: Path | None) -> Path | None:
    """Return the folder of the package ``megatron.bridge``: below ``folder``, where ``pip install --target`` put it,
    or installed here. Raises BridgeError when it is not below ``folder``, or is not what the guide's steps call."""
    root = folder / "megatron" / "bridge" if folder else _installed()
    if root is None:
        return None
    source = root / "models" / "conversion" / "auto_bridge.py"
    if not source.is_file():
        raise BridgeError(
            f"{source.parent}: no {source.name}: {folder or root} holds no Megatron-Bridge; pip install --no-deps "
            "--target FOLDER megatron-bridge makes a folder that does"
        )
    if wrong := differences(source.read_text()):
        raise BridgeError(
            f"{source}: {'; '.join(wrong)}. The steps in {GUIDE} are for megatron-bridge=={RELEASE}: take that release"
        )
    return root


def differences(source: str) -> list[str]:
    """List where ``AutoBridge`` in a source is not as :data:`CALLED` says."""
    found = {
        method.name: [each.arg for each in method.args.args]
        for kind in ast.parse(source).body
        if isinstance(kind, ast.ClassDef) and kind.name == "AutoBridge"
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    return [
        f"AutoBridge.{name} takes no {argument}" if name in found else f"AutoBridge has no {name}"
        for name, arguments in CALLED.items()
        for argument in arguments
        if argument not in found.get(name, ())
    ]


def converter(root: Path, architecture: str) -> Converter | None:
    """Find what converts an architecture (``config.json``)."""
    for path in sorted((root / "models").rglob("*_bridge.py")):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef) and architecture in _sources(kind):
                return Converter(_release(root), kind.name, path, dict(_rows(kind)))
    return None


def told(folder: Path | None, architecture: str, names: Mapping[str, object]) -> str:
    """Say what Megatron-Bridge has of a model. ``names``: on disk, with ``{layer}`` and ``{expert}`` for numbers."""
    root = located(folder)
    if root is None:
        return (
            f"Megatron-Bridge is not here: release {RELEASE} asks for {_conflicts()}. pip install --no-deps --target "
            f"FOLDER megatron-bridge, then --megatron-bridge FOLDER shows what it has of {architecture}; {GUIDE} says "
            "the rest."
        )
    found = converter(root, architecture)
    if found is None:
        return f"Megatron-Bridge {_release(root)} does not convert {architecture} either"
    starred = {name: re.sub(r"\{(layer|expert)\}", "*", name) for name in names}
    named = {name: found.rows[star] for name, star in starred.items() if star in found.rows}
    lines = [
        f"Megatron-Bridge {found.release} converts {architecture}: {found.name} in {found.path} spells out "
        f"{len(named)} of {len(names)} tensors. {GUIDE} says how to run it."
    ]
    return "\n".join([*lines, *(f"  {name} → {target}" for name, target in named.items())])


def _installed() -> Path | None:
    try:
        spec = find_spec("megatron.bridge")
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _release(root: Path) -> str:
    found = sorted(root.parent.parent.glob("megatron_bridge-*.dist-info"))
    return found[-1].name.removeprefix("megatron_bridge-").removesuffix(".dist-info") if found else "of that folder"


def _conflicts() -> str:
    """Name what a release asks for, and what is here instead."""
    said = []
    for package, wanted in WANTS.items():
        try:
            said.append(f"{package}{wanted} (here: {version(package)})")
        except PackageNotFoundError:
            said.append(f"{package}{wanted}")
    return " and ".join(said)


def _sources(kind: ast.ClassDef) -> set[str]:
    """Return the architectures that a class is registered for: names, attributes or texts."""
    calls = [each for each in kind.decorator_list if isinstance(each, ast.Call)]
    return {
        str(getattr(word.value, "id", None) or getattr(word.value, "attr", None) or getattr(word.value, "value", None))
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "register_bridge"
        for word in call.keywords
        if word.arg == "source"
    }


def _rows(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (name on disk, name in Megatron) of the dictionaries and mappings of a class that are written out."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Dict):
            pairs = [(_text(key), _text(value)) for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call):
            words = {word.arg: word.value for word in node.keywords}
            target = _text(words.pop("megatron_param", None))
            pairs = [(_text(text), target) for value in words.values() for text in ast.walk(value)]
        else:
            continue
        for one, other in pairs:
            if one and other and one.startswith(_OF_MEGATRON) != other.startswith(_OF_MEGATRON):
                yield (other, one) if one.startswith(_OF_MEGATRON) else (one, other)


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


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

    ``megatron_bridge``: a folder with Megatron-Bridge, see :func:`bridges.nearest.located`."""
    folder = HfFolder(path)
    found = nearest(folder)
    table = skeleton(found, folder.config)
    other = told(megatron_bridge, str(next(iter(folder.config.get("architectures") or [""]))), found.shapes)
    return facts(found) | {"skeleton": table, "megatron_bridge": other}, f"{report(found)}\n\n{table}\n\n{other}"
