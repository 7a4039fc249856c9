"""The ladder of ``tests/gpu`` where there is no GPU: bodies of its rungs with planted faults, and how it stops."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import training
from tests.training import bodies

LADDER = Path(__file__).parents[1] / "gpu"


@pytest.mark.process
@pytest.mark.parametrize("fault", [None, "swapped q/k norm"])
def test_layers(ranks, folder, batch, fault):
    """Rung 10: ours against ours; a mistake in one layer shows."""
    exact = ranks(1, bodies.one_backward, folder, batch, "local", {})[0]
    found = ranks(1, bodies.one_backward, folder, batch, "local", {}, fault)[0]
    if fault is None:
        bodies.check_as_near(found, exact, exact)
    else:
        with pytest.raises(AssertionError, match="are off"):
            bodies.check_as_near(found, exact, exact)


@pytest.mark.process
def test_offload(ranks, folder, batch):
    """Rung 30."""
    ranks(1, bodies.leaves_and_comes_back, folder, batch, {})
    with pytest.raises(AssertionError, match="weights of before"):
        ranks(1, bodies.leaves_and_comes_back, folder, batch, {}, "replaced weights")
    with pytest.raises(AssertionError, match="not what left"):
        ranks(1, bodies.leaves_and_comes_back, folder, batch, {}, "lost moments")


@pytest.mark.process
def test_checkpoint(ranks, tmp_path):
    """Rung 40."""
    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    saved = ranks(1, training.saved, folder, root, {})[0]
    assert len(saved) > 40 and ranks(1, training.loaded, folder, root, {})[0] == saved
    assert ranks(1, training.loaded, folder, root, {}, "moments go elsewhere")[0] != saved


def test_every_rung_says_what_it_proves_and_what_to_report():
    rungs = sorted(LADDER.glob("test_*.py"))
    assert [int(rung.stem.split("_")[1]) for rung in rungs] == sorted({int(r.stem.split("_")[1]) for r in rungs})
    for rung in rungs:
        names = {
            t.id for node in ast.parse(rung.read_text()).body if isinstance(node, ast.Assign) for t in node.targets
        }
        assert {"PROVES", "REPORT"} <= names, rung.name


@pytest.mark.process
def test_the_first_failure_ends_the_climb(tmp_path):
    shutil.copy(LADDER / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "gpus.py").write_text("from skyrl_megatron import device\ndevice.driver_gpu_count = lambda: 1\n")
    for number, body in ((30, "assert True"), (0, "assert True"), (10, "assert False"), (20, "assert True")):
        rung = f"PROVES = 'what {number} proves'\nREPORT = 'what {number} says'\ndef test_{number}():\n    {body}\n"
        (tmp_path / f"test_{number:02}_rung.py").write_text(rung)
    command = [sys.executable, "-m", "pytest", "-p", "gpus", "-p", "no:cacheprovider", "-q", "-rs", str(tmp_path)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert "1 failed, 1 passed, 2 skipped" in run.stdout, run.stdout + run.stderr
    assert "the climb ended at test_10_rung" in run.stdout and "It proves: what 10 proves" in run.stdout
    assert "what 10 says" in run.stdout and "test_10_rung failed" in run.stdout
