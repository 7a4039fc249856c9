"""What the doctor looks at, each with its failing side. GPUs, drivers and other machines' clocks cannot be had here:
what is said of those is judged from facts that are made up; all else is really broken."""

import os
import re
import resource
import socket
import sys
from pathlib import Path

import pytest

GB = 10**9


# ---------------------------------------------------------------------- software
@pytest.mark.process
def test_a_package_that_fails_dies_or_hangs_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    from skyrl_megatron_tools.doctor.software import import_all

    for package, body in {
        "apex": "raise ImportError('undefined symbol: _ZN3c105ErrorC2')",
        "flash_attn": "import os, sys; sys.stderr.write('illegal instruction'); sys.stderr.flush(); os._exit(3)",
        "deep_ep": "import time; time.sleep(600)",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = import_all(["apex", "flash-attn", "DeepEP", "Transformer Engine"], deadline_s=8)
    assert found["apex"].error == "ImportError: undefined symbol: _ZN3c105ErrorC2" and found["apex"].installed
    assert found["flash-attn"].error == "the process died with code 3: illegal instruction"
    assert found["DeepEP"].error == "did not return within 8 s"
    assert found.keys() == {"apex", "flash-attn", "DeepEP", "Transformer Engine"}


def judged(**imported):
    from skyrl_megatron_tools.doctor.software import Imported, packages, software

    facts = {"runtime": [13, 0], "driver": [13, 0], "collectives": "2.29.7", "devices": [{}], "reason": ""}
    outcomes = {name: Imported(True, "1.0") for name in packages(gpu=True)}
    outcomes["torch"] = Imported(True, "2.13.0", "", facts)
    outcomes |= imported
    return {finding.name: finding for finding in software(outcomes, gpu=True)}


def test_what_a_gpu_run_needs_and_what_it_does_not():
    from skyrl_megatron_tools.doctor.software import Imported

    fine = judged()
    assert {finding.state for finding in fine.values()} == {"ok"}, fine
    te = "Transformer Engine"
    missing = judged(**{te: Imported(), "apex": Imported(), "vLLM kernels": Imported(True, "", "libcuda.so.1")})
    assert missing[te].state == "FAIL" and missing[te].fix == "launch/setup.sh gpu"
    assert missing["apex"].state == "--" and not missing["apex"].fix
    assert missing["vLLM kernels"].state == "FAIL" and "driver" in missing["vLLM kernels"].fix
    broken = judged(
        **{te: Imported(True, "2.20.2", "ImportError: undefined symbol"), "apex": Imported(True, "", "no")}
    )
    assert broken[te].state == "FAIL" and "this environment's torch" in broken[te].fix
    hangs = judged(vLLM=Imported(True, "", "did not return within 240 s"))["vLLM"]
    assert hangs.text.startswith("does not import") and "when the machine is less busy" in hangs.fix
    assert broken["apex"].state == "warn"


@pytest.mark.parametrize(
    "facts, state, word",
    [
        ({"driver": [13, 2]}, "ok", "driver's CUDA 13.2"),
        ({"driver": [12, 8]}, "FAIL", "install a driver for CUDA 13.0"),
        ({"driver": [0, 0]}, "FAIL", "no driver, torch's 13.0"),
        ({"runtime": [13, 1]}, "warn", "update the driver to CUDA 13.1"),
        ({"runtime": [0, 0]}, "FAIL", "without CUDA"),
        ({"devices": [], "reason": "CUDA unknown error"}, "FAIL", "CUDA unknown error"),
        ({"devices": []}, "FAIL", "no device is visible"),
    ],
)
def test_driver_and_runtime(facts, state, word):
    from skyrl_megatron_tools.doctor.software import Imported

    usual = {"runtime": [13, 0], "driver": [13, 0], "collectives": None, "devices": [{}], "reason": ""}
    found = judged(torch=Imported(True, "2.13.0", "", usual | facts))
    assert found["CUDA"].state == state and word in str(found["CUDA"])
    assert found["NCCL"].state == "FAIL"


def test_other_pythons_are_refused():
    from skyrl_megatron_tools.doctor.software import python

    assert python(sys.version_info[:2]).state == "ok"
    assert python((3, 11)).state == python((3, 14)).state == "FAIL"


def test_a_package_of_another_version_is_named(tmp_path, monkeypatch):
    """As after ``pip install --upgrade`` beside the set-up."""
    from skyrl_megatron_tools.doctor.software import requirements

    assert requirements().state == "ok"
    (tmp_path / "ray-1.13.0.dist-info").mkdir()
    (tmp_path / "ray-1.13.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.13.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = requirements()
    assert found.state == "FAIL" and "ray is 1.13.0, but" in found.text and "launch/setup.sh" in found.fix


# ---------------------------------------------------------------------- the machine
def gpus(*devices):
    from skyrl_megatron_tools.doctor.machine import gpus

    return next(gpus(devices))


def test_gpus_of_one_kind_and_a_recent_one():
    h100 = {"name": "H100", "bytes": 80 * GB, "capability": [9, 0]}
    assert str(gpus(h100)).split()[:6] == ["ok", "GPUs", "1", "·", "H100,", "80"]
    assert gpus(h100, h100 | {"name": "A100"}).state == "warn"
    assert gpus(h100 | {"capability": [7, 5]}).state == "FAIL"


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \t{link}\tPIX\t0-47
GPU1\t{link}\t X \tSYS\t0-47
NIC0\tPIX\tSYS\t X
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "link, state, word", [("NV18", "ok", "NVLink"), ("PHB", "warn", "PHB"), (None, "warn", "nvidia-smi is missing")]
)
def test_links_of_gpus(tmp_path, monkeypatch, link, state, word):
    from skyrl_megatron_tools.doctor.machine import links

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if link else str(tmp_path))
    if link:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\ncat <<'END'\n{TOPOLOGY.format(link=link)}END\n")
        command.chmod(0o755)
    found = links(2)
    assert found.state == state and word in found.text, found


