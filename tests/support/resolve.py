"""Names and calls of a source text that cannot run here, against what it imports: are they there, do arguments fit?"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

UNKNOWN = object()


def misfits(source: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each attribute that there is not and each call whose arguments do not fit, of what is imported
    anywhere in ``source`` but from packages ``without``. In ``ranks(n, body, …)`` it is the body that is called."""
    tree = ast.parse(source)
    names, wrong = _imported(tree, without)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _resolve(node.value, names)
            if owner is not UNKNOWN and not hasattr(owner, node.attr):
                wrong.append(f"line {node.lineno}: {ast.unparse(node)} does not exist")
        elif isinstance(node, ast.Call):
            wrong += _call(node, names)
    return wrong


def _imported(tree: ast.AST, without: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return what each imported name is, and a line for each that cannot be imported."""
    names: dict[str, Any] = {}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                if first not in without:
                    module = importlib.import_module(alias.name)
                    names[alias.asname or first] = module if alias.asname else importlib.import_module(first)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in without:
            for alias in node.names:
                try:
                    names[alias.asname or alias.name] = _member(node.module, alias.name)
                except ImportError as error:
                    wrong.append(f"line {node.lineno}: {error}")
    return names, wrong


def _member(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def _resolve(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return what a dotted name stands for; UNKNOWN where it starts with something that was not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, names)
        return UNKNOWN if owner is UNKNOWN else getattr(owner, node.attr, UNKNOWN)
    return UNKNOWN


def _call(node: ast.Call, names: dict[str, Any]) -> list[str]:
    called, arguments, keywords = _resolve(node.func, names), node.args, node.keywords
    if isinstance(node.func, ast.Name) and node.func.id == "ranks" and len(arguments) > 1:
        called, arguments = _resolve(arguments[1], names), arguments[2:]
        keywords = [keyword for keyword in keywords if keyword.arg != "timeout_s"]
    if called is UNKNOWN or not callable(called):
        return []
    try:
        signature = inspect.signature(called)
    except (ValueError, TypeError):  # of builtins
        return []
    spread = any(isinstance(each, ast.Starred) for each in arguments) or any(each.arg is None for each in keywords)
    given = [each for each in arguments if not isinstance(each, ast.Starred)]
    try:
        bind = signature.bind_partial if spread else signature.bind
        bind(*given, **{each.arg: each.value for each in keywords if each.arg})
    except TypeError as error:
        return [f"line {node.lineno}: {ast.unparse(node.func)}: {error}"]
    return []
