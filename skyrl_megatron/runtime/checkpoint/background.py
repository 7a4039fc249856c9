"""One piece of work in a thread, whose failure is not lost.

The thread is not a daemon: when the program ends, by its last line, ``sys.exit`` or an exception, the interpreter
waits for it, so a save that is under way is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from skyrl_megatron.errors import CheckpointError


class Background:
    """Runs one function at a time. ``name`` says in errors what it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def check_idle(self) -> None:
        """Raise CheckpointError while the function is running."""
        if self.busy:
            raise CheckpointError(f"{self._name} is still under way; wait for it first")

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function(*arguments)``. Raises CheckpointError when the last one is still running."""
        self.check_idle()

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self._failure = error

        self._failure = None
        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the function has ended. Raises CheckpointError when it failed, once, or takes longer."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"{self._name} has not ended within {timeout_s:.0f} s; check the storage")
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name} failed: {failure}") from failure
