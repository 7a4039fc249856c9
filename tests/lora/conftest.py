"""Fixtures of the tests of adapters in engines."""

import pytest


@pytest.fixture(scope="module")
def folder(tiny_moe):
    return tiny_moe["A"]


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop
