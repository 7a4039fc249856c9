"""The package's files as syntax trees: modules by dotted name, each parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (*sorted(path.name for path in ROOT.glob("skyrl_megatron*/") if path.name.isidentifier()), "bridges")
"""The core, the packages around it, and the bridges."""


def foreign_packages(root: Path = ROOT) -> list[str]:
    """Return a sentence for each package that Python would not import from ``root``."""
    places = {}
    for name in PACKAGES:
        spec = find_spec(name)
        places[name] = next(iter((spec and spec.submodule_search_locations) or ["nowhere"]))
    return [
        f"{name} is imported from {place}, not from {root}: is its folder missing? Else set PYTHONPATH={root}"
        for name, place in places.items()
        if not Path(place).is_relative_to(root)
    ]


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name → tree of every file of the package and of ``bridges``; a package's name is its ``__init__``."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {dotted(path): ast.parse(path.read_text()) for path in files}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def imported(module: str) -> Iterator[tuple[str, str | None]]:
    """Every ``(module, name)`` that a file imports of this project, at any depth, lazily or for types only; a name of
    None is a plain ``import module``."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                if f"{base}.{alias.name}" in modules():
                    yield f"{base}.{alias.name}", None
                elif base in modules():
                    yield base, alias.name


def _base(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package(module) else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


@cache
def resolve(module: str, name: str | None) -> frozenset[str]:
    """Return the modules that an import of ``name`` from ``module`` comes to: through packages that re-export it, the
    file that defines it; all of a package that is imported whole."""
    if not is_package(module):
        return frozenset({module})
    sources = [
        (source, given)
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.ImportFrom)
        for source in [_base(module, node)]
        for given in node.names
        if name in {given.asname or given.name, None} and source in modules()
    ]
    if not sources:
        return frozenset({module})
    found: set[str] = set()
    for source, alias in sources:
        inner = f"{source}.{alias.name}"
        found |= resolve(inner, None) if inner in modules() else resolve(source, alias.name)
    return frozenset(found)
