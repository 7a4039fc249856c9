"""``launch/ray_cluster.sh`` on this host: a real Ray comes up, is joined, and goes; another one stays."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "ray_cluster.sh"
JOIN = "import ray; ray.init(logging_level='ERROR'); print(int(ray.cluster_resources()['CPU'])); ray.shutdown()"


LEAVE = """
import sys
import psutil, ray
from skyrl_megatron.command import run_command
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers import ray_setup

def work():
    ray_setup.join(sys.argv[1])
    try:
        psutil.Process(int(sys.argv[2])).suspend()
        if sys.argv[3]:
            raise LaunchError(sys.argv[3])
        print("done")
        return 0
    finally:
        ray_setup.END_TIMEOUT_S = 3.0
        ray_setup.end_ray()

sys.exit(run_command(work))
"""


def run(*words, timeout=300, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=timeout, env=env)


def free_window():
    """The first of ten ports that nobody listens on."""
    for first in range(24000, 32000, 1000):
        try:
            for port in range(first, first + 10):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no ports")


def test_up_join_and_down(tmp_path):
    window = free_window()
    up = run("up", "--dir", tmp_path / "c", "--port", str(window), "--ray=--num-cpus=5")
    assert up.returncode == 0, up.stderr
    try:
        exported = dict(line.removeprefix("export ").split("=", 1) for line in up.stdout.splitlines() if "=" in line)
        assert exported["RAY_ADDRESS"] == f"127.0.0.1:{window}"
        ours = json.loads((tmp_path / "c/members/0.json").read_text())
        processes = psutil.Process(ours["process"]).children(recursive=True)
        listening = {
            one.laddr.ip.removeprefix("::ffff:")
            for process in processes
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}, "only loopback, as no other host was asked for"
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | exported
        joined = subprocess.run([sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, timeout=200)
        assert joined.stdout.strip() == "5", joined.stderr
        wrong = env | {"RAY_AUTH_TOKEN": "0" * 64}
        refused = subprocess.run([sys.executable, "-c", JOIN], env=wrong, capture_output=True, text=True, timeout=200)
        assert refused.returncode != 0 and "token" in refused.stderr
        second = run("up", "--dir", tmp_path / "d", "--port", str(window))
        assert second.returncode == 1 and f"port {window} of 127.0.0.1 is in use" in second.stderr
        again = run("up", "--dir", tmp_path / "c")
        assert again.returncode == 1 and "a cluster already uses this folder" in again.stderr
        assert run("status", "--dir", tmp_path / "c").stdout.count("127.0.0.1") == 2
    finally:
        down = run("down", "--dir", tmp_path / "c")
    assert down.returncode == 0 and down.stdout == "cluster: stopped\n", down.stderr
    _, left = psutil.wait_procs(processes, 20)
    assert not left, left
    assert run("status", "--dir", tmp_path / "c").returncode == 1


def test_a_command_has_the_cluster_for_its_time(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    words = ["--dir", folder, "--port", str(free_window()), "--number=0", "--of=1", "--"]
    done = run("member", *words, sys.executable, "-c", f"{JOIN}; import sys; sys.exit(7)")
    assert done.returncode == 7, done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("… ")]
    assert told[0].startswith("cluster: 1 host: ") and told[1:] == ["16"]
    assert (folder / "ended").exists() and not list((folder / "members").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["member", "--dir", "/nonexistent/c", "--number=1", "--of=2"], "/nonexistent/c does not exist on this"),
        (["down", "--dir", "nothing"], "no cluster was started in this folder"),
        (["up", "--hosts", "nowhere"], "--hosts nowhere: No such file"),
        (["up", "--port", "80"], "--port 80: give a port from 1024"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_cluster_whose_head_stands_still_is_left(tmp_path):
    """With the exit code that the run has, and its error behind what is said of the head."""
    folder = tmp_path / "c"
    up = run("up", "--dir", folder, "--port", str(free_window()))
    assert up.returncode == 0, up.stderr
    exported = dict(line.removeprefix("export ").split("=", 1) for line in up.stdout.splitlines() if "=" in line)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | exported
    try:
        member = psutil.Process(json.loads((folder / "members/0.json").read_text())["process"])
        (head,) = [one for one in member.children(recursive=True) if one.name() == "gcs_server"]
        command = [sys.executable, "-c", LEAVE, exported["RAY_ADDRESS"], str(head.pid)]
        for error in ("", "what the run ended with"):
            left = subprocess.run([*command, error], env=env, capture_output=True, text=True, timeout=120)
            head.resume()
            assert (left.returncode, left.stdout) == ((1, "") if error else (0, "done\n")), left.stderr
            said = left.stderr.splitlines()
            assert "exits without shutting Ray down" in said[-2 if error else -1] and (not error or said[-1] == error)
    finally:
        run("down", "--dir", folder)
