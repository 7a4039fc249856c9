"""What every command does around its work: readable warnings, library noise off the terminal, one message for a user's
mistake, exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import psutil

from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, SkyRLMegatronWarning
from skyrl_megatron.interrupts import ending_with_signals, exit_code
from skyrl_megatron.progress import heartbeat


def run_command(work: Callable[[], int], *, beats: bool = False) -> int:
    """Return the exit code of ``work``. An error that a user can act on is printed without a traceback.

    ``beats``: what takes long without a line of its own gets one on stderr; not for what serves or prints by itself.
    """
    atexit.register(gc.freeze)  # the interpreter's last collections, over all that was imported, take seconds
    with readable_warnings(), heartbeat(_on_terminal) if beats else nullcontext():
        try:
            with ending_with_signals():
                return work()
        except SkyRLMegatronError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt as error:
            if not getattr(error, "said", False):
                print("interrupted", file=sys.stderr)
            return exit_code(getattr(error, "number", signal.SIGINT))


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print our warnings, deprecations included, as one line each on stderr instead of with file and source line."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, SkyRLMegatronWarning | DeprecationWarning):
            print(f"warning: {message}", file=file or terminal(), flush=True)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=SkyRLMegatronWarning)
        warnings.filterwarnings("default", category=DeprecationWarning, module=r"skyrl_megatron\.")
        warnings.filterwarnings("ignore", module=r"megatron\.")  # what Megatron would run faster with
        warnings.showwarning = show
        yield


def _on_terminal(text: str) -> None:
    print(text, file=terminal(), flush=True)


_terminal: TextIO | None = None
"""Where our warnings go while stderr is a file."""


def terminal() -> TextIO:
    """Return stderr as the user sees it, also while libraries write into a file."""
    return _terminal or sys.stderr


@contextmanager
def noise_into(log: Path, terminal: TextIO | None = None) -> Iterator[None]:
    """Append what libraries write to stderr, C++ included, to ``log``; our warnings still reach ``terminal``.

    ``terminal``: stderr as it was, unless given. Standard output stays as it is, and errors that leave the block are
    shown after it.
    """
    global _terminal
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    usual = os.dup(2)
    with os.fdopen(os.dup(usual), "w", buffering=1) as own, log.open("a") as file:
        before, _terminal = _terminal, terminal or own
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(usual, 2)
            os.close(usual)
            _terminal = before


def require_memory(gib: float, what: str) -> None:
    """Raise LaunchError unless ``gib`` GiB of memory are available for ``what``."""
    available = psutil.virtual_memory().available / 2**30
    if available < gib:
        raise LaunchError(
            f"memory: {available:.1f} GiB available, {what} needs about {gib:.1f} GiB: end other processes, or run it "
            "on a larger machine"
        )
