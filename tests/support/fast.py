"""The fast part of the suite (``--fast``): every test that starts no process of its own and is not marked ``slow``.

What needs the rank pool, Ray or an engine is known by its fixtures and markers; a test that starts processes itself is
marked ``process``. Nobody has to remember that: where neither says so, the start of a process fails the test, in every
run.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

FIXTURES = {"ranks", "children", "ray", "ray_slots", "four_gpus", "session_ray", "engines"}
MARKERS = ("process", "vllm", "gpu", "full_matrix")
PASSES = {"git", "/sbin/ldconfig"}  # what a checkpoint's manifest asks for the commit; what the import of torch asks
AUDITED = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}


class ProcessStarted(AssertionError):
    """A test started a process and does not say so."""


def starts_processes(item: pytest.Item) -> bool:
    """Return whether a test needs processes of its own, by its fixtures (and theirs) and its markers."""
    return bool(FIXTURES & set(getattr(item, "fixturenames", ()))) or any(map(item.get_closest_marker, MARKERS))


class ProcessGuard:
    """The pytest plugin that marks the fast part, and refuses processes to tests that do not say that they start some.
    At most one in an interpreter: audit hooks cannot be removed."""

    def __init__(self) -> None:
        self._watching = False
        self._refused = ""
        sys.addaudithook(self._audit)
        # multiprocessing's spawn and fork server start their processes past the audited calls
        start = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = self._refusing(start)  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)  # before -m selects
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if not starts_processes(item) and not item.get_closest_marker("slow"):
                item.add_marker("fast")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._watch(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._watch(item))

    def _watch(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run a phase of a test, and raise if a process was refused in it, even where the code swallowed that."""
        self._watching, self._refused = not starts_processes(item), ""
        try:
            result = yield
        finally:
            self._watching = False
        if self._refused:
            raise ProcessStarted(self._refused)
        return result

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watching and event in AUDITED and arguments[:1] not in {(name,) for name in PASSES}:
            self._refuse(f"{event} {arguments[:2]}")

    def _refusing(self, start: Callable[..., int]) -> Callable[..., int]:
        def spawnv_passfds(path: Any, arguments: Any, descriptors: Any) -> int:
            if self._watching:
                self._refuse(f"multiprocessing {list(arguments)}")
            return start(path, arguments, descriptors)

        return spawnv_passfds

    def _refuse(self, what: str) -> None:
        self._refused = f"mark this test pytest.mark.process: it starts {what:.200}"
        raise ProcessStarted(self._refused)
