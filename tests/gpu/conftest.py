"""The ladder for the first hour on a GPU: rungs in the order of their numbers, from imports to a whole colocated step.

Each rung says what it proves (``PROVES``) and what to report when it fails (``REPORT``); the first failure ends the
climb, because the rungs above would only fail for the same reason. A test that needs a package which is not installed,
or which ``SKYRL_WITHOUT`` leaves out (``te,vllm,ray``), is skipped. Without a GPU everything is skipped, unless
``SKYRL_SMOKE=1`` asks for what a CPU can run. ``launch/gpu_hour.sh`` gives each rung a time limit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import installed

HERE = Path(__file__).parent
failed: list[pytest.Item] = []


def is_rung(item: pytest.Item) -> bool:
    return item.path.parent == HERE


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_rung(item):
        item.add_marker(pytest.mark.xdist_group("the ladder"))
        item.add_marker("process")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if is_rung(item)]
    rungs = sorted((items[place] for place in places), key=lambda item: item.path.name)
    for place, item in zip(places, rungs, strict=True):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed and is_rung(item) and not failed:
        failed.append(item)
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    for item in failed:
        terminalreporter.section(f"the climb ended at {item.path.stem}")
        terminalreporter.write_line(f"It proves: {item.module.PROVES}")
        terminalreporter.write_line(f"Report: what {item.nodeid} and launch/doctor.sh print; {item.module.REPORT}")


@pytest.fixture(autouse=True)
def gpu(request):
    if failed and failed[0].path != request.node.path:
        pytest.skip(f"{failed[0].path.stem} failed")
    needed = {name for marker in request.node.iter_markers("needs") for name in marker.args}
    if not installed.is_rehearsal():
        needed.add(installed.GPU)
    if lacking := installed.lacking(needed):
        pytest.skip(lacking)
