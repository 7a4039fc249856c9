"""The doctor's last minute: each part of a run does something small and is compared with what must come out.

    python -m skyrl_megatron.entrypoints.doctor.self_test RUNG

runs one of :data:`RUNGS` in this process; the doctor gives each a process and a deadline. On CPU the same bodies run
over gloo, with our layers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from skyrl_megatron.entrypoints.doctor import rungs
from skyrl_megatron.entrypoints.doctor.finding import Finding

RUNGS = {"all-reduce": 90.0, "layer": 90.0, "weight sync": 90.0, "engine": 300.0}
"""Name → deadline in seconds. An engine's first start on a machine compiles kernels."""
ADVICE = {
    "all-reduce": "NCCL_DEBUG=INFO launch/doctor.sh shows where it stops, NCCL_P2P_DISABLE=1 or "
    "NCCL_IB_DISABLE=1 which link does not work",
    "layer": "launch/setup.sh gpu builds Transformer Engine anew after removing .venv",
    "weight sync": "docker run --ipc=host for CUDA IPC; NCCL_DEBUG=INFO for NCCL",
    "engine": "read the lines above it; launch/setup.sh gpu on this machine",
}


def self_test(*, gpu: bool) -> Iterator[Finding]:
    """Run every rung in a process of its own, one after the other."""
    for name, deadline in RUNGS.items():
        yield run_rung(name, deadline, gpu=gpu)


def run_rung(name: str, deadline_s: float, *, gpu: bool) -> Finding:
    """Run one rung; what it leaves behind is ended with it."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, name]
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        process.communicate()
        return Finding(name, "FAIL", f"not done within {deadline_s:g} s", ADVICE[name])
    _end(process.pid)
    if process.returncode:
        lines = [line for line in err.strip().splitlines() if line.strip() and not line.startswith(" ")]
        said = lines[-1][:300] if lines else f"ended with code {process.returncode}"
        return Finding(name, "FAIL", said, ADVICE[name])
    result = out.strip().splitlines()[-1]
    return Finding(name, "ok", f"{result} ({time.monotonic() - started:.0f} s)")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(name: str) -> None:
    """Run a rung and print what it measured; it raises where something is wrong."""
    print(rungs.BODIES[name]())


if __name__ == "__main__":
    main(sys.argv[1])
