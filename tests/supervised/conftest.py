"""The model and the batch of tests of the training step."""

from tests.training.conftest import batch, folder

__all__ = ["batch", "folder"]
