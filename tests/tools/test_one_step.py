"""One step of everything, on real parts, and what it leaves behind."""

import os
import subprocess
import sys

import psutil
import pytest


def descendants():
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.mark.vllm
def test_prompts_to_synced_weights(tmp_path):
    before = descendants()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "skyrl_megatron_tools.one_step", "--dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    gaps = [float(line.split("largest difference ")[1].split()[0]) for line in lines if "largest difference" in line]
    before_step, unsynced, synced = gaps
    assert before_step <= 1e-4 and synced <= 1e-4 < unsynced
    assert lines[-1] == "OK: log-probs agree with equal weights, and differ without the sync"
    assert descendants() <= before, "a process was left behind"


@pytest.mark.process
def test_too_little_memory_is_one_line(tmp_path):
    """More memory is asked for than any machine has, because taking it all would take down the test."""
    code = (
        "import sys; from skyrl_megatron_tools import one_step; one_step.NEEDED_GIB = 1e6; "
        f"sys.exit(one_step.main(['--dir', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.startswith("memory: ") and len(result.stderr.splitlines()) == 1
    assert "1000000.0 GiB" in result.stderr and "Traceback" not in result.stderr
