"""The fixed curriculum: every prompt once, from easy to hard in each cycle, by the benchmark's difficulty."""

import pytest

from skyrl_megatron.data.curriculum import BUCKETS, curriculum, difficulty


def test_difficulty_is_three_quarters_pass_rate_and_one_quarter_size():
    assert difficulty([1.0, 0.0, 0.5, 0.0], [0, 20, 10, 400]) == pytest.approx([0.0, 1.0, 0.5, 1.0])
    assert difficulty([0.25], [4]) == pytest.approx([0.75 * 0.75 + 0.25 * 0.2])


@pytest.mark.parametrize(
    ("rows", "batch", "cycles"), [(685, 16, 2), (2592, 16, 2), (37, 8, 1), (5, 16, 2), (64, 16, 3)]
)
def test_every_prompt_comes_once(rows, batch, cycles):
    order = curriculum([(7 * row % rows) / rows for row in range(rows)], batch, seed=3, cycles=cycles)
    assert sorted(order) == list(range(rows))


def test_each_cycle_becomes_harder():
    rows, batch = 640, 16
    difficulties = [(271 * row % rows) / rows for row in range(rows)]
    order = curriculum(difficulties, batch, seed=5)
    easy, hard = (sorted(difficulties)[round(share * rows)] for share in (BUCKETS[0], 1 - BUCKETS[2]))
    for cycle in (order[:320], order[320:]):
        first, second, last = cycle[:96], cycle[112:208], cycle[224:]
        shares = [[sum(difficulties[row] < easy for row in part) / len(part) for part in (first, second, last)]]
        shares += [[sum(difficulties[row] >= hard for row in part) / len(part) for part in (first, second, last)]]
        assert shares[0][0] > shares[0][1] > shares[0][2] and shares[1][0] < shares[1][1] < shares[1][2], shares
        means = [sum(difficulties[row] for row in part) / len(part) for part in (first, second, last)]
        assert means[0] < means[1] < means[2]


def test_the_order_depends_on_the_seed_alone():
    difficulties = [0.5] * 100
    assert curriculum(difficulties, 16, seed=1) == curriculum(difficulties, 16, seed=1)
    assert curriculum(difficulties, 16, seed=1) != curriculum(difficulties, 16, seed=2)
