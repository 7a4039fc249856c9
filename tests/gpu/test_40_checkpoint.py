"""A checkpoint of every kind of optimizer that a GPU runs, loaded by a new engine and by one that has trained, and
one kind's by another."""

import pytest

from tests.checkpoint import training
from tests.gpu import installed
from tests.gpu.test_30_offload import CASES, asked

PROVES = (
    "a checkpoint holds weights, masters and moments of every kind of optimizer, bit for bit, also while offloaded"
)
REPORT = "the names of the tensors that differ"


@pytest.mark.parametrize(("layers", "option"), [case for case in CASES if case[1] != "fp8 moments"])
def test_saved_and_loaded(ranks, tmp_path, layers, option):
    """FP8 moments are stored unscaled and scaled anew: near, not equal."""
    folder, overrides = training.save_model(tmp_path / "model"), asked(layers, option)
    saved = ranks(1, training.saved, folder, str(tmp_path / "run"), overrides)[0]
    assert len(saved) > 40
    for stepped in (False, True):
        loaded = ranks(1, training.loaded, folder, str(tmp_path / "run"), overrides, stepped=stepped)[0]
        assert loaded == saved, "into an optimizer that has stepped" if stepped else "into a new one"


@pytest.mark.needs("te")
def test_the_usual_adam_goes_on_from_a_precision_aware_one(ranks, tmp_path):
    """Which keeps lower halves of masters alone. The other way, in which masters half-way between two bf16 weights are
    not kept exactly, is compared by ``tests/te``."""
    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    layers = installed.layer_choices()[-1]
    saved = ranks(1, training.saved, folder, root, asked(layers, "precision-aware"))[0]
    loaded = ranks(1, training.loaded, folder, root, asked(layers, "distributed"), stepped=False)[0]
    assert loaded == saved and len(saved) > 40
