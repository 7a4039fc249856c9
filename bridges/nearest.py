"""Compare a model of an unknown family with the known ones: nearest family, and a skeleton of a new table."""

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
"""Methods of ``AutoBridge`` in release 0.3.1 that the guide calls, with their arguments."""
RELEASE, WANTS = "0.3.1", {"megatron-core": "<0.17", "transformers": "<5"}
"""The newest supported release of Megatron-Bridge, and its requirements."""
GUIDE = "docs/guides/other-families.md"
_OF_MEGATRON = ("embedding.", "decoder.", "output_layer.", "mtp.", "language_model.")


@dataclass(frozen=True, slots=True)
class Converter:
    """A class of Megatron-Bridge that converts an architecture.

    ``rows``: HF name with ``*`` for numbers → Megatron name, for the names that its source contains literally.
    """

    release: str
    name: str
    path: Path
    rows: Mapping[str, str]


def find_megatron_bridge(folder: Path | None) -> Path | None:
    """Return the folder of the package ``megatron.bridge``: in ``folder`` (``pip install --target``) or installed.

    None if it is not installed. Raises BridgeError if ``folder`` lacks it, or if its interface is not
    :data:`CALLED`.
    """
    root = folder / "megatron" / "bridge" if folder else _installed()
    if root is None:
        return None
    source = root / "models" / "conversion" / "auto_bridge.py"
    if not source.is_file():
        raise BridgeError(
            f"{source.parent}: no {source.name}: {folder or root} holds no Megatron-Bridge; pip install --no-deps "
            "--target FOLDER megatron-bridge creates such a folder"
        )
    if wrong := differences(source.read_text()):
        raise BridgeError(
            f"{source}: {'; '.join(wrong)}. The steps in {GUIDE} are for megatron-bridge=={RELEASE}: use that release"
        )
    return root


def differences(source: str) -> list[str]:
    """List the differences between ``AutoBridge`` in a source text and :data:`CALLED`."""
    methods = {
        method.name: [argument_node.arg for argument_node in method.args.args]
        for kind in ast.parse(source).body
        if isinstance(kind, ast.ClassDef) and kind.name == "AutoBridge"
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    return [
        f"AutoBridge.{name} has no argument {argument}" if name in methods else f"AutoBridge has no {name}"
        for name, arguments in CALLED.items()
        for argument in arguments
        if argument not in methods.get(name, ())
    ]


def converter(root: Path, architecture: str) -> Converter | None:
    """Return the class of Megatron-Bridge that converts an architecture of ``config.json``; None without one."""
    for path in sorted((root / "models").rglob("*_bridge.py")):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef) and architecture in _sources(kind):
                return Converter(_release(root), kind.name, path, dict(_rows(kind)))
    return None


