"""The time to the first step: parts that follow one another, from a batch script to the process that trains."""

import os
import time

import pytest

from skyrl_megatron import progress as start_times


@pytest.fixture(autouse=True)
def none_before(monkeypatch):
    monkeypatch.delenv(start_times.VARIABLE, raising=False)
    start_times.restore_marks("")
    yield
    start_times.restore_marks("")


def test_parts_follow_one_another_and_their_sum_is_the_whole(monkeypatch):
    now = time.time()
    monkeypatch.setenv(start_times.VARIABLE, f"begin@{now - 100:.3f},queue@{now - 60:.3f}")
    monkeypatch.setenv(start_times.VARIABLE, start_times.marks_for_command("cluster")[start_times.VARIABLE])
    start_times.begin(time.perf_counter())
    assert start_times.VARIABLE not in os.environ, "a second command of this process is another start"
    start_times.done("warm-up")
    handed = start_times.format_marks()  # to the actor that holds the run
    start_times.restore_marks(handed)
    start_times.done("weights")
    metrics = start_times.first_step()
    whole = metrics.pop("timing/to_first_step")
    names = ["queue", "cluster", "launch", "warm_up", "weights", "step"]
    assert list(metrics) == [f"timing/start/{name}" for name in names]
    assert metrics["timing/start/queue"] == pytest.approx(40, abs=0.01)
    assert whole == pytest.approx(sum(metrics.values())) and whole > 99.9
    assert start_times.first_step() == {}


def test_without_a_script_the_command_is_the_beginning():
    assert start_times.marks_for_command("cluster") == {}
    start_times.begin()
    start_times.done("ray")
    start_times.done("ray")  # a part that comes in two halves
    assert list(start_times.first_step()) == ["timing/to_first_step", "timing/start/ray", "timing/start/step"]


def test_a_variable_that_is_nothing_of_ours_is_left_out(monkeypatch):
    monkeypatch.setenv(start_times.VARIABLE, "yes,@3,begin@,x@y")
    start_times.begin()
    assert start_times.format_marks().startswith("begin@")


def test_a_process_that_began_nothing_measures_nothing():
    start_times.done("data")
    assert start_times.first_step() == {}
