"""The order of the matrix: all tests, a share for each area, and every test among the first ones before long."""

from itertools import groupby

import pytest

from tests.support import rotation

COUNTS = (0, 1, 7, 186, 187, 1000, 12345, 10**9)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_test_comes_round(stride):
    """Whatever the size of an area and however far a run gets; also when not every commit has a run."""
    for size in (1, 2, 3, 5, 8, 13, 27, 42, 45, 64, 100):
        for reached in range(1, size + 1):
            rounds = rotation.rounds(reached / size) * (1 if stride == 1 else 2)
            for count in COUNTS:
                seen = set()
                for run in range(rounds):
                    entry = rotation.start(count + run * stride, size)
                    seen.update((entry + i) % size for i in range(reached))
                assert len(seen) == size, f"{size} tests, {reached} a run, {rounds} runs from {count}"


AREAS = {"bridges": (40, 5, 5, 1), "checkpoint": (42, 3), "config": (11,), "job": (6, 9, 2), "training": (28,)}
TESTS = [
    (area, f"{area}/{module}", number)
    for area, modules in AREAS.items()
    for module, size in enumerate(modules)
    for number in range(size)
]


def arranged(count):
    return rotation.arrange(TESTS, count, lambda test: test[0], lambda test: test[1])


@pytest.mark.parametrize("count", COUNTS)
def test_each_area_has_its_share(count):
    """A run that is stopped anywhere has reached each area to within a block of the same share."""
    order = arranged(count)
    assert sorted(order) == sorted(TESTS)
    for reached in range(len(order)):
        for area, modules in AREAS.items():
            share = sum(test[0] == area for test in order[:reached]) / sum(modules)
            assert abs(share - reached / len(order)) <= 2 / rotation.BLOCKS, (area, reached)


@pytest.mark.parametrize("count", COUNTS)
def test_modules_are_set_up_a_few_times(count):
    """Once a block: as few as the modules and the cuts make them, and one more where an area goes round."""
    visits = [module for module, _ in groupby(arranged(count), lambda test: test[1])]
    assert len(visits) <= sum(len(modules) + rotation.BLOCKS + 1 for modules in AREAS.values())


def test_the_order_is_the_commits():
    assert arranged(187) == arranged(187) != arranged(188)


@pytest.mark.parametrize("count", COUNTS)
def test_one_of_many_comes_round_too(count):
    """In twice as many runs as there are turns, at most; what is not one of many is in each run."""
    items = [("cell", number) for number in range(50)] + [("test", number) for number in range(5)]
    taken = set()
    for run in range(24):
        left = rotation.left_out(items, count + run, lambda item: 12 if item[0] == "cell" else 1)
        assert len(left) in (45, 46) and all(name == "cell" for name, _ in left)
        taken |= set(items) - set(left)
    assert taken == set(items)
