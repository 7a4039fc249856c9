"""Which worker runs which module."""

from types import SimpleNamespace

import pytest

from tests.support import workers


def item(nodeid, *fixtures, **markers):
    """What :func:`workers.arrange` asks a test for."""
    marked = {name: SimpleNamespace(args=[value]) for name, value in markers.items()}
    return SimpleNamespace(nodeid=nodeid, fixturenames=fixtures, get_closest_marker=marked.get)


def test_the_pool_from_the_front_and_the_others_from_the_back():
    tests = [
        item("a.py::one"),
        item("short_pool.py::one", "ranks"),
        item("long.py::one"),
        item("long_pool.py::one", "ranks"),
        item("long_pool.py::two"),
        item("new.py::one"),
    ]
    seconds = {"a.py": 1, "long.py": 30, "short_pool.py": 2, "long_pool.py": 60}
    order = [each.nodeid for each in workers.arrange(tests, seconds)]
    assert order == [
        "long_pool.py::one",
        "long_pool.py::two",
        "short_pool.py::one",
        "a.py::one",
        "new.py::one",
        "long.py::one",
    ]


def test_a_group_of_modules_stays_together():
    tests = [
        item("rung_1.py::one", xdist_group="ladder"),
        item("other.py::one"),
        item("rung_2.py::one", xdist_group="ladder"),
    ]
    order = [each.nodeid for each in workers.arrange(tests, {"rung_1.py": 1, "rung_2.py": 3, "other.py": 3})]
    assert order == ["other.py::one", "rung_1.py::one", "rung_2.py::one"]


@pytest.mark.around
def test_recorded_modules_exist():
    """Renamed and deleted ones drop out with the next --record-durations; until then they would be no harm."""
    root = workers.DURATIONS.parents[1]
    assert all(seconds >= 0 and module.startswith("tests/") for module, seconds in workers.recorded().items())
    assert sum((root / module).exists() for module in workers.recorded()) >= 0.8 * len(workers.recorded())
