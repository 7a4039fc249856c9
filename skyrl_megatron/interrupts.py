"""Handling of Ctrl-C, SIGTERM and SIGHUP by a command: it prints one sentence and exits with code 130 or 143.

The first signal ends the command and all processes that it started. A training run instead ends after the current step
(:mod:`skyrl_megatron.trainer.stopping`), and a second signal ends it at once. Signals that arrive while the command
ends have no effect. Processes that do not end in time are killed. This module imports only the standard library,
because a command imports it first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 50.0
"""Time in seconds that a command has to end all processes that it started."""
LOOK_S = 0.25
"""Time in seconds between two looks at whether the exception of a signal was dropped."""


_reported = threading.Event()


def report_end() -> None:
    """Note that the command has printed how it ends, so that a later signal prints nothing."""
    _reported.set()


def end_is_reported() -> bool:
    """Return whether :func:`report_end` was called."""
    return _reported.is_set()


class Interrupted(KeyboardInterrupt):
    """A signal ended the command. ``reported``: whether the command has printed how it ended."""

    reported = False

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """Return the exit code of a command that signal ``number`` ended: 130 for Ctrl-C, 143 for the others."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def replace_handlers(handler: Any) -> dict[int, Any]:
    """Set the handler of the three signals and return the previous handlers.

    An ignored SIGHUP stays ignored, as under ``nohup``. Outside the main thread this does nothing.
    """
    before: dict[int, Any] = {}
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        with contextlib.suppress(ValueError):  # not the main thread, which must set the handlers
            before[number] = signal.signal(number, handler)
    return before


def restore_handlers(before: dict[int, Any]) -> None:
    """Set the handlers that :func:`replace_handlers` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def end_while_importing() -> None:
    """Let a signal end this process without a traceback from now on, if it runs a command of this package.

    Until :func:`ending_with_signals` the command has started nothing that it must clean up.
    """
    if _is_command():
        replace_handlers(_end_at_once)
        # Registered first, this runs last. Without it the interpreter resets the handlers at exit, and a signal could
        # still change the exit code of a finished command.
        atexit.register(replace_handlers, signal.SIG_IGN)


def _is_command() -> bool:
    given = sys.orig_argv[1:]
    if "-m" in given:
        return given[given.index("-m") + 1].startswith("skyrl_megatron")  # or a package around the core
    return any(Path(each).name == "skyrl-megatron" for each in given[:2])


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(exit_code(number))


@contextlib.contextmanager
def ending_with_signals() -> Iterator[None]:
    """Let the first signal within the block raise :class:`Interrupted` in the main thread. Blocks can be nested.

    A KeyboardInterrupt of other code is raised as :class:`Interrupted`, too. If the block has not ended ``END_S``
    seconds after the signal, kill this process and its descendants.
    """
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), _Ending):
        yield
        return
    ending = _Ending()
    before = replace_handlers(ending.begin)
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:  # Ray raises its own in place of the one that the handler raised
        raise Interrupted(ending.number or signal.SIGINT) from error
    finally:
        ending.over.set()
        if ending.number and _end_at_once in before.values():
            replace_handlers(signal.SIG_IGN)  # the command is about to report the first signal, and to exit
        else:
            restore_handlers(before)


class _Ending:
    """The end that the first signal starts: an exception in the main thread, and a thread that watches it.

    C code that a signal interrupts may drop the exception (Ray's does). Then it is raised again.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.number = 0
        """The first signal; 0: none yet."""
        self._raised: weakref.ref[Interrupted] | None = None

    def begin(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            threading.Thread(target=self._watch_the_end, daemon=True, name="end of the command").start()
        elif not self._is_lost():
            return
        raise self._exception()  # no frame of its traceback may hold it, or it would never count as lost

    def _exception(self) -> Interrupted:
        error = Interrupted(self.number)
        self._raised = weakref.ref(error)
        return error

    def _is_lost(self) -> bool:
        """Return whether the exception is gone and the main thread handles no other KeyboardInterrupt in its place."""
        if self._raised is None or self._raised() is not None:
            return False
        error = sys._current_exceptions().get(threading.main_thread().ident or 0)
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        return error is None

    def _watch_the_end(self) -> None:
        deadline, lost = time.monotonic() + END_S, 0
        while not self.over.wait(LOOK_S):
            lost = lost + 1 if self._is_lost() else 0
            if lost == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, self.number)
                lost = 0
            if time.monotonic() > deadline:
                if faulthandler.is_enabled():  # PYTHONFAULTHANDLER=1: show what each thread waits for
                    faulthandler.dump_traceback()
                kill_descendants()
                os.write(2, f"interrupted; killed the processes that did not end within {END_S:g} s\n".encode())
                os._exit(exit_code(self.number))


@contextlib.contextmanager
def hangups_blocked() -> Iterator[None]:
    """Block SIGHUP in processes that are started within the block; they inherit the signal mask.

    A closing terminal sends SIGHUP to all processes of a command, but only the command decides how they end. Ray does
    the same with SIGINT.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_descendants(*spared: int) -> None:
    """Kill all descendants of this process except the ids ``spared`` and Python's resource trackers.

    The trackers unlink the shared memory of the killed processes and then end. Raylets are killed first, as they would
    kill the trackers.
    """
    import psutil

    named = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in spared and "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                named.append((child.name() != "raylet", child))
    for _, child in sorted(named, key=lambda descendant: descendant[0]):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