def megatron_bridge_report(folder: Path | None, architecture: str, names: Mapping[str, object]) -> str:
    """Return a text on Megatron-Bridge's support of a model.

    ``names``: HF names with ``{layer}`` and ``{expert}`` for numbers.
    """
    root = find_megatron_bridge(folder)
    if root is None:
        return (
            f"Megatron-Bridge is not installed: release {RELEASE} asks for {_conflicts()}. Run pip install --no-deps "
            f"--target FOLDER megatron-bridge; --megatron-bridge FOLDER then shows its names for {architecture} (see "
            f"{GUIDE})."
        )
    match = converter(root, architecture)
    if match is None:
        return f"Megatron-Bridge {_release(root)} does not convert {architecture} either"
    starred = {name: re.sub(r"\{(layer|expert)\}", "*", name) for name in names}
    named = {name: match.rows[star] for name, star in starred.items() if star in match.rows}
    lines = [
        f"Megatron-Bridge {match.release} converts {architecture}: {match.name} in {match.path} names "
        f"{len(named)} of {len(names)} tensors. See {GUIDE} for how to run it."
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
    """Return the requirements of the release with the installed versions, as text."""
    requirements = []
    for package, required in WANTS.items():
        try:
            requirements.append(f"{package}{required} (here: {version(package)})")
        except PackageNotFoundError:
            requirements.append(f"{package}{required}")
    return " and ".join(requirements)


def _sources(kind: ast.ClassDef) -> set[str]:
    """Return the architectures that a class is registered for, given as names, attributes or strings."""
    calls = [each for each in kind.decorator_list if isinstance(each, ast.Call)]
    return {
        str(getattr(word.value, "id", None) or getattr(word.value, "attr", None) or getattr(word.value, "value", None))
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "register_bridge"
        for word in call.keywords
        if word.arg == "source"
    }


def _rows(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (HF name, Megatron name) of the literal dictionaries and mappings of a class."""
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
class FamilyMatch:
    """Comparison of a folder's tensors with a family's table. Names have ``{layer}`` and ``{expert}`` for numbers.

    ``shapes``: all names of the folder → shape of the first such tensor. ``rows``: name → (part of the table, row),
    for names in the table. ``missing``: names of the table that the folder lacks, except optional rows and parts of
    the table that the folder does not use.
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
        """Fraction of all names that both have."""
        return len(self.rows) / (len(self.shapes) + len(self.missing))


def nearest(folder: HfFolder) -> FamilyMatch:
    """Compare a HF folder with all families; return the match with most names in common."""
    shapes: dict[str, Shape] = {}
    for name, shape in folder.shapes().items():
        shapes.setdefault(_without_numbers(name), tuple(shape))
    families = (get_family(model_type) for model_type in supported())
    return max((compare_family(family, shapes) for family in families), key=lambda found: found.share)


def compare_family(family: Family, shapes: Mapping[str, Shape]) -> FamilyMatch:
    """Compare a family's table with the names and shapes of a folder."""
    table = {part: getattr(family, part) for part in PARTS}
    rows: dict[str, tuple[str, Row]] = {}
    for part in PARTS:
        for row in table[part]:
            for name in row.hf_names:
                if name in shapes:
                    rows.setdefault(name, (part, row))  # the first of two rows is the one of released models
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
    return FamilyMatch(family, shapes, rows, tuple(dict.fromkeys(missing)))


def report(found: FamilyMatch) -> str:
    """Return the comparison as text, one line per tensor."""
    width = max(map(len, (*found.shapes, *found.missing)))
    lines = [
        f"nearest family: {found.family.model_type}, which has {len(found.rows)} of {len(found.shapes)} tensors and "
        f"{len(found.missing)} that are missing here"
    ]
    for name, shape in found.shapes.items():
        _, row = found.rows.get(name, (None, None))
        target = f"→ {row.megatron}, {type(row).__name__}" if row else "has no row"
        lines.append(f"  {name:<{width}}  {list(shape)!s:<16}  {target}")
    lines += [f"  {name:<{width}}  {'':<16}  missing" for name in found.missing]
    return "\n".join(lines)


def facts(found: FamilyMatch) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    return {
        "nearest": found.family.model_type,
        "share": round(found.share, 3),
        "rows": {name: row.megatron for name, (_, row) in found.rows.items()},
        "unknown": {name: list(found.shapes[name]) for name in found.unknown},
        "missing": list(found.missing),
    }


def skeleton(found: FamilyMatch, config: Mapping[str, Any]) -> str:
    """Return the source of a first table for ``bridges/families/<model_type>.py``.

    It has the nearest family's rows for tensors of the folder, and a comment for each tensor without a row.
    ``config``: ``config.json``.
    """
    model_type = str(config.get("model_type"))
    near = found.family.model_type
    kinds = sorted({type(row).__name__ for _, row in found.rows.values()})
    parts = "\n".join(_part(found, part) for part in PARTS)
    architecture = next(iter(config.get("architectures") or [""]))
    return f'''"""{model_type}: describe its differences in one line."""

from __future__ import annotations

from bridges.families.{near} import FAMILY as NEAREST
from bridges.family import Family
from bridges.rows import {", ".join(kinds)}

FAMILY = Family(
    model_type="{model_type}",
    architecture="{architecture}",
    read_shape=NEAREST.read_shape,  # replace both if the config has other keys or options
    read_megatron=NEAREST.read_megatron,
{parts}
)'''


def _part(found: FamilyMatch, part: str) -> str:
    """Return the source of one field of the table."""
    here = {id(row): row for of, row in found.rows.values() if of == part}
    lines = [f"        {_spelled(row)}," for row in here.values()]
    if part == "layer":
        lines += [f"        # no row: {name} {list(found.shapes[name])}" for name in found.unknown]
    return "\n".join([f"    {part}=(", *lines, "    ),"])


def _spelled(row: Row) -> str:
    """Return the source of a row."""
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


def nearest_report(path: Path, megatron_bridge: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return (JSON object, text) of the comparison for a HF folder of an unknown family, with the table skeleton.

    ``megatron_bridge``: a folder with Megatron-Bridge, see :func:`find_megatron_bridge`.
    """
    folder = HfFolder(path)
    match = nearest(folder)
    table = skeleton(match, folder.config)
    architecture = str(next(iter(folder.config.get("architectures") or [""])))
    other = megatron_bridge_report(megatron_bridge, architecture, match.shapes)
    return facts(match) | {"skeleton": table, "megatron_bridge": other}, f"{report(match)}\n\n{table}\n\n{other}"
