"""Ctrl-C, SIGTERM and SIGHUP of a command, from its first import to its end: one sentence, and exit code 130 or 143.

The first one ends the command, with all that it started; a run that takes steps ends after the one in work instead
(:mod:`skyrl_megatron.trainer.stopping`), and at once with the second. While it ends, further ones change nothing; what
does not end in time is killed. Imports nothing but the standard library: it is what a command imports first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 50.0
"""For a command to end all that it started, once it was asked to."""


_reported = threading.Event()


def report_end() -> None:
    """Note that the user was told how the command ends, so that a later signal prints nothing more."""
    _reported.set()


def end_is_reported() -> bool:
    """Return whether :func:`report_end` was called."""
    return _reported.is_set()


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end. ``reported``: whether the user was told how it ended."""

    reported = False

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """Return the code of a command that signal ``number`` ended: 130 for Ctrl-C, 143 for the others."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def replace_handlers(handler: Any) -> dict[int, Any]:
    """Set the handler of the three signals; returns those before. A SIGHUP that is ignored stays so, as of a command
    under ``nohup``; outside the main thread nothing is set."""
    before: dict[int, Any] = {}
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        with contextlib.suppress(ValueError):  # not the main thread: whoever owns it decides
            before[number] = signal.signal(number, handler)
    return before


def restore_handlers(before: dict[int, Any]) -> None:
    """Set the handlers that :func:`replace_handlers` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def end_while_importing() -> None:
    """Let a signal end this process without a traceback from now on, if it is a command of ours: until
    :func:`ending_with_signals` there is nothing to give back."""
    if _is_command():
        replace_handlers(_end_at_once)
        # Registered first, this runs last: the interpreter resets handlers when it exits, and a signal would then
        # change the exit code of a command that has ended.
        atexit.register(replace_handlers, signal.SIG_IGN)


def _is_command() -> bool:
    given = sys.orig_argv[1:]
    if "-m" in given:
        return given[given.index("-m") + 1].partition(".")[0] == "skyrl_megatron"
    return any(Path(each).name == "skyrl-megatron" for each in given[:2])


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(exit_code(number))


@contextlib.contextmanager
def ending_with_signals() -> Iterator[None]:
    """Within the block, which may be in another such block, let the first signal raise :class:`Interrupted` in the
    main thread, and kill this process and all below it if the block has not ended ``END_S`` after that."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), _Ending):
        yield
        return
    ending = _Ending()
    before = replace_handlers(ending.begin)
    try:
        yield
    finally:
        ending.over.set()
        if ending.begun and _end_at_once in before.values():
            replace_handlers(signal.SIG_IGN)  # the command is about to report the first signal, and to exit
        else:
            restore_handlers(before)


class _Ending:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.begun = False

    def begin(self, number: int, frame: FrameType | None) -> None:
        if self.begun:
            return
        self.begun = True
        threading.Thread(target=self._end_in_time, args=(number,), daemon=True, name="end of the command").start()
        raise Interrupted(number)

    def _end_in_time(self, number: int) -> None:
        if not self.over.wait(END_S):
            kill_descendants()
            os.write(2, f"interrupted; what did not end within {END_S:g} s was killed\n".encode())
            os._exit(exit_code(number))


@contextlib.contextmanager
def hangups_blocked() -> Iterator[None]:
    """Block SIGHUP in what is started within the block, which inherits it: a terminal that closes sends it to all of a
    command's processes, and the command alone decides how they end. Ray does so with SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_descendants(*spared: int) -> None:
    """Kill all processes below this one but those of these ids, and Python's trackers, which take away the shared
    memory of those that are killed, and end then. Raylets come first: they would kill the trackers."""
    import psutil

    named = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in spared and "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                named.append((child.name() != "raylet", child))
    for _, child in sorted(named, key=lambda each: each[0]):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
