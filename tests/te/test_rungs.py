"""What the ladder of ``tests/gpu`` and the doctor use of Transformer Engine is there, and takes their arguments."""

from pathlib import Path

import pytest

from tests.support.resolve import misfits

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "tests/gpu").glob("*.py")),
    *sorted((ROOT / "skyrl_megatron/entrypoints/doctor").glob("*.py")),
    ROOT / "skyrl_megatron/runtime/model/attention_kernels.py",
]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_names_and_arguments(file):
    assert misfits(file.read_text(), without=("vllm",)) == []
