"""Rewards bounded in time, in threads, where environments run."""

import threading
import time

import pytest

from skyrl_megatron.envs import within


def test_a_function_has_its_time():
    assert within(60, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(60, divmod, 7, 0)


def test_one_that_does_not_end_is_ended_in_any_thread():
    """Also where it swallows every Exception; its thread is gone soon after."""
    before, found = set(threading.enumerate()), []

    def stubborn():
        while True:
            try:
                time.sleep(0.001)
            except Exception:
                pass

    def reward():
        try:
            within(0.05, stubborn)
        except TimeoutError as error:
            found.append(str(error))

    thread = threading.Thread(target=reward)
    thread.start()
    thread.join(60)
    assert found == ["stubborn took longer than 0.05 s"]
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