def test_shared_memory_without_room(monkeypatch):
    from skyrl_megatron_tools.doctor import machine

    monkeypatch.setattr(machine, "SHARED_MEMORY", "/proc")  # has no room
    assert machine.shared_memory(gpu=False).state == "FAIL" and "--shm-size" in machine.shared_memory(gpu=True).fix
    monkeypatch.setattr(machine, "SHARED_MEMORY", "/nowhere")
    assert machine.shared_memory(gpu=False).state == "FAIL"


def test_locked_memory_matters_to_rdma(tmp_path):
    from skyrl_megatron_tools.doctor.machine import locked_memory

    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards, user, root = (tmp_path / name for name in ("infiniband", "user", "root"))
    (cards / "mlx5_0").mkdir(parents=True)
    user.write_text("Uid:\t1000\nCapEff:\t0000000000000000\n")
    root.write_text("CapEff:\t000001ffffffffff\n")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, limits[1]))
    try:
        assert locked_memory(2, infiniband=tmp_path / "none", status=user).state == "ok"
        assert locked_memory(2, infiniband=cards, status=root).state == "ok"
        within, between = (locked_memory(nodes, infiniband=cards, status=user) for nodes in (1, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    assert within.state == "warn" and "mlx5_0" in within.text and "memlock=-1" in within.fix
    assert between.state == "FAIL" and "PropagateResourceLimitsExcept" in between.fix


def test_an_occupied_port_of_the_endpoint():
    from skyrl_megatron_tools.doctor.machine import ports

    assert ports().state != "FAIL"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = ports(taken.getsockname()[1])
    assert found.state == "FAIL" and "Address already in use" in found.text and "set another port" in found.fix


def test_checkpoint_folders_that_cannot_be_written(tmp_path):
    from skyrl_megatron_tools.doctor.machine import checkpoint_folder

    size = 8 << 20
    fine = checkpoint_folder(tmp_path / "not" / "yet", gpu=False, size=size)
    assert fine.state == "ok" and "MB/s" in fine.text and not (tmp_path / "not").exists()
    assert checkpoint_folder(Path("/proc/checkpoints"), gpu=False).state == "FAIL"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # as a quota ends a write
    try:
        full = checkpoint_folder(tmp_path, gpu=False, size=size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.state == "FAIL" and "too large" in full.text and "trainer.ckpt_path" in full.fix


def test_a_slow_folder_matters_to_a_gpu_run(tmp_path, monkeypatch):
    from skyrl_megatron_tools.doctor import machine

    monkeypatch.setattr(machine, "SLOW_WRITE", 1e15)  # no disk is that fast
    assert machine.checkpoint_folder(tmp_path, gpu=True, size=8 << 20).state == "warn"
    assert machine.checkpoint_folder(tmp_path, gpu=False, size=8 << 20).state == "ok"


def test_rays_token(tmp_path):
    from skyrl_megatron_tools.doctor.machine import ray_token

    joined = {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert ray_token({}, tmp_path).state == "ok"
    assert ray_token(joined, tmp_path).state == "warn"
    assert ray_token(joined | {"RAY_AUTH_MODE": "token"}, tmp_path).state == "FAIL"
    assert ray_token(joined | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, tmp_path).state == "ok"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert ray_token(joined | {"RAY_AUTH_MODE": "token"}, tmp_path).state == "ok"


# ---------------------------------------------------------------------- the cluster
def test_unlike_nodes_and_clocks():
    from skyrl_megatron_tools.doctor.machine import clocks, gpus_of_nodes

    assert gpus_of_nodes({"10.0.0.1": 8, "10.0.0.2": 8, "head": 0}).state == "ok"
    assert gpus_of_nodes({"10.0.0.1": 8, "10.0.0.2": 4}).state == "warn"
    assert clocks({"10.0.0.1": (0.01, 0.01)}).state == "ok"
    late = clocks({"10.0.0.1": (0.01, 0.01), "10.0.0.2": (-3.2, 0.01)})
    assert late.state == "warn" and "3.200 s, at 10.0.0.2" in late.text
    assert clocks({"10.0.0.1": (3.2, 4.0)}).state == "ok", "a slow answer tells nothing"


@pytest.mark.process
def test_a_cluster_is_asked():
    from skyrl_megatron.workers.ray_setup import local_ray
    from skyrl_megatron_tools.doctor.machine import cluster

    with local_ray(2):
        nodes, clock = cluster()
    assert nodes.state == clock.state == "ok", (nodes, clock)
    assert nodes.text.startswith("1 nodes, GPUs: none") and re.search(r"0\.\d+ s, at \d+\.", clock.text)
