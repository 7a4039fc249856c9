"""Addresses, ports, the shared folder and what nodes are compared in: no process is started."""

import contextlib
import json
import socket
import stat

import psutil
import pytest

from skyrl_megatron.errors import LaunchError
from skyrl_megatron_tools.cluster.hosts import (
    ClusterFolder,
    HeadAddress,
    Member,
    Ports,
    address_of,
    interface_of,
    on_host,
    read_hosts,
    require_rails,
)
from skyrl_megatron_tools.cluster.member import last_errors, network_variables


def numbers(options):
    return [int(option.rpartition("=")[2]) for option in options]


def test_ports_of_a_cluster_are_distinct_and_its_own():
    of = {job: set(numbers(Ports.of_job(job).options(head=True))) for job in range(100, 122)}
    assert all(len(ports) == 11 for ports in of.values())
    assert len(set.union(*of.values())) == 22 * 11, "jobs next to each other share a port"
    assert max(map(max, of.values())) < 32768, "Linux gives these to clients"
    assert any(each.startswith("--ray-client-server-port=") for each in Ports(10000).options(head=False))
    assert set(numbers(Ports(20000).options(head=False))) < set(numbers(Ports(20000).options(head=True)))


def test_a_port_in_use_is_named():
    for first in range(24000, 32000, 10):  # ports that Linux gives to nobody by itself
        with contextlib.suppress(LaunchError):
            Ports(first).require_free("127.0.0.1")
            break
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 9))
        taken.listen()
        with pytest.raises(LaunchError, match=rf"port {first + 9} of 127.0.0.1 is in use .* --port"):
            Ports(first).require_free("127.0.0.1")


def test_interfaces():
    assert (
        address_of("lo") == "127.0.0.1" and interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
    )
    with pytest.raises(LaunchError, match=r"no interface ib7 with an IPv4 address; choose .*lo \(127.0.0.1\)"):
        address_of("ib7")


