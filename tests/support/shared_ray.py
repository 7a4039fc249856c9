"""A Ray that outlives the tests that use it: a head in processes of its own, which each of them joins and leaves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SLOTS, GPUS = 4, 4
START_S = 300.0
LEAVE_S = 300.0


@contextlib.contextmanager
def ray_head(log: Path, *, cpus: int, gpus: int = 0, environment: dict[str, str]) -> Iterator[str]:
    """The address of a cluster of one node on the loopback interface, for the block. GPUs are Ray's counters."""
    from skyrl_megatron.workers.runtime_env import LOOPBACK, free_port

    address = f"{LOOPBACK}:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="ray-") as files:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--num-cpus={cpus}"]
        command += [f"--node-ip-address={LOOPBACK}", f"--port={address.rpartition(':')[2]}", f"--temp-dir={files}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={256 << 20}"]
        command += [f"--num-gpus={gpus}"]
        with log.open("w") as output:
            head = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            deadline = time.monotonic() + START_S
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield address
        finally:
            head.terminate()
            head.wait(60)


class SharedRay:
    """The address of the session's Ray, and a way to join it."""

    slots = SLOTS
    """Logical CPUs."""

    def __init__(self, address: str) -> None:
        self.address = address

    def join(self) -> Any:
        """Join in a namespace of its own, once what others used is free again; returns ``ray``."""
        import ray

        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        deadline = time.monotonic() + LEAVE_S
        while any(ray.available_resources().get(name) != ray.cluster_resources()[name] for name in ("CPU", "GPU")):
            assert time.monotonic() < deadline, (ray.available_resources(), ray.cluster_resources())
            time.sleep(0.1)
        return ray

    @contextlib.contextmanager
    def joined(self) -> Iterator[Any]:
        """Join for the block. Actors that are left end with it."""
        ray = self.join()
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def shared_ray(log: Path) -> Iterator[SharedRay]:
    """The session's Ray, for the block."""
    # An actor without a GPU keeps the variables that it is given, as in a Ray of ours (workers/ray_setup.py).
    environment = {**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
    with ray_head(log, cpus=SLOTS, gpus=GPUS, environment=environment) as address:
        yield SharedRay(address)
