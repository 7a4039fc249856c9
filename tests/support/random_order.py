"""Modules and their tests in a random order (``--order-seed``): whether a test needs that another ran before it."""

from __future__ import annotations

import random

import pytest

from tests.support.workers import unit_of


class RandomOrder:
    """The pytest plugin of ``--order-seed``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @pytest.hookimpl(tryfirst=True)  # pytest groups tests by the parameters of their shared fixtures afterwards
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        draw = random.Random(self._seed)
        units: dict[str, list[pytest.Item]] = {}
        for item in items:
            units.setdefault(unit_of(item), []).append(item)
        tests = list(units.values())
        draw.shuffle(tests)
        for unit in tests:
            draw.shuffle(unit)
        items[:] = [item for unit in tests for item in unit]
