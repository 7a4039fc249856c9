"""Check the machine and the Ray cluster it joins: GPUs and links, shared and locked memory, ports, folders, clocks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.config.hardware import UNLOCK, lockable_bytes, rdma_cards
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.runtime_env import LOOPBACK, free_port
from skyrl_megatron_observe.preflight.machine_checks import MIN_LOCKED_BYTES
from skyrl_megatron_tools.doctor import Finding

LARGEST_SKEW_S = 1.0
"""Logs of several nodes are merged by time, and access tokens expire by the local clock."""
CLOCK_SAMPLES = 5
ANSWER_S = 60.0


def cluster() -> Iterator[Finding]:
    """Join the Ray cluster at RAY_ADDRESS and check its nodes. Leave it again, unless it was joined before."""
    import ray

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.ray_setup import initialize_ray

    joined_before = ray.is_initialized()
    try:
        initialize_ray(SkyRLTrainConfig(), log_to_driver=False)
    except LaunchError as error:
        text, _, fix = str(error).partition("; ")
        yield Finding("Ray cluster", "FAIL", text, fix)
        return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        yield gpus_of_nodes({node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in nodes})
        yield clocks({node["NodeManagerAddress"]: _skew(node["NodeID"]) for node in nodes})
    except (ray.exceptions.RayError, TimeoutError) as error:
        yield Finding("Ray cluster", "FAIL", str(error).splitlines()[0], "run ray status")
    finally:
        if not joined_before:
            ray.shutdown()


def _skew(node: str) -> tuple[float, float]:
    """Return (seconds that a node's clock is ahead of the local one, uncertainty), from the fastest call."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    clock: Any = ray.remote(num_cpus=0)(_now).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    answers = []
    for _ in range(CLOCK_SAMPLES):
        sent = time.time()
        remote = ray.get(clock.remote(), timeout=ANSWER_S)
        received = time.time()
        answers.append(((received - sent) / 2, remote - (sent + received) / 2))
    uncertainty, ahead = min(answers)
    return ahead, uncertainty


def _now() -> float:
    return time.time()


def gpus_of_nodes(counts: Mapping[str, int]) -> Finding:
    """Check that all nodes with GPUs have the same number of GPUs."""
    with_gpus = {address: count for address, count in counts.items() if count}
    text = f"{len(counts)} nodes, GPUs: " + (", ".join(f"{a} {c}" for a, c in with_gpus.items()) or "none")
    if len(set(with_gpus.values())) > 1:
        fix = "start Ray on every node with the --num-gpus of the smallest one, or leave nodes out: ranks fill nodes"
        return Finding("Ray cluster", "warn", text, fix)
    return Finding("Ray cluster", "ok", text)


def clocks(skews: Mapping[str, tuple[float, float]]) -> Finding:
    """Check the clocks of the nodes. ``skews``: address → (seconds ahead of the local clock, uncertainty)."""
    worst = max(skews, key=lambda address: abs(skews[address][0]))
    ahead, uncertainty = skews[worst]
    text = f"differ by at most {abs(ahead):.3f} s, at {worst} (± {uncertainty:.3f} s)"
    if abs(ahead) - uncertainty > LARGEST_SKEW_S:
        return Finding("clocks", "warn", text, "run chrony or systemd-timesyncd on every node")
    return Finding("clocks", "ok", text)


SHARED_MEMORY = "/dev/shm"
LEAST_SHARED = {False: 1 << 30, True: 8 << 30}
"""GPU run or not → bytes of shared memory that it needs for Ray's object store, NCCL and vLLM."""
WRITE_BYTES = 256 << 20
SLOW_WRITE = 200e6
"""Bytes/s. At this speed the 366 GB optimizer state of a 30B model takes half an hour."""
FEWEST_PORTS = 2000


def gpus(devices: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check this node's GPUs (as ``torch_facts`` lists them) and the links between them."""
    kinds = sorted({device["name"] for device in devices})
    least = min(device["bytes"] for device in devices)
    text = f"{len(devices)} · {' and '.join(kinds)}, {least / 1e9:.0f} GB"
    if len(kinds) > 1:
        fix = "set CUDA_VISIBLE_DEVICES to GPUs of one type: ranks wait for the slowest GPU"
        yield Finding("GPUs", "warn", text, fix)
    elif min(tuple(device["capability"]) for device in devices) < (8, 0):
        yield Finding(
            "GPUs", "FAIL", f"{text}: no bf16", "use GPUs of compute capability 8.0 or later (A100, H100, …)"
        )
    else:
        yield Finding("GPUs", "ok", text)
    if len(devices) > 1:
        yield links(len(devices))


def links(count: int) -> Finding:
    """Check with ``nvidia-smi topo -m`` whether NVLink connects all ``count`` GPUs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("GPU links", "warn", "unknown: nvidia-smi is missing", "install the tools of the NVIDIA driver")
    try:
        run = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return Finding("GPU links", "warn", "nvidia-smi topo -m does not return", "check dmesg: a GPU may have failed")
    kinds = set()
    for line in run.stdout.splitlines():
        row = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        cells = row[1 : count + 1]
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in cells:  # the header has no X
            kinds |= {cell for cell in cells if cell != "X"}
    if not kinds:
        return Finding("GPU links", "warn", "unknown: nvidia-smi topo -m lists no links", "run nvidia-smi topo -m")
    if all(kind.startswith("NV") for kind in kinds):
        return Finding("GPU links", "ok", f"NVLink between all ({', '.join(sorted(kinds))})")
    fix = "keep tensor_model_parallel_size and expert_model_parallel_size within GPUs that NVLink connects"
    return Finding("GPU links", "warn", f"not all NVLink: {', '.join(sorted(kinds))} (nvidia-smi topo -m)", fix)


def shared_memory(*, gpu: bool) -> Finding:
    """Check the free space in :data:`SHARED_MEMORY`."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return Finding(
            "shared memory", "FAIL", f"{SHARED_MEMORY}: {error.strerror}", f"mount a tmpfs at {SHARED_MEMORY}"
        )
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    text = f"{SHARED_MEMORY}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    fix = "docker run --shm-size=64g (or --ipc=host), or mount -o remount,size=64g /dev/shm; remove old files there"
    if free < LEAST_SHARED[False]:
        return Finding("shared memory", "FAIL", text, fix)
    return (
        Finding("shared memory", "warn", text, fix)
        if free < LEAST_SHARED[gpu]
        else Finding("shared memory", "ok", text)
    )


def locked_memory(
    nodes: int = 1,
    *,
    infiniband: Path = Path("/sys/class/infiniband"),
    status: Path = Path("/proc/self/status"),
) -> Finding:
    """Check the limit of locked memory for a run on ``nodes`` nodes. Buffers that RDMA network cards use count."""
    cards = rdma_cards(infiniband)
    if not cards:
        return Finding("locked memory", "ok", "not needed: no RDMA network card (CUDA's pinned memory has no limit)")
    limit = lockable_bytes(infiniband, status)
    if limit is None:
        return Finding("locked memory", "ok", f"unlimited: NCCL registers its buffers with {', '.join(cards)}")
    text = f"at most {limit / 1e6:.0f} MB: NCCL registers its buffers with {', '.join(cards)}"
    too_small = limit < MIN_LOCKED_BYTES
    return Finding("locked memory", "FAIL" if too_small and nodes > 1 else "warn", text, UNLOCK)


def ports(http_port: int = 0) -> Finding:
    """Check that ports are free, that there are enough, and that the HTTP endpoint's port is free (0: any port)."""
    try:
        free_port(LOOPBACK)
        free_port(socket_host())
    except LaunchError as error:
        return Finding("ports", "FAIL", str(error), "see above")
    if http_port:
        from skyrl_megatron_agents.http_endpoint import ENDPOINT_PORT, listening_socket

        try:
            listening_socket(LOOPBACK, http_port, ENDPOINT_PORT).close()
        except LaunchError as error:
            return Finding("ports", "FAIL", *str(error).rsplit("; ", 1))
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    text = f"{last - first + 1} for connections ({first} to {last})"
    if last - first < FEWEST_PORTS:
        fix = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
        return Finding("ports", "warn", text, fix)
    return Finding("ports", "ok", text)


def socket_host() -> str:
    """Return the address that this machine's host name resolves to, else loopback."""
    import socket

    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def ray_token(environment: Mapping[str, str], home: Path) -> Finding:
    """Check that the Ray cluster that a run starts or joins requires a token."""
    address = environment.get("RAY_ADDRESS")
    if not address:
        return Finding("Ray token", "ok", "a run starts Ray on loopback, with a new token")
    if environment.get("RAY_AUTH_MODE") != "token":
        text = f"none for RAY_ADDRESS={address}: anyone who reaches its ports can run code"
        return Finding("Ray token", "warn", text, "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on all nodes")
    token = environment.get("RAY_AUTH_TOKEN")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    if token or path.is_file():
        return Finding("Ray token", "ok", "in RAY_AUTH_TOKEN" if token else f"in {path}")
    text = f"RAY_AUTH_MODE=token is set, but neither RAY_AUTH_TOKEN nor {path} exists"
    return Finding("Ray token", "FAIL", text, "set RAY_AUTH_TOKEN to the cluster's token")


def checkpoint_folder(folder: Path, *, gpu: bool, size: int = WRITE_BYTES) -> Finding:
    """Write ``size`` bytes into ``folder``, or into its nearest existing parent, and check space and speed."""
    where = folder.expanduser().absolute()
    while not where.exists() and where != where.parent:
        where = where.parent
    fix = "set trainer.ckpt_path to a folder on a large, fast file system that all nodes share"
    block = os.urandom(1 << 22)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("checkpoints", "FAIL", f"{folder}: {error.strerror} (in {where})", fix)
    speed, free = size / (time.perf_counter() - started), shutil.disk_usage(where).free
    text = f"{folder}: {speed / 1e6:.0f} MB/s, {free / 1e9:.0f} GB free"
    return (
        Finding("checkpoints", "warn", text, fix) if gpu and speed < SLOW_WRITE else Finding("checkpoints", "ok", text)
    )
