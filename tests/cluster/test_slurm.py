"""A real SLURM over two hosts: a run over both, its time limit, its requeue, and what goes wrong."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.two_hosts import TwoHosts, why_not

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 900  # a deadline, not a measure: cores may be shared
BATCH = ROOT / "launch" / "slurm" / "run_moe.sbatch"
OVER_BOTH = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=1"]
SMALL = [
    "--recipe=embedded",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.update_epochs_per_batch=1",
    "trainer.algorithm.zero_variance_filter=false",  # an untrained model solves nothing
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=1",
    "trainer.hf_save_interval=0",
    "trainer.run_name=run",
]
NOT_COMPARED = re.compile(r"^(timing|memory)/|trajectory_time|_per_second|peak_memory_bytes")  # of the machine


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    # a short name: SLURM's and Ray's sockets have it in theirs
    hosts = TwoHosts(tmp_path_factory.mktemp("s"))
    yield hosts
    hosts.down()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from skyrl_megatron.entrypoints.embedded_model import write_embedded_model

    return write_embedded_model(tmp_path_factory.mktemp("model") / "m", 42)


def arguments(model, folder, steps, *more):
    paths = [f"trainer.{name}_path={folder}/{name}" for name in ("ckpt", "export", "log")]
    return [*SMALL, f"model={model}", f"trainer.max_training_steps={steps}", *paths, *more]


def metrics(folder):
    """What a run logged, by step, without times and memory."""
    (file,) = Path(folder, "log").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not NOT_COMPARED.search(name)} for line in lines
    }


def saved(folder):
    return int(Path(folder, "ckpt", "latest_ckpt_global_step.txt").read_text())


def undisturbed(model, folder):
    """The metrics of four steps on one host, without SLURM."""
    folder.mkdir()
    command = [ROOT / "launch/run_moe.sh", *arguments(model, folder, 4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=folder, env=clean_environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return metrics(folder)


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}


def nothing_left(hosts):
    left = [process for host in ("n1", "n2") for process in hosts.processes(host)]
    return not [process for process in left if process.name() not in ("slurmd", "slurmstepd", "sleep")]


def test_a_job_over_two_hosts_and_its_requeue(hosts, model, tmp_path):
    """The same numbers, bit for bit, as on one host: in a job that runs through, though it was requeued."""
    folder = tmp_path / "requeued"
    job = hosts.submit(
        BATCH, *arguments(model, folder, 4, *OVER_BOTH), options=("--nodes=2", "--time=30"), SKYRL_WITHIN=str(WAIT_S)
    )
    hosts.await_output(job, "step 2/4", WAIT_S)
    hosts.on("ctl", "scontrol", "requeue", job)
    expected = undisturbed(model, tmp_path / "undisturbed")  # SLURM waits two minutes before it starts a job again
    hosts.await_state(job, "COMPLETED", within_s=WAIT_S)
    output = hosts.output(job)
    assert output.count("cluster: 2 hosts: n1 (10.77.41.11), n2 (10.77.41.12)") == 2, output
    assert metrics(folder) == expected
    assert nothing_left(hosts)


def test_the_time_limit_leaves_the_last_step(hosts, model, tmp_path):
    job = hosts.submit(
        BATCH,
        *arguments(model, tmp_path, 1000, *OVER_BOTH),
        options=("--nodes=2", "--time=30"),
        SKYRL_WITHIN=str(WAIT_S),
    )
    hosts.await_output(job, "step 2/1000", WAIT_S)
    hosts.on("ctl", "scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@300 does before the limit
    hosts.await_state(job, "FAILED", "COMPLETED", within_s=180)
    output = hosts.output(job)
    assert f"stopped after step {saved(tmp_path)}; the same command continues from there" in output
    assert saved(tmp_path) >= 2 and max(metrics(tmp_path)) == saved(tmp_path)
    assert nothing_left(hosts)


def test_a_host_that_is_cut_off_is_named(hosts, model, tmp_path):
    job = hosts.submit(
        BATCH,
        *arguments(model, tmp_path, 1000, *OVER_BOTH),
        options=("--nodes=2", "--time=30"),
        SKYRL_WITHIN=str(WAIT_S),
    )
    said = len(hosts.await_output(job, "step 2/1000", WAIT_S))
    try:
        hosts.cut_off("n2")
        hosts.await_output(job, "10.77.41.12", 300, after=said)
    finally:
        hosts.cut_off("n2", "up")
    hosts.await_state(job, "FAILED", "NODE_FAIL", "CANCELLED", within_s=300)
    assert saved(tmp_path) >= 1, "the same command continues from there"
    assert nothing_left(hosts)
