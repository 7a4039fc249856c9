"""Tests of this folder need a GPU, and neither Ray, vLLM nor Transformer Engine."""

import pytest


@pytest.fixture(autouse=True)
def gpu():
    from skyrl_megatron import device

    if not device.driver_gpu_count():
        pytest.skip("no GPU")
