"""What is below the loop gets what it needs as arguments: nobody is handed a trainer to reach into."""

import ast
from collections.abc import Iterator

import pytest

from tests.structure import source

FOLDERS = ("skyrl_megatron.trainer", "skyrl_megatron.sources")


def reaches(tree: ast.AST) -> Iterator[str]:
    """Each parameter or attribute that is a trainer of any type, and each attribute whose name is made of parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, annotation = ast.unparse(node.target).rpartition(".")[2], node.annotation
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.JoinedStr):
                yield f"line {node.lineno}: {ast.unparse(node)}: name the attribute, or pass its value"
            continue
        else:
            continue
        if name == "trainer" and annotation is not None and ast.unparse(annotation) in ("Any", "object"):
            yield f"line {node.lineno}: {name}: {ast.unparse(annotation)}: pass what is needed of it"


def parts() -> list[str]:
    return [name for name in source.files() if name.startswith(tuple(f"{folder}." for folder in FOLDERS))]


@pytest.mark.parametrize("module", parts())
def test_no_part_of_a_step_reaches_into_a_trainer(module):
    assert list(reaches(source.modules()[module])) == []


def test_sources_know_nothing_of_the_trainer():
    """Nor for types: a source could be used by another loop."""
    for module in parts():
        if module.startswith("skyrl_megatron.sources."):
            above = [name for name, _ in source.imported(module) if name.startswith("skyrl_megatron.trainer")]
            assert not above, f"{module} imports {above}"


@pytest.mark.parametrize(
    "code",
    [
        "def __init__(self, trainer: Any) -> None: ...",
        "class Source:\n    trainer: Any",
        "self.trainer: object = trainer",
        'getattr(cfg, f"{role}_mini_batch_size")',
        'setattr(batch, f"{name}_logprobs", scores)',
    ],
)
def test_a_reach_is_found(code):
    assert len(list(reaches(ast.parse(code)))) == 1


def test_what_is_allowed():
    allowed = (
        "def on_step_end(self, trainer: ObservedTrainer): ...\nvalue = getattr(cfg, name)\nself.run: RunState = run"
    )
    assert not list(reaches(ast.parse(allowed)))
