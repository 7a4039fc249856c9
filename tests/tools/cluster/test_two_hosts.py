"""Two hosts that ssh reaches: a cluster over both, a run that joins it, and what goes wrong, each told in one line."""

import re
import shutil
import stat
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tools.cluster.two_hosts import NET, TwoHosts, why_not
from tests.tools.cluster.whole_runs import OVER_BOTH, ROOT, RUN, WAIT_S, arguments, metrics

pytestmark = [pytest.mark.process, pytest.mark.full_matrix, pytest.mark.timeout(1800)]
CLUSTER = ROOT / "launch" / "ray_cluster.sh"
UP = ("up", "--interface=eth0", f"--within={WAIT_S}")
WHERE = """
import ray
ray.init(logging_level="ERROR")
print(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]), ray.cluster_resources()["CPU"])
"""
BOTH = [f"{NET}.11", f"{NET}.12"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    hosts = TwoHosts(tmp_path_factory.mktemp("s"), slurm=False)
    (hosts.folder / "hosts.txt").write_text("n1\nn2\n")
    yield hosts
    hosts.down()


def left(hosts):
    """What stays on the hosts, but for sshd: the record of a host goes before its process."""
    there = [each for host in ("n1", "n2") for each in hosts.processes(host) if each.name() != "sshd"]
    return psutil.wait_procs(there, 60)[1]


@pytest.fixture(scope="module")
def cluster(hosts):
    """A cluster over both hosts; the variables with which it is joined."""
    up = hosts.run("n1", CLUSTER, *UP, "--hosts=hosts.txt", "--ray=--num-cpus=3", timeout=WAIT_S)
    assert up.returncode == 0, up.stderr
    yield dict(re.findall(r"export (\w+)=(\S+)", up.stdout))
    down = hosts.run("n1", CLUSTER, "down", timeout=WAIT_S)
    assert down.returncode == 0 and down.stdout == "cluster: stopped\n", down.stderr
    assert not left(hosts)


def told_once(done, *texts, code=1):
    """What a command said on stderr: one line for each text."""
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("… ")]
    assert done.returncode == code and len(lines) == len(texts), done.stdout + done.stderr
    for text in texts:
        assert any(re.search(text, line) for line in lines), (text, lines)


# ------------------------------------------------------------------ a cluster over both
def test_a_command_has_both_hosts_for_its_time(hosts):
    words = ["run", "--interface=eth0", f"--within={WAIT_S}", "--hosts=hosts.txt", "--dir=lent", "--ray=--num-cpus=3"]
    done = hosts.run("n1", CLUSTER, *words, "--", sys.executable, "-c", WHERE, timeout=WAIT_S)
    assert done.returncode == 0 and done.stdout.strip().endswith(f"{BOTH} 6.0"), done.stdout + done.stderr
    assert not left(hosts)


def test_it_is_shown_and_joined(hosts, cluster):
    assert cluster["RAY_ADDRESS"].startswith(f"{BOTH[0]}:") and cluster["RAY_AUTH_MODE"] == "token"
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    shown = hosts.on("n2", CLUSTER, "status")
    assert all(f"{host}  {address}  process" in shown for host, address in zip(("n1", "n2"), BOTH, strict=True))
    assert hosts.on("n2", sys.executable, "-c", WHERE, timeout=WAIT_S, **cluster).strip() == f"{BOTH} 6.0"


@pytest.mark.vllm
def test_a_run_that_joins_has_the_numbers_of_one_host(hosts, cluster, model, undisturbed, tmp_path):
    """RAY_ADDRESS with a rank on each host: bit for bit those of two ranks on one."""
    folder = tmp_path / "joined"
    done = hosts.run("n2", RUN, *arguments(model, folder, 4, *OVER_BOTH), timeout=WAIT_S, **cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        rf"ray: joined {cluster['RAY_ADDRESS']}, 2 nodes, folders written at \d+ MB/s or more", done.stdout
    )
    assert metrics(folder) == undisturbed()


@pytest.mark.vllm
def test_what_the_compose_file_starts(hosts, model, undisturbed, tmp_path):
    """Its two commands and variables, without containers: node2 when node1's healthcheck says yes."""
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    small = arguments(model, tmp_path / "run", 4)
    words = {"node1": [*services["node1"]["command"], *small], "node2": []}

    def command(name, *words):
        own = {
            key: str(value).replace("/shared", str(tmp_path)) for key, value in services[name]["environment"].items()
        }
        inside = hosts.command("n" + name[-1], ROOT / "docker" / "entrypoint.sh", *words)
        return inside, hosts.environment(**own, SKYRL_PORT="26000")

    def start(name):
        inside, environment = command(name, *words[name])
        with (tmp_path / f"{name}.out").open("w") as out:
            return subprocess.Popen(inside, env=environment, cwd=tmp_path, stdout=out, stderr=out)

    def healthy():
        inside, environment = command("node1", "health")
        return subprocess.run(inside, env=environment, capture_output=True).returncode == 0

    containers = [start("node1")]
    try:
        deadline = time.monotonic() + WAIT_S
        while not healthy():
            assert containers[0].poll() is None and time.monotonic() < deadline, (tmp_path / "node1.out").read_text()
            time.sleep(1)
        containers.append(start("node2"))
        codes = [container.wait(WAIT_S) for container in containers]
    finally:
        for container in containers:
            container.terminate()
    assert codes == [0, 0], [(tmp_path / f"{name}.out").read_text() for name in words]
    assert metrics(tmp_path / "run") == undisturbed()
    there = [" ".join(each.cmdline()) for host in ("n1", "n2") for each in hosts.processes(host)]
    assert not [each for each in there if str(tmp_path) in each], "other processes there are the other tests' cluster"


