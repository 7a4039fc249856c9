"""The kernels of ``fla-core``, interpreted on CPU.

The environment of the other tests has none, because transformers would use them for its own models, on CPU too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_delta_rule import operations


@pytest.mark.process
def test_kernels_compute_the_same_with_few_launches():
    """For 8,192 tokens of a sequence the loop over chunks takes more than a thousand operations, the kernels twenty,
    whatever the length."""
    root = Path(__file__).resolve().parents[2]
    program = root / "tests/runtime/scripts/delta_kernels.py"
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, program], env=variables, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["errors"].keys() == {"rule", "convolution"} and max(found["errors"].values()) < 2e-5, found
    assert sum(found["launches"].values()) <= 24, found
    assert operations((8192,)) > 1000 > 20 * found["launches"]["rule forward"], found
