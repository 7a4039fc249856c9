"""Options and fixtures of the whole suite. Test modules import no torch, ray, megatron or vllm at collection."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray reads these when it is first imported; all Rays of a test run are its own and share a token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray replaces a loopback address by the machine's own, unless this says, when it is imported, that it is alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

from tests.support import rotation
from tests.support.engines import VOCABULARY, LoopThread, SharedEngines
from tests.support.fast import FastPart, SlowPart
from tests.support.rank_pool import RankPool
from tests.support.shared_ray import SharedRay, shared_ray

_started = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skyrl-megatron")
    group.addoption("--layouts", choices=["plain", "all"], default="plain", help="all: also the full layout matrix")
    group.addoption("--fast", action="store_true", help="only tests that start no process; starting one fails")
    group.addoption("--slow", action="store_true", help="only what --fast leaves")
    group.addoption("--part", default="1/1", help="i/n: the i-th of n parts, of whole modules")
    group.addoption("--rotate", type=int, help="the order of run number N (e.g. the number of commits)")
    group.addoption("--stop-after-minutes", type=float, default=0.0, help="skip and list what starts later than this")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        config.pluginmanager.register(FastPart())
    if config.getoption("--slow"):
        config.pluginmanager.register(SlowPart())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--layouts") == "plain":
        matrix = [item for item in items if item.get_closest_marker("full_matrix")]
        config.hook.pytest_deselected(items=matrix)
        items[:] = [item for item in items if not item.get_closest_marker("full_matrix")]
    number, parts = map(int, config.getoption("--part").split("/"))
    if parts > 1:
        modules = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
        others = [item for item in items if modules[item.path] % parts != number - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if modules[item.path] % parts == number - 1]
    if (count := config.getoption("--rotate")) is not None:
        unseen = [item for item in items if item.get_closest_marker("unseen")]
        left_out = unseen + rotation.left_out([item for item in items if item not in unseen], count, _one_in)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        items[:] = rotation.arrange(items, count, lambda item: item.path.parent.name, lambda item: item.path.name)


def _one_in(item: pytest.Item) -> int:
    marker = item.get_closest_marker("one_in")
    return 1 if marker is None else int(marker.args[0])


_not_reached: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--stop-after-minutes")
    if limit and time.monotonic() - _started > limit * 60:
        _not_reached.append(item.nodeid)
        pytest.skip(f"not reached within {limit:g} minutes")


def pytest_terminal_summary(terminalreporter) -> None:
    if _not_reached:
        terminalreporter.section(f"not reached in time: {len(_not_reached)}")
        for nodeid in _not_reached:
            terminalreporter.write_line(nodeid)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The shared pool of rank processes: ``ranks(world_size, body, *args)`` → list of results by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def session_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRay]:
    """One Ray of four slots and four GPUs, as Ray counts them, which tests join and leave."""
    with shared_ray(tmp_path_factory.mktemp("ray") / "head.log") as session:
        yield session


@pytest.fixture(scope="session")
def engines() -> Iterator[SharedEngines]:
    """Real engines by their settings, shared by all modules that need the same."""
    engines = SharedEngines()
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def engine_loop(engines: SharedEngines) -> LoopThread:
    """The event loop that shared engines live on."""
    return engines.loop


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two tiny Qwen3-MoE of one shape, A and B: the models of shared engines."""
    from tests.support.tiny_models import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny_moe")
    return {
        name: write_tiny_model("qwen3_moe", folder / name, seed, vocab_size=VOCABULARY)
        for name, seed in (("A", 0), ("B", 1))
    }


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """``tests/data``: recorded vectors."""
    return Path(__file__).parent / "data"
