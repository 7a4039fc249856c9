"""A checkpoint of every kind of optimizer that a GPU runs, loaded by a new engine."""

import pytest

from tests.checkpoint import training
from tests.gpu.test_30_offload import OPTIONS

PROVES = (
    "a checkpoint holds weights, masters and moments of every kind of optimizer, bit for bit, also while offloaded"
)
REPORT = "the names of the tensors that differ"


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "fp8 moments"])
def test_saved_and_loaded(ranks, tmp_path, option):
    """FP8 moments are stored unscaled and scaled anew: near, not equal."""
    folder, overrides = training.save_model(tmp_path / "model"), {"trainer.bf16": True} | OPTIONS[option]
    saved = ranks(1, training.saved, folder, str(tmp_path / "run"), overrides)[0]
    loaded = ranks(1, training.loaded, folder, str(tmp_path / "run"), overrides)[0]
    assert loaded == saved and len(saved) > 40
