"""A run ends before its host's memory does, and only then. Numbers of memory are made up: a host that is really full
would take the suite with it."""

import re

import pytest

GIB = 2**30


def looks(gibibytes):
    """At which look it says so, and what; None when it never does."""
    from skyrl_megatron.errors import HostMemoryError
    from skyrl_megatron_observe.memory_forecast import MemoryForecast

    values = iter([int(each * GIB) for each in gibibytes])
    watch = MemoryForecast(lambda: next(values))
    for number in range(1, len(gibibytes) + 1):
        try:
            watch.check()
        except HostMemoryError as error:
            return number, str(error)
    return None


def test_a_leak_is_told_two_steps_ahead():
    number, message = looks([20 - step for step in range(21)])
    assert number == 19, "2 GiB are left, and two steps take them"
    assert "2.00 GiB are left, and each step takes 1.00 GiB more" in message
    assert re.search(r"Largest processes: .+ \(\d+\) \d", message)


@pytest.mark.parametrize(
    "gibibytes",
    [
        [0.3] * 30,
        [20, 1] * 15,
        [0.5 + 0.01 * step for step in range(30)],
        [40 - step for step in range(30)],
        [3, 2, 1],
    ],
    ids=["little but even", "up and down", "more and more", "falls with much left", "too few to tell"],
)
def test_nothing_is_said_without_a_trend_to_the_end(gibibytes):
    assert looks(gibibytes) is None


def test_what_is_available_here():
    import psutil

    from skyrl_megatron_observe.memory_forecast import available_bytes

    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_the_error_ends_the_run_instead_of_the_recorder():
    from types import SimpleNamespace

    from skyrl_megatron.errors import HostMemoryError
    from skyrl_megatron.trainer.recorders import Recorders
    from skyrl_megatron_observe.memory_forecast import FORECAST_STEPS, MemoryForecast, MemoryRecorder

    recorders = Recorders.__new__(Recorders)
    recorder, left = MemoryRecorder(SimpleNamespace()), iter(range(FORECAST_STEPS, 0, -1))
    recorder.forecast, recorders._recorders = MemoryForecast(lambda: next(left) * GIB), [recorder]
    for _ in range(FORECAST_STEPS - 1):
        recorders.before_step()
    with pytest.raises(HostMemoryError):
        recorders.before_step()
