"""The code blocks of the guides: Python to run in order, files to write, commands to check."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = tuple(
    ROOT / "docs" / name for name in ("answers.md", "errors.md", "families.md", "faults.md", "options.md")
)
"""Pages that launch/docs.sh writes and git ignores."""
DOCUMENTS = sorted(set((ROOT / "docs").rglob("*.md")) - set(GENERATED))
ALL = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CONFIG.md", "SECURITY.md")]
ALL += [*DOCUMENTS, *sorted((ROOT / "launch").rglob("README.md"))]
"""Those that a user reads."""
SHELLS = ("bash", "sh", "console")
PROGRAMS = r"python|launch/[\w/]+\.sh|skyrl-\w+|docker(?:/\w+\.sh)?|hf|ray|sbatch|\.ci/run"
INLINE = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) [^`]+)`")
"""A command within a line: one with arguments, as a name alone is that of a file."""
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    document: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    options: str
    """The words after the language: ``process``, or ``file=NAME``."""
    text: str

    @property
    def file(self) -> str | None:
        """Name of the file that the block is."""
        return self.options.removeprefix("file=") if self.options.startswith("file=") else None

    def run(self, names: dict[str, object]) -> None:
        """Execute Python; a traceback shows the document and its line."""
        code = compile("\n" * (self.line - 1) + self.text, str(self.document), "exec")
        exec(code, names)

    def commands(self) -> list[list[str]]:
        """Split a shell block into commands, lines that end in a backslash joined. Of a session: what was typed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(document: Path, language: str) -> list[Block]:
    """All blocks of a document in one language, in order."""
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, found.start(3)) + 1, found[1], found[2].strip(), found[3])
        for found in FENCE.finditer(text)
        if found[1] == language
    ]


def shown(document: Path) -> list[list[str]]:
    """Words of every command that a document shows, in fenced blocks of a shell and within lines."""
    text, found = document.read_text(), []
    for block in (block for language in SHELLS for block in blocks(document, language)):
        found += block.commands()
    return found + [shlex.split(match) for match in INLINE.findall(FENCE.sub("", text))]


def name_of(document: Path) -> str:
    return document.relative_to(ROOT / "docs").as_posix()
