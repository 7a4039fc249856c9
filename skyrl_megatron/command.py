"""Common parts of all commands: readable warnings, one message for a user error, signals, and redirected stderr."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import psutil

from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, SkyRLMegatronWarning
from skyrl_megatron.interrupts import end_is_reported, ending_with_signals, exit_code
from skyrl_megatron.progress import heartbeat


def run_command(work: Callable[[], int], *, beats: bool = False) -> int:
    """Return the exit code of ``work``. An error that a user can act on is printed without a traceback.

    ``beats``: report long operations that print nothing, on stderr. Not for servers, or commands that print progress.
    """
    atexit.register(gc.freeze)  # the last garbage collections over all imported objects take seconds
    with readable_warnings(), heartbeat(_on_terminal) if beats else nullcontext():
        try:
            with ending_with_signals():
                return work()
        except SkyRLMegatronError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt as error:
            if not (getattr(error, "reported", False) or end_is_reported()):
                print("interrupted", file=sys.stderr)
            return exit_code(getattr(error, "number", signal.SIGINT))


def with_strict_rows(args: Sequence[str], section: str) -> list[str]:
    """Return the arguments of a command with its option ``--strict-rows`` as the key that it sets."""
    named = {"--strict-rows": "true", "--strict-rows=true": "true", "--strict-rows=false": "false"}
    return [f"{section}.strict_rows={named[arg]}" if arg in named else arg for arg in args]


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print warnings of this package, also deprecations, as one line on stderr, without file and source line."""
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
        warnings.filterwarnings("default", category=DeprecationWarning, module="skyrl_megatron")
        warnings.filterwarnings("ignore", module=r"megatron\.")  # optional packages that make Megatron faster
        warnings.showwarning = show
        yield


def _on_terminal(text: str) -> None:
    print(text, file=terminal(), flush=True)


_terminal: TextIO | None = None
"""Stream of this package's warnings while stderr is redirected into a file."""


def terminal() -> TextIO:
    """Return the user's stderr, also while stderr is redirected into a file."""
    return _terminal or sys.stderr


@contextmanager
def redirect_stderr(log: Path, terminal: TextIO | None = None) -> Iterator[None]:
    """Append what libraries, also C++ code, write to stderr to ``log``. Warnings of this package go to ``terminal``.

    ``terminal``: default: the original stderr. Standard output is not redirected.
    """
    global _terminal
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    usual = os.dup(2)
    with os.fdopen(os.dup(usual), "w", buffering=1) as screen, log.open("a") as file:
        before, _terminal = _terminal, terminal or screen
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
            f"memory: {available:.1f} GiB available, but {what} needs about {gib:.1f} GiB: end other processes, or "
            "use a larger machine"
        )
