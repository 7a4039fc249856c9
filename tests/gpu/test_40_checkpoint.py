"""A checkpoint of every kind of optimizer that a GPU runs, loaded by a new engine and by one that has trained, and
one kind's by another."""

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
    assert len(saved) > 40
    for stepped in (False, True):
        loaded = ranks(1, training.loaded, folder, str(tmp_path / "run"), overrides, stepped=stepped)[0]
        assert loaded == saved, "into an optimizer that has stepped" if stepped else "into a new one"


def test_the_usual_adam_goes_on_from_a_precision_aware_one(ranks, tmp_path):
    """Which keeps lower halves of masters alone. The other way, in which masters half-way between two bf16 weights are
    not kept exactly, is compared by ``tests/te``."""
    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    bf16 = {"trainer.bf16": True}
    saved = ranks(1, training.saved, folder, root, bf16 | OPTIONS["precision-aware"])[0]
    loaded = ranks(1, training.loaded, folder, root, bf16 | OPTIONS["distributed"], stepped=False)[0]
    assert loaded == saved and len(saved) > 40
