"""What Megatron-Bridge knows of a model that has no table here, read in its source, as it cannot be imported beside
the packages that a run needs. ``docs/guides/other-families.md`` has the steps in an environment of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bridges.errors import BridgeError

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
