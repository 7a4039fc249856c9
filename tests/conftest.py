"""Options and fixtures of the suite. Test modules load no torch, ray, megatron, vllm or transformers at collection.

The suite has three parts, markers of one collection: ``fast`` (no process, not slow), the rest, and ``full_matrix``.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray reads these when it is first imported; all Rays of a test run are its own and share a token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray replaces a loopback address by the machine's own, unless this says, when it is imported, that it is alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

from skyrl_megatron import plugins, progress
from tests.support import rotation, workers
from tests.support.engines import VOCABULARY, LoopThread, SharedEngines
from tests.support.fast import ProcessGuard
from tests.support.random_order import RandomOrder
from tests.support.rank_pool import RankPool
from tests.support.shared_ray import SharedRay, shared_ray

progress.QUIET_S = 3600.0  # what this process prints does not depend on how busy the machine is
HEAVY = {"torch", "ray", "megatron", "vllm", "transformers"}
NOT_REACHED = "not reached within "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skyrl-megatron")
    group.addoption("--layouts", choices=["plain", "all"], default="plain", help="all: also the full layout matrix")
    group.addoption(
        "--fast", action="store_true", help="only tests that start no process and are not slow, as -m fast"
    )
    group.addoption("--rotate", type=int, help="the matrix in the order of run number N (e.g. the number of commits)")
    group.addoption("--matrix-minutes", type=float, default=0.0, help="skip what of the matrix starts later than this")
    group.addoption(
        "--every-part", action="store_true", help="fail if no fast test, none of the rest or of the matrix ran"
    )
    group.addoption("--order-seed", type=int, help="modules and their tests in a random order")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.json; for whole plain runs")


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessGuard())
    if (seed := config.getoption("--order-seed")) is not None:
        config.pluginmanager.register(RandomOrder(seed))
    if config.getoption("--fast"):
        config.option.markexpr = "fast"
    if is_worker(config):
        config.stash[workers.RUN_FOLDER] = Path(config.workerinput["run_folder"])  # type: ignore[attr-defined]
        return
    config.stash[workers.RUN_FOLDER] = Path(tempfile.mkdtemp(prefix="skyrl-megatron-tests-"))
    os.environ["SKYRL_MEGATRON_HOME"] = str(config.stash[workers.RUN_FOLDER] / "home")  # also of the workers
    config.pluginmanager.register(PartCounter())
    if config.getoption("--record-durations"):
        config.pluginmanager.register(workers.DurationRecorder())


def pytest_unconfigure(config: pytest.Config) -> None:
    if not is_worker(config) and workers.RUN_FOLDER in config.stash:
        shutil.rmtree(config.stash[workers.RUN_FOLDER], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["run_folder"] = str(node.config.stash[workers.RUN_FOLDER])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.BothEnds | None:
    if config.getvalue("dist") != "load":  # the user's choice
        return None
    config.option.loadscopereorder = False
    return workers.BothEnds(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    before = HEAVY & sys.modules.keys()
    report = yield
    if report.passed and (loaded := (HEAVY & sys.modules.keys()) - before):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} loads {', '.join(sorted(loaded))} at collection: import it in the tests"
    return report


@pytest.hookimpl(trylast=True)  # after every selection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matrix = [item for item in items if item.get_closest_marker("full_matrix")]
    plain = [item for item in items if not item.get_closest_marker("full_matrix")]
    left_out: list[pytest.Item] = []
    if config.getoption("--layouts") == "plain":
        left_out, matrix = matrix, []
    elif (count := config.getoption("--rotate")) is not None:
        left_out = [item for item in matrix if item.get_closest_marker("unseen")]
        left_out += rotation.left_out([item for item in matrix if item not in left_out], count, _one_in)
        matrix = [item for item in matrix if item not in left_out]
        matrix = rotation.arrange(matrix, count, lambda item: item.path.parent.name, lambda item: item.path.name)
    config.hook.pytest_deselected(items=left_out)
    if is_worker(config) and config.getoption("--order-seed") is None:
        plain = workers.arrange(plain, workers.recorded())
    items[:] = plain + matrix


def _one_in(item: pytest.Item) -> int:
    marker = item.get_closest_marker("one_in")
    return 1 if marker is None else int(marker.args[0])


@pytest.hookimpl(tryfirst=True)  # before the worker reports the collection
def pytest_collection_finish(session: pytest.Session) -> None:
    if is_worker(session.config):
        workers.write_units(session.config.stash[workers.RUN_FOLDER], session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("around") and find_spec("skyrl_megatron_observe") is None:
        pytest.skip("needs the packages around the core")
    limit = item.config.getoption("--matrix-minutes")
    if limit and item.get_closest_marker("full_matrix"):
        began = item.config.stash[workers.RUN_FOLDER] / "matrix"  # made by the worker that is there first
        began.mkdir(exist_ok=True)
        if time.time() - began.stat().st_mtime > limit * 60:
            pytest.skip(f"{NOT_REACHED}{limit:g} minutes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Give handlers a stream that stays open: those of a library that a test was the first to import, while ``capsys``
    replaced stderr, would report a closed file in every later test."""
    yield
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
            handler.stream = sys.stderr


class PartCounter:
    """How many tests of each part ran, for the summary and for ``--every-part``; not in a worker."""

    PARTS = ("fast", "the rest", "full_matrix")

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.not_reached = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part = next((part for part in self.PARTS if part in report.keywords), "the rest")
        if report.when == "call" and not report.skipped:
            self.ran[part] += 1
        elif report.when == "setup" and report.skipped and NOT_REACHED in str(report.longrepr):
            self.not_reached += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("--every-part") and session.exitstatus == pytest.ExitCode.OK and self.missing():
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def missing(self) -> list[str]:
        return [part for part in self.PARTS if not self.ran[part]]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.getoption("--every-part") and self.missing():
            terminalreporter.section("parts of which no test ran", red=True)
            terminalreporter.write_line(", ".join(self.missing()))
        if self.not_reached:
            reached = self.ran["full_matrix"]
            terminalreporter.section("full matrix")
            terminalreporter.write_line(f"{reached} of {reached + self.not_reached} tests in the given time")
            if reached:
                changes = rotation.rounds(reached / (reached + self.not_reached))
                terminalreporter.write_line(
                    f"at this pace {changes} changes reach all of it (one_in(n): n times as many)"
                )


@pytest.fixture(autouse=True)
def plugins_of_the_test() -> Iterator[None]:
    """What a test loads as ``trainer.plugins`` is not asked for in the processes of later ones."""
    before = {name: os.environ.get(name) for name in (plugins.VARIABLE, plugins.FOLDERS)}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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
