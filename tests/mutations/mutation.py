"""One fault of one line, on a copy of the tree, and whether the tests that are to notice it do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200.0
"""For the tests of one mutation: many times what a quiet machine needs."""
GRACE_S = 30.0
LEFT_OUT = (".git", ".venv*", "build", "site", "__pycache__", ".*_cache", "*.egg-info")
CAUGHT, SURVIVED, DOES_NOT_APPLY = "caught", "survived", "does not apply"


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old``, which occurs once in ``file``, becomes ``new``; ``tests`` are node ids, of which one fails then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    """What a user would suffer."""

    def applied(self, text: str) -> str | None:
        """Return the text of the file with the fault; None where ``old`` does not occur exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def copy_tree(target: Path) -> None:
    """Copy the checkout as it is now, without what Git and environments keep there."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)


def judge(mutation: Mutation, tree: Path, limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Return the outcome of a mutation on ``tree``, a copy, which is then as before, and what pytest printed.

    Caught is a test that failed: neither tests that cannot be collected nor a time limit count as one.
    """
    path = tree / mutation.file
    if not path.is_file() or (text := mutation.applied(path.read_text())) is None:
        return DOES_NOT_APPLY, ""
    original, times = path.read_bytes(), path.stat()
    path.write_text(text)
    try:
        code, output = run_tests(mutation.tests, tree, limit_s)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # by which Python knows what it compiled
    outcomes = {0: SURVIVED, 1: CAUGHT, None: f"no end within {limit_s:g} s"}
    return outcomes.get(code, f"no verdict: pytest ended with {code}"), output


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code of pytest on ``tree``, None past the limit, and its output. Leaves no process."""
    temporary = tree.with_name(f"{tree.name}t")  # short: sockets are made below it
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(tree), "TMPDIR": str(temporary)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    try:
        with _in_a_session(command, tree, inherited | own) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return None, ""
        return process.returncode, output
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _in_a_session(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a session of its own, which is ended at the end: first as Ctrl-C does, so that tests end what
    they started, then by force."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