def test_rails(tmp_path, monkeypatch):
    for name in ("mlx5_0", "mlx5_1"):  # no such card here: a folder like the kernel's
        (tmp_path / name).mkdir()
    require_rails(["mlx5_0", "mlx5_1:1"], tmp_path)
    with pytest.raises(LaunchError, match=r"no InfiniBand device mlx5_7; choose with --rails from: mlx5_0, mlx5_1"):
        require_rails(["mlx5_7"], tmp_path)
    with pytest.raises(LaunchError, match="mlx5_0; choose with --rails from: none"):
        require_rails(["mlx5_0"], tmp_path / "none")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    own = next(
        entry.address for entries in psutil.net_if_addrs().values() for entry in entries if usable(entry)
    )  # as every host has
    chosen = network_variables(own, ["mlx5_0", "mlx5_1:1"])
    assert chosen["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1:1"
    assert chosen["GLOO_SOCKET_IFNAME"] == chosen["NCCL_SOCKET_IFNAME"] == interface_of(own)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    assert "NCCL_IB_HCA" not in network_variables(own, ["mlx5_0"]), "the user's own choice stays"


def usable(entry):
    return entry.family is socket.AF_INET and not entry.address.startswith("127.")


def test_a_name_that_stands_for_loopback_asks_for_an_interface(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(LaunchError, match=r"resolves to 127.0.0.1, .*--interface: lo \(127.0.0.1\)"):
        address_of(None)


def test_the_folder_of_a_cluster(tmp_path):
    folder = ClusterFolder.make(tmp_path / "c")
    token = folder.path / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    assert folder.head() is None and folder.members() == [] and not folder.ended
    folder.announce(HeadAddress("10.0.0.1", 20000, "one"))
    for number in (10, 2):
        folder.join(Member(number, f"h{number}", "10.0.0.2", 7, 1.5))
    assert [member.number for member in folder.members()] == [2, 10]
    with pytest.raises(LaunchError, match=r"a cluster already uses this folder .* down --dir"):
        ClusterFolder.make(folder.path)
    folder.fail(2, "no disk")
    assert folder.failures() == ["no disk"]
    folder.end()
    again = ClusterFolder.make(folder.path)
    assert again.head() is None and again.members() == [] and again.failures() == [] and not again.ended
    assert not list(folder.path.rglob(".*")), "parts of files were left"


def test_variables_of_another_ray_do_not_reach_the_cluster(tmp_path, monkeypatch):
    folder = ClusterFolder.make(tmp_path)
    folder.announce(HeadAddress("10.0.0.1", 20000, "one"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    own = folder.environment()
    assert own["RAY_ADDRESS"] == "10.0.0.1:20000" and own["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "RAY_AUTH_TOKEN" not in own


def test_files_of_hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two\nn1  # first\n\n n2\n")
    assert read_hosts(file) == ["n1", "n2"]
    file.write_text("n1\nn1\n")
    with pytest.raises(LaunchError, match="n1 is listed more than once"):
        read_hosts(file)
    file.write_text("\n# nobody\n")
    with pytest.raises(LaunchError, match="the file contains no host"):
        read_hosts(file)
    with pytest.raises(LaunchError, match="No such file"):
        read_hosts(tmp_path / "none")


def test_a_command_on_another_host_keeps_its_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = on_host("far", ["echo", "two words", "$HOME"])
    assert command[-2] == "far" and command[-1] == f"cd {tmp_path} && exec echo 'two words' '$HOME'"
    assert on_host("localhost", ["echo", "a b"]) == ["echo", "a b"]


# ------------------------------------------------------------------ what nodes are compared in
def test_what_a_node_has_otherwise_is_named(tmp_path):
    from skyrl_megatron.workers.nodes import HERE, NodeReport, differences, versions

    own = versions()
    assert {"Python", "torch", "megatron-core", "ray"} <= own.keys()
    same = NodeReport("n2", "/usr/bin/python", str(HERE), own)
    assert differences("10.0.0.2", same) == []
    other = NodeReport("n2", "/usr/bin/python", str(HERE), own | {"torch": "2.0.0"})
    (told,) = differences("10.0.0.2", other)
    assert told.startswith(f"node 10.0.0.2 (n2): torch 2.0.0, but here {own['torch']}; run launch/setup.sh on")
    less = NodeReport("n2", "python", str(HERE), {name: value for name, value in own.items() if name != "ray"})
    assert "ray is missing" in differences("10.0.0.2", less)[0]
    moved = NodeReport("n2", "/opt/python", "/opt/skyrl_megatron", own)
    assert "imports skyrl_megatron from /opt/skyrl_megatron" in differences("10.0.0.2", moved)[0]
    driven = NodeReport("n2", "python", str(HERE), own | {"CUDA driver": "580.1"})
    assert differences("10.0.0.2", driven, own) == [], "a head without GPUs has no driver"
    assert differences("10.0.0.2", driven, own | {"CUDA driver": "570.2"}) != []


def test_a_folder_that_is_not_shared_is_missing(tmp_path):
    from skyrl_megatron.workers import nodes as shared_folders
    from skyrl_megatron.workers.nodes import report

    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    shared_folders.write_probe_files([shared], ".token")
    found = report([shared, own], ".token").folders
    assert found.missing == [own] and found.speed.keys() == {shared} and found.speed[shared] > 0
    assert (tmp_path / "shared" / f".token.{found.host}").exists()
    shared_folders.remove_probe_files([shared], ".token")
    assert list((tmp_path / "shared").iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LaunchError, match=r"file/sub: cannot be written \(.*; choose another folder"):
        shared_folders.write_probe_files([str(file / "sub")], ".token")


def test_the_order_of_what_is_seen(tmp_path):
    """No file system here shows a later file first: what it would show is laid down instead."""
    from skyrl_megatron.workers import nodes as shared_folders

    good, torn, late, unseen = (str(tmp_path / name) for name in ("good", "torn", "late", "unseen"))
    folders = [good, torn, late, unseen]
    shared_folders.write_probe_files(folders, ".t")
    shared_folders.write_in_order(folders, ".t")
    with (tmp_path / "torn" / ".t.data").open("r+b") as file:
        file.truncate(shared_folders.PROBE_BYTES // 2)
    (tmp_path / "late" / ".t.data").unlink()
    (tmp_path / "unseen" / ".t.whole").unlink()
    assert shared_folders.out_of_order(folders, ".t", within_s=0.3) == [torn, late, unseen]


def test_json_of_a_member_is_whole(tmp_path):
    from skyrl_megatron_tools.cluster.hosts import write_json_atomically

    write_json_atomically(tmp_path / "a.json", {"a": 1})
    write_json_atomically(tmp_path / "a.json", {"a": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 2} and len(list(tmp_path.iterdir())) == 1


def test_what_ended_ray_is_told_by_its_errors_not_its_warnings():
    warning = "[2026-11-24 02:07:56,986 W 8819 8819] network_util.cc:330: Failed to determine local IP via 8.8.8.8:53"
    ended = "2026-11-24 02:12:11,489 INFO node.py:748 -- Local node finished draining; shutting down."
    assert last_errors(f"{warning}\n{ended}\n\n") == ended
    error = "[2026-11-24 02:07:56,990 E 8819 8819] gcs_client.cc:12: Failed to connect to GCS"
    slow = "Exception: The current node timed out during startup; the raylet failed."
    assert last_errors(f"{warning}\n{error}\n{slow}\n{ended}") == f"{error} {slow}"
