"""A command that uses a cluster: it alone decides what a request to end means."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from skyrl_megatron.interrupts import replace_handlers, restore_handlers

LOOK_S = 0.5


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end, in order, instead of ending it."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)

    before = replace_handlers(ask) | {signal.SIGUSR1: signal.signal(signal.SIGUSR1, ask)}
    try:
        yield asked
    finally:
        restore_handlers(before)


def run_asked_to_end(command: Sequence[str], environment: Mapping[str, str], asked: Callable[[], int]) -> int:
    """Run ``command``, with a SIGINT for each request that ``asked`` counts; returns its exit code (128 + a signal).

    A run saves its last step at the first one and ends at once at the second. It has a session of its own: what a
    terminal sends to all processes reaches it through here, once.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        passed = 0
        while process.poll() is None:
            for _ in range(asked() - passed):
                process.send_signal(signal.SIGINT)
                passed += 1
            time.sleep(LOOK_S)
    finally:
        process.kill()
        process.wait()
    code = process.returncode
    return code if code >= 0 else 128 - code
