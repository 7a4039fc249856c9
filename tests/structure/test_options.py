"""Options that messages name: of the command that prints the message, or of a program that the message names too."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.structure import source
from tests.structure.source import AROUND, CORE
from tests.structure.test_layers import ROOT, sources

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PROGRAM = re.compile(
    r"(python -m bridges|\{CONVERT\}|pip install|docker run|mount -o|launch/[\w.]+|[Ss]tart (it|Ray) |ray start|"
    r"convert it|repo-type|revision|load the checkpoint with|for NCCL)"
)
"""Another program, before its option."""
KEY_VALUE = {"--check", "--show-config", "--gpu", "--host-memory", "--config", "--recipe", "--hosts", "--help"}
KEY_VALUE |= {"--show-row", "--json", "--strict-rows"}
"""Options of every command that takes ``key=value``."""
ELSEWHERE = {
    "bridges/source.py": {"--dtype"},  # parse_dtype reads it of the parser
    "bridges/convert.py": {"--logits", "--layout"},  # only ``verify`` calls it
    "bridges/nearest.py": {"--megatron-bridge"},  # only ``inspect`` calls it
    "skyrl_megatron_tools/compare_logits.py": {"--layout"},  # ``verify`` starts it
    "skyrl_megatron_tools/replay_trainer.py": {"--step", "--until"},  # only ``replay-batch`` calls it
    "skyrl_megatron_tools/remote/remote_engine.py": {
        # a message asks to start the server with the missing ones
        *("--logprobs-mode", "--worker-extension-cls", "--weight-transfer-config", "--generation-config"),
        "--override-generation-config",
    },
}
"""File → options of the only command that reaches it."""


DECLARES = {"add", "add_argument", "add_parser", "ArgumentParser", "command"}


def shown(part: ast.FormattedValue) -> str:
    return f"{{{part.value.id if isinstance(part.value, ast.Name) else '…'}}}"


def called(node: ast.AST) -> str:
    """Name of the function that a call calls; "" for other nodes."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def texts(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of every sentence with an option that is neither documentation nor declares the option."""
    skipped: set[int] = set()
    found = []
    for node in ast.walk(tree):  # from the outside
        if id(node) in skipped or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped |= {id(child) for child in ast.iter_child_nodes(node)}
        elif called(node) in DECLARES:
            skipped |= {id(child) for child in ast.walk(node)}
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(child) for child in ast.walk(node)}
            parts = [part.value if isinstance(part, ast.Constant) else shown(part) for part in node.values]
            found.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return [(line, text) for line, text in found if " " in text.strip() and OPTION.search(text)]


@cache
def all_texts() -> dict[Path, list[tuple[int, str]]]:
    """File → its sentences with options; a file without two hyphens in a text is not parsed."""
    return {path: texts(source.tree_of(path)) if "--" in path.read_text() else [] for path in sources()}


def declared(path: Path) -> set[str]:
    """Options of the parsers in a file, and in the files beside it that belong to the same command."""
    trees = [source.tree_of(file) for file in (path, *path.parent.glob("__main__.py"))]
    calls = [node for tree in trees for node in ast.walk(tree) if called(node) in ("add", "add_argument")]
    return {
        argument.value
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }


def takes_keys(path: Path) -> bool:
    """Whether a file is reached by commands that take ``key=value``: in the core, or in a file without options."""
    package = path.relative_to(ROOT).parts[0]
    return package == CORE or (package in AROUND and not declared(path))


def wrong(path: Path, sentences: list[tuple[int, str]]) -> list[str]:
    if not sentences:
        return []
    name = path.relative_to(ROOT).as_posix()
    own = declared(path) if not name.startswith("bridges/") or path.name == "__main__.py" else set()
    known = own | ELSEWHERE.get(name, set()) | (KEY_VALUE if takes_keys(path) else {"--help"})
    return [
        f"{name}:{line}: {option.group()} in {text!r}"
        for line, text in sentences
        for option in OPTION.finditer(text)
        if option.group() not in known and not PROGRAM.search(text[: option.start() + len("--repo-type")])
    ]


def test_a_message_names_options_that_its_reader_has():
    found = [each for path, sentences in all_texts().items() for each in wrong(path, sentences)]
    assert not found, "\n".join(found)


def test_options_of_conversions_exist():
    """Those that other commands propose: ``python -m bridges VERB … --option``, ``skyrl-megatron convert``."""
    from bridges.__main__ import parser

    commands = parser()._subparsers._group_actions[0].choices
    proposed = [text for sentences in all_texts().values() for _, text in sentences]
    pairs = [
        (re.search(r"python -m bridges (\w+)", part), part)
        for text in proposed
        for part in re.split(r"(?=python -m bridges)|, then ", text.replace("{CONVERT}", "python -m bridges export"))
        if "python -m bridges" in part
    ]
    assert len(pairs) >= 5
    unknown = [
        part
        for verb, part in pairs
        for option in OPTION.findall(part)
        if verb is not None and option not in commands[verb[1]]._option_string_actions
    ]
    assert not unknown


def test_another_option_is_found():
    """The rule can fail: a message of a library file that names an option of one of its callers."""
    planted = texts(
        ast.parse('def f(out):\n    raise ValueError(f"{out} exists; remove it or choose another --out")\n')
    )
    assert wrong(ROOT / "bridges/staging.py", planted) and not wrong(ROOT / "bridges/__main__.py", planted)