# ------------------------------------------------------------------ what goes wrong with a run
def run(hosts, host, variables, *words):
    paths = [f"trainer.{name}_path={hosts.folder}/run/{name}" for name in ("ckpt", "export", "log")]
    return hosts.run(host, RUN, "--recipe=embedded", *paths, *words, timeout=WAIT_S, **variables)


def test_a_wrong_token(hosts, cluster):
    wrong = hosts.folder / "wrong"
    wrong.write_text("0" * 64)
    done = run(hosts, "n2", cluster | {"RAY_AUTH_TOKEN_PATH": str(wrong)})
    told_once(
        done,
        rf"RAY_ADDRESS={cluster['RAY_ADDRESS']}: (the cluster does not accept this token|no Ray .* address and token)",
    )


def test_a_head_that_cannot_be_reached(hosts, cluster):
    hosts.cut_off("n2")
    try:
        done = run(hosts, "n2", cluster)
    finally:
        hosts.cut_off("n2", "up")
    told_once(done, rf"RAY_ADDRESS={cluster['RAY_ADDRESS']}: no Ray cluster answers .*unset RAY_ADDRESS")


def test_nodes_that_differ_and_a_folder_that_is_not_shared(hosts, cluster):
    """Node n2 has another version of a package, and another folder at the path of the checkpoints: both are told."""
    (own,) = [
        path for path in Path(metadata.distribution("transformers")._path.parent).glob("transformers-*.dist-info")
    ]
    other = hosts.folder / "other" / own.name  # not in the folder where Ray runs: Python looks there first
    shutil.copytree(own, other)
    text = (other / "METADATA").read_text()
    (other / "METADATA").write_text(re.sub(r"(?m)^Version: .*", "Version: 4.0.0", text, count=1))
    folder = hosts.folder / "run" / "ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    hosts.where_ssh_leads("n2", "mount", "--bind", other, own)
    hosts.where_ssh_leads("n2", "mount", "-t", "tmpfs", "none", folder)
    try:
        done = run(hosts, "n1", cluster)
    finally:
        hosts.where_ssh_leads("n2", "umount", own)
        hosts.where_ssh_leads("n2", "umount", folder)
    told_once(
        done,
        rf"node {BOTH[1]} \(n2\): transformers 4.0.0, but here {metadata.version('transformers')}; run launch",
        rf"node {BOTH[1]} \(n2\): {folder} is not the same folder as on this node; choose",
    )


def test_a_session_that_ended(hosts):
    """``ray start`` leaves its address behind; here in a folder of the test's own at /tmp/ray."""
    own = hosts.folder / "tmp-ray"
    own.mkdir()
    (own / "ray_current_cluster").write_text(f"{BOTH[0]}:6379")
    Path("/tmp/ray").mkdir(exist_ok=True)
    inside = ["unshare", "--mount", "sh", "-c", f'mount --bind {own} /tmp/ray; exec "$@"', "sh"]
    done = hosts.run("n1", *inside, RUN, "--recipe=embedded", timeout=WAIT_S)
    told_once(done, r"RAY_ADDRESS=auto \(.* in /tmp/ray/ray_current_cluster\): no Ray cluster answers")


# ------------------------------------------------------------------ what goes wrong with a cluster
def test_a_port_in_use_on_the_second_host(hosts):
    listen = (
        f"import socket, time; s = socket.create_server(('{BOTH[1]}', 29003)); print(1, flush=True); time.sleep(600)"
    )
    taken = subprocess.Popen(hosts.command("n2", sys.executable, "-c", listen), stdout=subprocess.PIPE)
    try:
        assert taken.stdout.readline() == b"1\n"
        done = hosts.run("n1", CLUSTER, *UP, "--hosts=hosts.txt", "--dir=taken", "--port=29000", timeout=WAIT_S)
    finally:
        taken.kill()
        taken.wait()
    told_once(done, rf"n2: .*port 29003 of {BOTH[1]} is in use .* --port")


def test_a_cluster_folder_that_is_not_shared(hosts):
    own = hosts.folder / "own"
    own.mkdir()
    hosts.where_ssh_leads("n2", "mount", "-t", "tmpfs", "none", own)
    try:
        words = ["--hosts=hosts.txt", f"--dir={own}/c", "--port=28000"]
        done = hosts.run("n1", CLUSTER, *UP, *words, timeout=WAIT_S)
    finally:
        hosts.where_ssh_leads("n2", "umount", own)
    told_once(done, rf"n2: .*{own}/c does not exist on this host; all hosts must share the folder")


def test_a_host_that_ssh_does_not_reach(hosts):
    (hosts.folder / "far.txt").write_text("n1\nctl\n")  # where no sshd is
    words = ["--hosts=far.txt", "--dir=far", "--port=27000"]
    done = hosts.run("n1", CLUSTER, *UP, *words, timeout=WAIT_S)
    told_once(done, r"ctl: .*ssh: connect to host ctl port 22: Connection refused")
    assert all("--port=27000" not in " ".join(each.cmdline()) for each in hosts.processes("n1"))
