"""A variable bears the name of the thing: words that fit anything do not name what a longer function works on."""

import ast

from tests.structure import source

WORDS = {"found", "each", "known", "own", "place", "mine", "given", "theirs", "whole"}
LINES = 10
"""Functions of at most this many lines show what their variables are."""


def functions(tree, public=True):
    """Yield (node, whether its arguments are promised by name): a public function of public classes, or a method that
    Python calls."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            private = node.name.startswith("_") and not node.name.endswith("__")
            yield node, public and not private
            yield from functions(node, False)
        else:
            hidden = isinstance(node, ast.ClassDef) and node.name.startswith("_")
            yield from functions(node, public and not hidden)


def assigned(function, *, with_arguments):
    """Yield the (name, line) of what a function assigns, functions inside of it left out."""
    arguments = function.args
    if with_arguments:
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield argument.arg, argument.lineno
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.Lambda):
            yield from ((argument.arg, argument.lineno) for argument in node.args.args)
        left += ast.iter_child_nodes(node)


def unnamed(tree):
    """The (function, word, line) of variables with such a name in functions of more than LINES lines."""
    return [
        (function.name, name, line)
        for function, promised in functions(tree)
        if function.end_lineno - function.lineno + 1 > LINES
        for name, line in assigned(function, with_arguments=not promised)
        if name in WORDS
    ]


def test_variables_bear_the_name_of_the_thing():
    wrong = [
        f"{module}:{line} {function}: {name}"
        for module, tree in source.modules().items()
        for function, name, line in unnamed(tree)
    ]
    assert not wrong, "name the thing:\n" + "\n".join(wrong)


def test_a_nameless_variable_is_found():
    body = "\n".join(["    pass"] * 10)
    assert unnamed(ast.parse(f"def f(own):\n    found = 1\n{body}")) == [("f", "found", 2)]
    assert ("_f", "own", 1) in unnamed(ast.parse(f"def _f(own):\n{body}"))
    assert not unnamed(ast.parse("def f():\n    found = 1\n    return found"))
