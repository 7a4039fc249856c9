"""The output of an engine's processes: kept in a file, so that an error can quote its last lines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_starting = threading.Lock()
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR|DEBUG)\s+\d\d-\d\d [\d:]+\s+\[[^\]]*\]\s*)?")
_TELLING = re.compile(
    r"^[\w.]*(Error|Exception|Exit|Fault)\b.*:|out of memory|.*died unexpectedly|Killed|Segmentation fault|Aborted"
)
_POINTING = re.compile(r"Executor failed|[Ss]ee (root cause|stack trace)|Engine core initialization failed")
"""What vLLM raises because of something that was said before."""
SOME_OUTPUT = 1 << 16
"""Bytes that a disk must take to be no cause: some are left of a page of a file, also where it is full."""


@contextlib.contextmanager
def child_output(path: Path) -> Iterator[None]:
    """Let processes started within the block write what they print to ``path``, as this process does meanwhile.

    File descriptors belong to the whole process: blocks of several threads take turns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _starting, path.open("ab") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def last_errors(path: Path, count: int = 4) -> list[str]:
    """Return the last few lines of an engine's output that name an error, each once, without vLLM's prefixes.

    Those that only point to another are left out if there is another. Where none says why, the disk may: a process
    ends that cannot write its output.
    """
    try:
        text = path.read_bytes()[-200_000:].decode(errors="replace")
    except OSError:
        text = ""
    found: dict[str, None] = {}
    for line in text.splitlines():
        words = _PREFIX.sub("", line).strip()
        if _TELLING.search(words):
            found.pop(words, None)
            found[words] = None
    causes = [words for words in found if not _POINTING.search(words)]
    if not causes and (refused := _refused(path.parent)):
        return [f"its output cannot be written to {path}: {refused}"]
    return (causes or list(found))[-count:]


def _refused(folder: Path) -> str:
    """Return why nothing can be written in ``folder``; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SOME_OUTPUT))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""
