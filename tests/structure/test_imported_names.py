"""Every name that a file imports from this project exists, also where the import runs on GPUs or in a script alone."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.structure import source

ROOT = Path(__file__).resolve().parents[2]
OWN = (*source.PACKAGES, "tests", "benchmarks")
SOURCES = (*OWN, "launch")


def file_of(module):
    """Return the file of a module, the folder of a namespace package, or None."""
    path = ROOT / module.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py", path) if each.exists()), None)


@cache
def names_in(path):
    """Return the names that a file binds anywhere; None if it makes names on demand."""
    names = set()
    for node in ast.walk(source.tree_of(path)) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return None if {"__getattr__", "*"} & names else names


def missing(tree, where=""):
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] not in OWN:
            continue
        path = file_of(node.module)
        names = set() if path is None else names_in(path)
        for each in node.names if names is not None else ():
            if each.name != "*" and each.name not in names and file_of(f"{node.module}.{each.name}") is None:
                found.append(f"{where}:{node.lineno}: {node.module} has no {each.name}")
    return found


def test_imported_names_exist():
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    found = [each for path in files for each in missing(source.tree_of(path), path.relative_to(ROOT))]
    assert len(files) > 500 and not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["from skyrl_megatron.entrypoints import convert", "from bridges.names import canonical"]
)
def test_a_name_that_is_gone_is_found(line):
    assert len(missing(ast.parse(line))) == 1
