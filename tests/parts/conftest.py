"""The tiny Qwen3-MoE and the batch of the tests of training, and the tiny model of those of adapters."""

from tests.training.conftest import batch, folder

__all__ = ["batch", "folder"]
