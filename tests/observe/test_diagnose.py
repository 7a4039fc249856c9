"""Processes of a run that hangs: found by their logs, read without stopping them, and what they wait for."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

WAITS = "import asyncio\nprint('waiting for a peer', flush=True)\nasyncio.run(asyncio.Event().wait())"


@pytest.mark.process
def test_processes_of_a_run_are_told_with_stack_and_log(tmp_path, capsys):
    """Two real processes that write into the folder, one in a child's wait; another run's process is left out."""
    import psutil

    from skyrl_megatron_observe.diagnose import main
    from skyrl_megatron_observe.hang import write_stacks

    logs = tmp_path / "run" / "workers"
    logs.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    sleeps = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WAITS!r}])"
    paths = {logs / "policy_rank0.log": WAITS, logs.parent / "console.log": sleeps, tmp_path / "other/x.log": WAITS}
    started = []
    try:
        for path, code in paths.items():
            with path.open("w") as log:
                started.append(subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log))
        deadline = time.monotonic() + 60
        while not all("waiting" in path.read_text() for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert main([str(tmp_path / "run")]) == 0
        out = capsys.readouterr().out
        noted = write_stacks(tmp_path / "run")
    finally:
        for child in psutil.Process(started[1].pid).children():
            child.kill()
        for process in started:
            process.kill()
            process.wait(30)
    if "no stack: " in out:
        pytest.skip(f"no rights to read other processes here: {out}")
    head = out.splitlines()
    assert head[0].startswith("3 processes of ") and head[1].split()[0] == "trainer"
    assert "waits for another process" in head[1]
    assert any("policy rank 0" in line and "waits for events" in line for line in head[:4])
    assert "log: waiting for a peer" in out and "asyncio" in out
    stacks = tmp_path / "run/stacks.txt"
    assert noted == f"; the stacks of all processes of this host are in {stacks}"
    assert stacks.read_text().splitlines()[0] == head[0] and "policy rank 0" in stacks.read_text()
    assert "could not be written: RUN=" in write_stacks(tmp_path / "run")  # whose processes are gone


@pytest.mark.full_matrix
@pytest.mark.process
def test_every_host_of_a_cluster_is_asked(tmp_path):
    """A real cluster of one host: what RAY_ADDRESS changes is who looks."""
    from tests.job import runs

    logs = tmp_path / "run" / "workers"
    logs.mkdir(parents=True)
    command = [sys.executable, "-m", "skyrl_megatron", "diagnose", str(tmp_path / "run")]
    with runs.cluster(tmp_path) as variables, (logs / "policy_rank0.log").open("w") as log:
        environment = runs.environment(tmp_path) | variables
        waits = subprocess.Popen([sys.executable, "-c", WAITS], stdout=log, stderr=log)
        try:
            found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        finally:
            waits.kill()
            waits.wait(30)
        none = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "━━ host 127.0.0.1" in found.stdout and "policy rank 0" in found.stdout
    assert none.returncode == 1 and "no process of it on this host" in none.stdout, none.stdout + none.stderr
    assert "Traceback" not in none.stdout + none.stderr


@pytest.mark.parametrize(
    ("frames", "meaning"),
    [
        (["x.py:wait:1", "site-packages/torch/distributed/distributed_c10d.py:all_reduce:9"], "other ranks"),
        (["ray/_private/worker.py:get:3", "skyrl_megatron/workers/actor_group.py:results:40"], "an actor's answer"),
        (["threading.py:wait:1", "skyrl_megatron/workers/actor_group.py:results:40"], "its ranks"),
        (["ray/_private/worker.py:main_loop:3"], "idle"),
        (["selectors.py:select:1", "asyncio/base_events.py:_run_once:2"], "events"),
        (["megatron/core/pipeline_parallel/p2p_communication.py:recv_forward:2"], "neighbour in the pipeline"),
        ([], "unknown"),
    ],
)
def test_what_a_stack_waits_for(frames, meaning):
    from skyrl_megatron_observe.hang import ProcessState

    assert meaning in ProcessState(1, "x", None, 0.0, frames).waits_for


def test_a_run_that_is_not_under_way(tmp_path, capsys):
    from skyrl_megatron_observe.diagnose import main

    assert main([str(tmp_path)]) == 1
    assert "no process of it on this host" in capsys.readouterr().err


def test_every_verb_has_a_command(capsys):
    import importlib

    from skyrl_megatron.cli import ALIASES, VERBS, main

    for place, _ in VERBS.values():
        module, _, function = place.partition(":")
        text = Path(importlib.util.find_spec(module).origin).read_text()
        assert f"\ndef {function or 'main'}(" in text, place
    assert set(ALIASES.values()) <= set(VERBS) and not set(ALIASES) & set(VERBS)
    assert main(["colour"]) == 2 and main([]) == 2 and main(["--help"]) == 0
    assert "VERB=colour: unknown verb" in capsys.readouterr().err
    assert main(["simulate", "--run", "logs"]) == 2
    assert "VERB=simulate: removed; use skyrl-megatron check --gpu" in capsys.readouterr().err


def test_data_sets_that_the_help_names_can_be_prepared():
    from skyrl_megatron.cli import VERBS
    from skyrl_megatron.data.prepare import DATASETS

    names = VERBS["prepare"][1].partition(": ")[2].removesuffix(", …").split(", ")
    assert len(names) == 3 and {*names} <= {*DATASETS}
