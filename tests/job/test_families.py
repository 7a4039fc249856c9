"""Whole runs of families whose weights take another way to the engines than the embedded model's."""

import shutil

import pytest

from tests.job import runs
from tests.job.test_run import AGREE, GAP
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def test_gpt_oss(tmp_path):
    """Steps are large, so that weights which do not arrive would part trainer and engine at the second."""
    folder = runs.prepare(tmp_path)
    shutil.rmtree(folder / "model")
    write_tiny_model("gpt_oss", folder / "model", num_hidden_layers=2)
    lines = runs.run(folder, trainer__max_training_steps=3).check().lines
    assert len(lines) == 3
    assert all(line["policy/grad_norm"] > 0 and line[GAP] <= AGREE for line in lines)
