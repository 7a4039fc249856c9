"""The tiny Qwen3-MoE and the batch that all tests of the training step share."""

import pytest

from tests.training import reference


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_hidden_layers=4, num_key_value_heads=2, initializer_range=0.2)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), **sizes)


@pytest.fixture(scope="session")
def batch(folder):
    batch = reference.make_batch(vocab_size=1003)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))
