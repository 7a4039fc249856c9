"""Readers of files in a process of their own, with bounds of memory and time: what ends a process, fills it or never
returns is a failure of the test that asked, not of the test run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

SECONDS = 60
"""Of one reading. Far above what any takes on a busy machine: it tells a hang apart, not a slow reader."""
PEAK = 512 << 20
"""Bytes that one reading may add to the resident memory at its peak; the files are kilobytes."""
ADDRESS_SPACE = 8 << 30
"""Bytes beyond what is mapped after the first reading, so that a wrong reader ends here and not the machine."""


class Reader:
    """A process that calls functions of test modules, with bounds from the second call of each on: the first is with
    what is ``right``, and imports libraries.

    ``reader(read, argument, right)`` returns None where ``read(argument)`` returned, else the text of the project's
    error. Anything else is an AssertionError: another exception, a lack of memory in any guise, a process that ended,
    no answer in time.
    """

    def __init__(self) -> None:
        self._known: set[Callable[[Any], object]] = set()
        self._process: SpawnProcess | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        """How many arguments were read by each function, and how many refused."""

    def __call__[T](self, read: Callable[[T], object], argument: T, right: T) -> str | None:
        if read not in self._known:
            if self._process is None:
                self._start()
            kind, text = self._ask(read, right, 10 * SECONDS)
            assert kind == "read", f"what is right is not read: {text}"
            self._known.add(read)
        kind, text = self._ask(read, argument, SECONDS)
        assert kind != "raised", text
        self.counts[read.__name__, kind] += 1
        return text if kind == "refused" else None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()

    def _ask(self, read: Callable[[Any], object], argument: Any, seconds: float) -> tuple[str, str]:
        try:
            self._connection.send((read, argument))
            assert self._connection.poll(seconds), f"no answer after {seconds} s"
            answer: tuple[str, str] = self._connection.recv()
        except (EOFError, OSError):
            raise AssertionError(f"the reader's process ended with {self.close()}") from None
        except AssertionError:
            self.close()
            raise
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        print("", *(f"{name}: {count} {kind}" for (name, kind), count in sorted(self.counts.items())), sep="\n")

    def close(self) -> int | None:
        """End the process; return how it ended, which is by itself if it left its connection."""
        process, self._process = self._process, None
        self._known.clear()
        if process is None:
            return None
        self._connection.close()
        process.join(10)  # it leaves when it is asked nothing more
        process.kill()
        process.join()
        return process.exitcode


def _serve(connection: Connection) -> None:
    known = set()
    with tempfile.TemporaryFile() as noise:  # Rust's panics and what libraries say
        os.dup2(noise.fileno(), 2)
        while True:
            try:
                read, argument = connection.recv()
            except EOFError:
                return
            if read in known:
                connection.send(_outcome(read, argument))
                continue
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            connection.send(_outcome(read, argument, peak=64 * PEAK))
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ADDRESS_SPACE, resource.RLIM_INFINITY))
            known.add(read)


def _outcome(read: Callable[[Any], object], argument: Any, peak: int = PEAK) -> tuple[str, str]:
    from bridges.errors import BridgeError
    from skyrl_megatron.errors import SkyRLMegatronError

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    try:
        read(argument)
        kind, text = "read", ""
    except (SkyRLMegatronError, BridgeError) as error:
        short = any(isinstance(each, MemoryError) for each in _chain(error))
        kind, text = ("raised", traceback.format_exc()) if short or not str(error) else ("refused", str(error))
    except BaseException:  # a panic of Rust is no Exception
        kind, text = "raised", traceback.format_exc()
    grown = _status("VmHWM") - before
    if grown > peak:
        return "raised", f"{grown >> 20} MiB of memory were taken; {kind} {text}"
    return kind, text


def _chain(error: BaseException | None) -> list[BaseException]:
    return [error, *_chain(error.__cause__ or error.__context__)] if error else []


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
