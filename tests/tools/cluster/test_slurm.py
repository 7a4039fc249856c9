"""A real SLURM over two hosts: a run over both, its time limit, its requeue, and what goes wrong."""

import re
import stat
from pathlib import Path

import pytest

from tests.tools.cluster.two_hosts import TwoHosts, why_not
from tests.tools.cluster.whole_runs import BATCH, OVER_BOTH, RUN, WAIT_S, arguments, logged, metrics, saved

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(3600)]
BOTH = ("--nodes=2", "--time=60")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    # a short name: SLURM's and Ray's sockets have it in theirs
    hosts = TwoHosts(tmp_path_factory.mktemp("s"))
    yield hosts
    hosts.down()


def submit(hosts, *words):
    return hosts.submit(BATCH, *words, options=BOTH, SKYRL_WITHIN=str(WAIT_S))


def report_if_finished(hosts):
    left = [process for host in ("n1", "n2") for process in hosts.processes(host)]
    return not [process for process in left if process.name() not in ("slurmd", "slurmstepd", "sleep")]


def test_a_mistake_inside_salloc(hosts):
    """``launch/run_moe.sh`` typed there has Ray on both hosts, and gives back the exit code of the run."""
    words = [RUN, "--recipe=embedded", "trainer.epochs=never"]
    done = hosts.run("ctl", "salloc", *BOTH, *words, timeout=WAIT_S, SKYRL_WITHIN=str(WAIT_S))
    assert "cluster: 2 hosts: n1 (10.77.41.11), n2 (10.77.41.12)" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2 and "trainer.epochs" in done.stderr, done.stderr
    assert report_if_finished(hosts)


def test_a_job_over_two_hosts_and_its_requeue(hosts, model, undisturbed, tmp_path):
    """The same numbers, bit for bit, as on one host: in a job that runs through, though it was requeued."""
    folder = tmp_path / "requeued"
    job = submit(hosts, *arguments(model, folder, 4, *OVER_BOTH))
    hosts.await_output(job, "step 2/4", WAIT_S)
    hosts.on("ctl", "scontrol", "requeue", job)
    expected = undisturbed()  # SLURM waits two minutes before it starts a job again
    hosts.await_state(job, "COMPLETED", within_s=WAIT_S)
    output = hosts.output(job)
    assert output.count("cluster: 2 hosts: n1 (10.77.41.11), n2 (10.77.41.12)") == 2, output
    assert re.search(r"resumed from .* \(step \d of 4\)", output)
    assert metrics(folder) == expected
    tokens = [Path(hosts.folder, "runs", f"slurm-{job}.{start}", "token") for start in (0, 1)]
    assert all(stat.S_IMODE(token.stat().st_mode) == 0o600 for token in tokens)
    assert tokens[0].read_text() != tokens[1].read_text()
    first = logged(folder)[1]
    parts = {name: value for name, value in first.items() if name.startswith("timing/start/")}
    assert {"timing/start/queue", "timing/start/cluster", "timing/start/launch", "timing/start/ray"} <= parts.keys()
    assert first["timing/to_first_step"] == pytest.approx(sum(parts.values()))
    assert {"policy_rank0.log", "policy_rank1.log", "engine_0.log"} <= {each.name for each in folder.rglob("*.log")}
    assert report_if_finished(hosts)


def test_the_embedded_job_over_two_hosts_reaches_its_score(hosts, tmp_path):
    home = {"SKYRL_MEGATRON_HOME": str(tmp_path), "SKYRL_WITHIN": str(WAIT_S)}
    words = [BATCH, "--recipe=embedded", f"trainer.phase_timeout_s={WAIT_S}", *OVER_BOTH]
    job = hosts.submit(*words, options=BOTH, **home)
    hosts.await_state(job, "COMPLETED", within_s=3000)
    score = re.search(r"score: (\S+) before · (\S+) after", hosts.output(job))
    assert score and float(score[2]) >= 0.8, hosts.output(job)[-3000:]
    assert report_if_finished(hosts)


def test_the_time_limit_leaves_the_last_step(hosts, model, tmp_path):
    job = submit(hosts, *arguments(model, tmp_path, 1000, *OVER_BOTH))
    hosts.await_output(job, "step 2/1000", WAIT_S)
    hosts.on("ctl", "scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@300 does before the limit
    hosts.await_state(job, "FAILED", "COMPLETED", within_s=WAIT_S)
    output = hosts.output(job)
    assert f"stopped after step {saved(tmp_path)}; the same command continues from there" in output
    assert saved(tmp_path) >= 2 and max(metrics(tmp_path)) == saved(tmp_path)
    assert report_if_finished(hosts)


def test_a_host_that_is_cut_off_is_named(hosts, model, tmp_path):
    job = submit(hosts, *arguments(model, tmp_path, 1000, *OVER_BOTH))
    said = len(hosts.await_output(job, "step 2/1000", WAIT_S))
    try:
        hosts.cut_off("n2")
        hosts.await_output(job, "10.77.41.12", 300, after=said)
    finally:
        hosts.cut_off("n2", "up")
    hosts.await_state(job, "FAILED", "NODE_FAIL", "CANCELLED", within_s=300)
    assert saved(tmp_path) >= 1, "the same command continues from there"
    assert report_if_finished(hosts)
