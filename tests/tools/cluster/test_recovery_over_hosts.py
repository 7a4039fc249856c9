"""Ranks on several hosts: one that dies is replaced where it was, and with its host on another one, from the copy of
its state that a neighbour on another host has."""

import contextlib
import re
import subprocess
import time

import psutil
import pytest

from tests.tools.cluster.two_hosts import TwoHosts, why_not
from tests.tools.cluster.whole_runs import OVER_BOTH, ROOT, RUN, WAIT_S, arguments, metrics

pytestmark = [pytest.mark.process, pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(2400)]
CLUSTER = ROOT / "launch" / "ray_cluster.sh"
HOSTS = ("n1", "n2", "n3", "n4")
"""The policy, an engine, and one to spare: each has room for one process."""
HEALS = ("trainer.healing.enabled=true", "trainer.phase_timeout_s=300")
OF_HEALING = ("trainer/healings", "trainer/state_copies_gb")


@pytest.fixture
def hosts(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    hosts = TwoHosts(tmp_path, slurm=False, count=len(HOSTS))
    (hosts.folder / "hosts.txt").write_text("\n".join(HOSTS) + "\n")
    yield hosts
    hosts.down()


def ranks(hosts):
    """Process of each rank → its host."""
    return {
        each: host for host in HOSTS for each in hosts.processes(host) if each.name().startswith("ray::RankProcess")
    }


def lose(hosts, victim, host, whole):
    """Kill a process, or its host with all that is on it."""
    if whole:
        hosts.cut_off(host)
    for each in hosts.processes(host) if whole else [victim]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.mark.parametrize("whole", [False, True], ids=["a rank", "its host"])
def test_what_is_lost_is_replaced(hosts, model, undisturbed, tmp_path, whole):
    up = ("up", "--interface=eth0", f"--within={WAIT_S}", "--hosts=hosts.txt", "--ray=--num-cpus=1")
    done = hosts.run("n1", CLUSTER, *up, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    variables = dict(re.findall(r"export (\w+)=(\S+)", done.stdout))
    folder = tmp_path / "run"
    command = hosts.command("n1", RUN, *arguments(model, folder, 4, *OVER_BOTH, *HEALS))
    out = (tmp_path / "out.txt").open("w+")
    run = subprocess.Popen(command, env=hosts.environment(**variables), cwd=tmp_path, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + WAIT_S
        while "step 1/4" not in (said := (tmp_path / "out.txt").read_text()):
            assert run.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.2)
        there = ranks(hosts)
        assert len(there) == len(set(there.values())) == 2, there
        victim, host = next((each, host) for each, host in there.items() if host != "n1")
        lose(hosts, victim, host, whole)
        assert run.wait(WAIT_S) == 0, (tmp_path / "out.txt").read_text()
    finally:
        run.kill()
        out.close()
    said = (tmp_path / "out.txt").read_text()
    assert said.count("recovered: policy rank ") == 1 and f"(pid {victim.pid} on {hosts.addresses[host]})" in said, (
        said
    )
    healed = metrics(folder)
    assert sum(line["trainer/healings"] for line in healed.values()) == 1
    for line in healed.values():
        for name in OF_HEALING:
            del line[name]
    assert healed == undisturbed()
