"""Names of the fields that a class of another package declares, read from its source: importing vLLM takes seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path


def declared_fields(module: str, name: str) -> frozenset[str] | None:
    """Return the annotated fields of the class ``name`` in ``module`` and of its bases; None where the package is not
    installed. Raises LookupError when the module has no such class.

    Bases are followed into the modules that they are imported from; those outside ``module``'s package are left out.
    """
    tree = source_of(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inherited = [_fields_of_base(module, tree, base.id) for base in node.bases if isinstance(base, ast.Name)]
            return frozenset(_own_fields(node)).union(*inherited)
    raise LookupError(f"{module} has no class {name}")


@functools.cache
def source_of(module: str) -> ast.Module | None:
    """Return the syntax tree of a module, which is not imported; None where it is not installed."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _own_fields(node: ast.ClassDef) -> list[str]:
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not item.target.id.startswith("_") and "ClassVar" not in ast.unparse(item.annotation)
    ]


def _fields_of_base(module: str, tree: ast.Module, base: str) -> frozenset[str]:
    if any(isinstance(node, ast.ClassDef) and node.name == base for node in tree.body):
        return declared_fields(module, base) or frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == base for alias in node.names):
            above = module.split(".")[: -node.level] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            if home.split(".")[0] == module.split(".")[0]:
                return declared_fields(home, base) or frozenset()
    return frozenset()
