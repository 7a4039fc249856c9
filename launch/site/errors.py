"""Write docs/errors.md, every error of the code with its fix: ``python launch/site/errors.py [FILE]``.

The page is not kept in git: launch/docs.sh makes it. Messages are read from the code that raises them; the cause and
the fix that the errors of a topic share are in error_topics.yaml. A module that raises errors must belong to a topic.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
HEAD = """\
# Errors

<!-- Written by `python launch/site/errors.py` from the code that raises the errors. -->

An error is one message: what is wrong, its value, the fix. The exit code is 2 if the configuration is wrong, else 1.
`…` stands for text that only a run knows: search this page for the words around it. A command lists all problems of
a configuration at once; `KEY` is the key or option that a rule rejects. "As above" is the fix over the tables of a
topic.
"""

TOPICS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("error_topics.yaml").read_text())
IMPERATIVES = (
    "set use choose raise lower give write name add fetch take remove restore free end start install move wait put"
    " leave list make mark look check return must pass turn drop export keep train resume delete lift register change"
    " call let ask share unset say stop open try build join switch spell serve declare fix see close define"
    " disable enable replace reduce increase decrease pick provide specify update correct rename restart exclude load"
    " retry configure shorten split merge upgrade convert repeat resume compare download publish create copy repair"
).split()
"""First words of the part of a message that says what to do."""


@dataclass(frozen=True)
class Site:
    """A place that makes an error."""

    module: str
    kind: str
    message: str
    cure: str


def sites() -> Iterator[Site]:
    """Yield all of them; a message that only passes another error on is that error's."""
    kinds = error_classes()
    for path in files():
        source = Source(tree_of(path))
        module = path.relative_to(ROOT).as_posix().removeprefix("skyrl_megatron/")
        for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name == "Problem" and len(call.args) == 3:
                keys = " or ".join(f"{key}=…" for key in source.texts(call.args[0], call)[:4])
                for fix in source.texts(call.args[2], call):
                    yield Site(module, "ConfigError", keys or "KEY=…", fix)
            elif name in kinds and name != "ConfigError" and call.args:
                for text in source.texts(call.args[0], call):
                    yield Site(module, name, *divided(text))


def files() -> list[Path]:
    """Return the files of the packages that raise the errors of the page."""
    return sorted(path for package in sorted(ROOT.glob("skyrl_megatron*/")) for path in package.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, which is parsed once."""
    return ast.parse(path.read_text())


def error_classes() -> set[str]:
    """Return the names of errors, those that modules derive included."""
    known = {"SkyRLMegatronError"}
    classes = [node for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    while True:
        more = {node.name for node in classes if any(isinstance(b, ast.Name) and b.id in known for b in node.bases)}
        if more <= known:
            return known
        known |= more


class Source:
    """A module's code: what expressions of it may be as text."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.blocks: dict[ast.AST, tuple[tuple[int, int], ...]] = {}
        """Of each node the blocks that it is in, outermost first: (statement, which of its lists)."""
        self._place(tree, ())
        self.functions = {id(node) for node in self.blocks if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.assigned: dict[str, list[ast.Assign]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned.setdefault(target.id, []).append(node)

    def _place(self, node: ast.AST, within: tuple[tuple[int, int], ...]) -> None:
        self.blocks[node] = within
        for number, (_, value) in enumerate(ast.iter_fields(node)):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for child in value:
                    self._place(child, (*within, (id(node), number)))
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._place(child, within)

    def reaching(self, name: str, at: ast.expr) -> list[ast.Assign]:
        """Return the assignments whose value ``name`` may have at an expression, the nearest first."""
        here, found = self.blocks[at], []
        for assign in sorted(self.assigned.get(name, ()), key=lambda node: -node.lineno):
            there = self.blocks[assign]
            common = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))
            )
            elsewhere = common < min(len(here), len(there)) and here[common][0] == there[common][0]
            if elsewhere or (assign.lineno > at.lineno and len(there) > 1) or len(there) > common + 3:
                continue
            if len(there) > common and there[common][0] in self.functions:
                continue  # a local variable of another function
            found.append(assign)
            if common == len(there):
                break  # it is executed whenever the expression is
        return found

    def texts(self, node: ast.expr, at: ast.expr, depth: int = 0) -> list[str]:
        """Return what an expression may be, ``…`` for what only a run knows; empty where nothing of it is known."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else ["…"]
        if isinstance(node, ast.JoinedStr):
            made = [""]
            for part in node.values:
                known = self.texts(part.value, at, depth + 1) if isinstance(part, ast.FormattedValue) else []
                known = [str(part.value)] if isinstance(part, ast.Constant) else known
                made = [start + end for start in made for end in (known if 0 < len(known) <= 4 else ["…"])]
            return [text for text in made if text.strip("… .:=")]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = (self.texts(side, at, depth + 1) or ["…"] for side in (node.left, node.right))
            return [start + end for start in left for end in right]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, at, depth), *self.texts(node.orelse, at, depth)]
        if isinstance(node, ast.Name) and depth < 4:
            found = [self.texts(assign.value, assign.value, depth + 1) for assign in self.reaching(node.id, at)]
            return list(dict.fromkeys(text for some in found for text in some))
        return []


def divided(text: str) -> tuple[str, str]:
    """Divide a message into what is wrong and what to do; the second may be empty."""
    for found in re.finditer(r"; |: |, so |\. | - ", text):
        rest = text[found.end() :]
        if rest.split(maxsplit=1) and rest.split()[0].strip(",").lower() in IMPERATIVES:
            return text[: found.start()], rest
    return text, ""


def topic_of(module: str) -> int:
    """Return which topic a module belongs to. Raises SystemExit for one that has none."""
    starts = [(start, index) for index, topic in enumerate(TOPICS) for start in topic["modules"]]
    fits = [(len(start), index) for start, index in starts if module.startswith(start)]
    if not fits:
        raise SystemExit(f"skyrl_megatron/{module} raises errors and belongs to no topic: add it to TOPICS")
    return max(fits)[1]


def cell(text: str) -> str:
    """Return text for a table: one line, no bars, ellipses joined."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"…(?:[.,/ ]?…)+", "…", text).replace("|", "\\|").replace("<", "&lt;")


def keys_first(row: tuple[str, str]) -> tuple[bool, tuple[str, str]]:
    """Order rows by what they say, those that name no key of their own last."""
    return row[0].startswith(("KEY", "…")), row


def page() -> str:
    """Return the whole text of docs/errors.md."""
    rows: dict[int, dict[str, list[tuple[str, str]]]] = {index: {} for index in range(len(TOPICS))}
    for site in sites():
        here = rows[topic_of(site.module)].setdefault(site.kind, [])
        row = (cell(site.message), cell(site.cure) or "as above")
        says = site.cure if site.kind == "ConfigError" else site.message
        if row not in here and cell(says).strip("… ;:=,."):
            here.append(row)
    parts = [HEAD]
    for index, topic in enumerate(TOPICS):
        parts.append(f"## {topic['title']}\n\n{topic['cure']}\n")
        for kind, messages in sorted(rows[index].items()):
            parts.append(f"`{kind}`\n\n| message | fix |\n|---|---|")
            parts += [f"| {message} | {what} |" for message, what in sorted(messages, key=keys_first)]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    """Write the page into docs/, or into the given file."""
    (Path(arguments[0]) if arguments else PAGE).write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
