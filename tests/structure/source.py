"""The package's files as syntax trees: modules by dotted name, each parsed once."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = "skyrl_megatron"
AROUND = {
    "skyrl_megatron_lora": 1,
    "skyrl_megatron_parts": 2,
    "skyrl_megatron_supervised": 3,
    "skyrl_megatron_agents": 3,
    "skyrl_megatron_observe": 4,
    "skyrl_megatron_tools": 5,
}
"""Package around the core → its height. A package may import the core and lower packages; the core imports none."""
PACKAGES = tuple(name for name in (CORE, *AROUND, "bridges") if (ROOT / name).is_dir())
"""The core, the packages around it, and the bridges. A copy of the core has fewer."""


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
def files() -> dict[str, Path]:
    """Dotted name → every file of the packages and of ``bridges``; a package's name is its ``__init__``."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {dotted(path): path for path in paths}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name → tree of every file. Not for use at collection: it takes seconds, in every process of a run."""
    return {name: ast.parse(path.read_text()) for name, path in files().items()}


def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, which is parsed once if it is of the packages."""
    return modules()[dotted(path)] if path.relative_to(ROOT).parts[0] in PACKAGES else ast.parse(path.read_text())


@cache
def import_statements(module: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return those of a file, at any depth."""
    return tuple(node for node in ast.walk(modules()[module]) if isinstance(node, ast.Import | ast.ImportFrom))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def path_of(module: str) -> Path:
    """Return the file of a module of this project."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def for_types(tree: ast.AST) -> set[int]:
    """Return the ids of all nodes in blocks that only type checkers read."""
    return {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }


@cache
def imported(module: str, *, types: bool = True) -> tuple[tuple[str, str | None], ...]:
    """Every ``(module, name)`` that a file imports of this project, at any depth, lazily too; a name of None is a
    plain ``import module``. ``types``: also what it imports for types only."""
    skipped = set() if types else for_types(modules()[module])
    found: list[tuple[str, str | None]] = []
    for node in import_statements(module):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name in modules()]
        else:
            base = _base(module, node)
            for alias in node.names:
                if f"{base}.{alias.name}" in modules():
                    found.append((f"{base}.{alias.name}", None))
                elif base in modules():
                    found.append((base, alias.name))
    return tuple(found)


def _base(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package(module) else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def closure(starts: list[str]) -> set[str]:
    """Return every module that is loaded sooner or later: what ``starts`` import, lazily too, and the packages that
    the imported modules are in. Not what is imported for types only, or by a string."""
    reached: set[str] = set()
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        parts = module.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        waiting += [target for target, _ in imported(module, types=False)]
    return reached


@cache
def resolve(module: str, name: str | None) -> frozenset[str]:
    """Return the modules that an import of ``name`` from ``module`` comes to: through packages that re-export it, the
    file that defines it; all of a package that is imported whole."""
    if not is_package(module):
        return frozenset({module})
    sources = [
        (source, given)
        for node in import_statements(module)
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


def parameters(function):
    """Names with defaults, without annotations: ``a b=1 **rest``."""
    signature = inspect.signature(function)
    return " ".join(
        str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in signature.parameters.values()
    )
