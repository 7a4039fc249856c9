"""The environments of the embedded run: additions and multiplications."""

import pytest

from skyrl_megatron.envs import make
from tests.envs.episodes import env


def test_multiply_single_turn():
    assert env("multiply", 12).step("It is \\boxed{ 12 }.")["reward"] == 1.0
    wrong = env("multiply", "12").step("\\boxed{13}")
    assert (wrong["reward"], wrong["done"], wrong["metadata"]) == (0.0, True, {"parsed_answer": "13"})
    assert env("multiply", "12").step("12")["reward"] == 0.0


def test_multiply_multi_turn():
    episode = env("multiply", "12", max_turns=3)
    first, second = episode.step("12"), episode.step("\\boxed{13}")
    assert [s["reward"] for s in (first, second)] == [0.0, 0.0] and not second["done"]
    assert "\\boxed" in first["observations"][0]["content"] and "'13' is wrong" in second["observations"][0]["content"]
    assert episode.step("\\boxed{14}")["reward"] == 0.5
    right = env("multiply", "12", max_turns=3).step("\\boxed{12}")
    assert (right["reward"], right["done"]) == (1.0, True)


def test_addition():
    assert env("addition", "101").step(" 101\n")["reward"] == 1.0
    wrong = env("addition", "101").step("1011")
    assert (wrong["reward"], wrong["done"], wrong["observations"]) == (0.0, True, [])


def test_addition_in_several_turns():
    episode = env("addition", "57", max_turns=4)
    steps = [episode.step(answer) for answer in ("60", " 9 ", "5x", "57")]
    assert [step["observations"] for step in steps] == [
        [{"role": "user", "content": "lower"}],
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "number"}],
        [],
    ]
    assert [(step["reward"], step["done"]) for step in steps] == [(0.0, False)] * 3 + [(1.0, True)]
    last = env("addition", "57", max_turns=2)
    assert not last.step("1")["done"] and last.step("1")["done"]


@pytest.mark.parametrize("id", ["multiply", "addition"])
def test_a_row_without_an_answer_is_refused(id):
    with pytest.raises(ValueError, match=r"the row has no reward_spec.ground_truth"):
        make(id, extras={})
