"""A run that is asked to end at random moments of its life: of its start, a step, a save, its end."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.job import runs
from tests.job.test_interrupts import CODES, hangups_end_processes  # noqa: F401  # a fixture of every test here
from tests.support.processes import abandoned_memory, left_behind, shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

KEYS = {"trainer__ckpt_interval": 1, "trainer__max_training_steps": 2, "trainer__plugins": "[registers]"}


def command(folder, **variables):
    """A run as users start one, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "skyrl_megatron.entrypoints.main_base", *runs.arguments(folder, **KEYS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=runs.environment(folder) | variables,
        start_new_session=True,
    )


def has_begun(process):
    """Whether the first import of the package has set what handles SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = runs.prepare(tmp_path_factory.mktemp("ended"))
    (folder / "registers.py").write_text(
        "from skyrl_megatron.envs import register\nregister('digits', 'digits:Digits')\n"
    )
    return folder


@pytest.fixture
def temporary():
    """A temporary folder, with a short name as sockets need it."""
    found = Path(tempfile.mkdtemp(prefix="e-"))
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="module")
def lasts(folder):
    """Seconds of a whole run."""
    began = time.monotonic()
    runs.finish(command(folder), folder).check()
    return time.monotonic() - began


def below(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("seed", range(30))
def test_ended_at_a_random_moment(folder, temporary, lasts, seed):
    """By the terminal, which signals all of its processes, or by a signal of the run alone; every third one twice."""
    draw = random.Random(seed)
    number = draw.choice([*CODES])
    whole = number != signal.SIGTERM and draw.random() < 0.5
    for name in ("ckpts", "exports", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shared = shared_memory()
    process = command(folder, TMPDIR=str(temporary), RAY_TMPDIR=str(temporary), PYTHONFAULTHANDLER="1")
    seen = {}
    try:
        while not has_begun(process):
            time.sleep(0.01)
        ends = time.monotonic() + draw.random() * lasts
        while time.monotonic() < ends and process.poll() is None:
            seen |= {child.pid: child for child in below(process)}
            time.sleep(0.05)
        for _ in range(2 if seed % 3 == 0 else 1):
            if process.poll() is None:
                seen |= {child.pid: child for child in below(process)}
                os.killpg(process.pid, number) if whole else process.send_signal(number)
                time.sleep(draw.uniform(0, 0.5))
        out, err = process.communicate(timeout=runs.TIMEOUT_S)
    finally:
        process.kill()
    assert not left_behind(seen.values())
    assert "killed the processes" not in err, f"it did not end by itself: {err[-8000:]}"
    assert "Traceback" not in err, err[-4000:]
    if process.returncode != 0:  # else it was at its end
        assert process.returncode == CODES[number], err[-4000:]
        said = [line for line in [*out.splitlines(), *err.splitlines()] if "interrupted" in line or "stopped" in line]
        assert len(said) == 1, (out, err)
    else:
        assert "step 2/2" in out
    logs_of_ray = ("ray", "session_")
    assert not [each.name for each in temporary.iterdir() if not each.name.startswith(logs_of_ray)]
    assert not abandoned_memory(shared)
