"""Fixtures of the tests of adapters in engines."""

import pytest

from tests.support.engines import LoopThread
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def loop():
    loop = LoopThread()
    yield loop
    loop.close()
