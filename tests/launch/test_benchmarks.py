"""Benchmarks still run: each with ``--smoke``, in seconds and with sizes that measure nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.run import names
from tests.support.processes import given_the_folder, left_behind

ROOT = Path(__file__).resolve().parents[2]
FRONT = [sys.executable, str(ROOT / "benchmarks" / "run.py")]
BENCHMARKS = names()
RIVALS = dict.fromkeys(("advantages", "preferences"), "--rivals-python is needed")
"""What runs nowhere without packages of others, and how it ends."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_takes_smoke_and_explains_itself(name):
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert "from smoke import parse" in text and f"python benchmarks/run.py {name}" in text


@pytest.mark.process
def test_the_front_lists_them_and_refuses_others():
    done = subprocess.run(FRONT, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == BENCHMARKS
    assert all(len(line.split()) > 3 for line in lines)
    done = subprocess.run([*FRONT, "colour"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "NAME=colour: no such benchmark" in done.stderr


def test_terms_of_a_step_name_rungs_that_there_are():
    from benchmarks.step_on_paper import RUNGS
    from tests.gpu import ladder

    assert {name for rungs in RUNGS.values() for name in rungs} <= {rung.name for rung in ladder.RUNGS}


@pytest.mark.process
@pytest.mark.vllm
@pytest.mark.full_matrix
@pytest.mark.one_in(6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs(tmp_path, name):
    """To its end, and leaves no process."""
    if name == "exchange" and (os.getuid() != 0 or not shutil.which("ip")):
        pytest.skip("network namespaces need root and iproute2")
    command = [*FRONT, name, "--smoke"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    began = set(psutil.pids())
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500)
    if name in RIVALS:
        assert run.returncode == 2 and RIVALS[name] in run.stderr
    else:
        assert run.returncode == 0 and run.stdout.strip(), run.stdout[-2000:] + run.stderr[-4000:]
    left = [process for process in given_the_folder(tmp_path) if process.pid not in began]
    assert not left_behind(left, within_s=30)
