"""A public function that takes or returns a tensor says what shape it has: [B, T], [...] for any shape, or scalar."""

import ast
import re

from tests.structure import source

ARRAY = re.compile(r"\b(Tensor|ndarray|NDArray|Table)\b")
SHAPE = re.compile(r"\[|\bscalar")


def takes_arrays(function):
    """Whether an argument or the result of a function is annotated as a tensor or an array."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [argument.annotation for argument in every if argument] + [function.returns]
    return any(annotation is not None and ARRAY.search(ast.unparse(annotation)) for annotation in annotations)


def public_functions(tree, names=()):
    """Yield (dotted name, node) of functions and of methods whose names, and whose classes' names, are public."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node, (*names, node.name))
        else:
            yield ".".join((*names, node.name)), node


def without_shape(tree):
    """The public functions on arrays that give no shape, in their own docstring or as a legend in the module's."""
    if SHAPE.search(ast.get_docstring(tree) or ""):
        return []
    return [
        (name, node.lineno)
        for name, node in public_functions(tree)
        if takes_arrays(node) and not SHAPE.search(ast.get_docstring(node) or "")
    ]


def core():
    return {
        module: tree
        for module, tree in source.modules().items()
        if module.split(".")[0] in ("skyrl_megatron", "bridges")
    }


def test_functions_on_tensors_give_shapes():
    missing = [f"{module}:{line} {name}" for module, tree in core().items() for name, line in without_shape(tree)]
    assert not missing, "no [shape] in the docstring:\n" + "\n".join(missing)


def test_a_function_without_a_shape_is_found():
    tree = ast.parse('def f(x: Tensor) -> Tensor:\n    """Return twice ``x``."""')
    assert without_shape(tree) == [("f", 1)]
    assert not without_shape(ast.parse('def f(x: Tensor) -> Tensor:\n    """Return twice ``x`` [B, T]."""'))
    assert not without_shape(ast.parse("def f(x: int) -> int:\n    return x"))
