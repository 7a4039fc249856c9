"""The processes of a run on this host, their stacks, and what each waits for.

A process is the run's when its output goes into the run's folder, or when one above it is: that holds for trainer,
ranks, engines and what they started, and needs nothing that the run would have had to write.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron.errors import LaunchError, install_command

DUMP_S = 20.0
STACK_LOG_LINES = 5
SHOWN = 12
"""Innermost frames of a stack that are printed."""

_COLLECTIVES = "barrier|all_reduce|all_gather|reduce_scatter|broadcast|all_to_all|recv|wait"
WAITS = (
    (rf"torch/distributed/.*:(\w*)({_COLLECTIVES})", "other ranks, in a collective of torch.distributed"),
    (r"megatron/core/pipeline_parallel/p2p_communication", "its neighbour in the pipeline"),
    (r"torch/distributed/.*:(_store_based|init_process_group|_create_tcp_store)", "other ranks, to join the group"),
    (r"weight_sync/|weight_transfer", "the other side of a weight sync"),
    (r"workers/actor_group\.py:results", "its ranks"),
    (r"trainer/loop_thread\.py:run", "the event loop: engines, environments or the weight sync"),
    (r"ray/_private/worker\.py:(get|wait)", "an actor's answer"),
    (r"ray/_private/worker\.py:main_loop|:run_task_loop", "nothing: idle until it is called"),
    (r"vllm/v1/engine/core\.py:(run_busy_loop|_process_input_queue)", "requests"),
    (r"envs/", "an environment"),
    (r"asyncio/base_events\.py:(run_forever|_run_once)|selectors\.py:select", "events: idle, or a silent peer"),
    (r"subprocess\.py:\w*(wait|communicate)|multiprocessing/connection", "another process"),
)
"""Pattern of a frame (``file:function``) → what the process waits for; of the innermost frame that fits any."""


@dataclass(slots=True)
class Diagnosed:
    """A process and its main thread."""

    pid: int
    name: str
    log: Path | None
    cpu_percent: float
    frames: list[str] = field(default_factory=list)
    """``file:function:line``, innermost first; empty where they cannot be read."""
    why_not: str = ""
    """Why there are no frames."""

    @property
    def waits_for(self) -> str:
        """Return what it seems to wait for."""
        if not self.frames:
            return "unknown"
        for frame in self.frames:
            for pattern, meaning in WAITS:
                if re.search(pattern, frame):
                    return meaning
        return "nothing known: it works" if self.cpu_percent > 20 else "something that is not known here"


def diagnose(run: Path) -> list[Diagnosed]:
    """Look at all processes of a run. Raises LaunchError where there are none, or nothing to read stacks with."""
    run = run.expanduser().resolve()
    if not run.is_dir():
        raise LaunchError(f"RUN={run}: no such folder; give log_path/project_name/run_name of a run")
    found = processes(run)
    if not found:
        raise LaunchError(f"RUN={run}: no process of it on this host; it has ended, or its trainer is on another one")
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{sys.prefix}/bin") or shutil.which("py-spy")
    if spy is None:
        raise LaunchError(f"py-spy, which reads the stacks, is not installed: {install_command('py-spy')}")
    for process in psutil.process_iter():
        if process.pid in found:
            process.cpu_percent(None)
    looked_at = [_looked_at(spy, pid, log) for pid, log in sorted(found.items())]
    return sorted(looked_at, key=lambda each: (each.name != "trainer", each.name))


def processes(run: Path) -> dict[int, Path | None]:
    """Return the pids of a run's Python processes, each with the log that it writes."""
    own: dict[int, Path | None] = {}
    for process in psutil.process_iter():
        log = next((path for path in _outputs(process.pid) if path.is_relative_to(run)), None)
        if log is not None:
            own[process.pid] = log
            for child in _children(process):
                own.setdefault(child.pid, None)
    return {pid: log for pid, log in own.items() if _is_python(pid)}


def report(found: Sequence[Diagnosed], run: Path, lines: int) -> list[str]:
    """Return what there is to say of all processes, one after the other."""
    told = [f"{len(found)} processes of {run}"]
    told += [f"  {each.name:<24} pid {each.pid:<9} waits for {each.waits_for}" for each in found]
    for each in found:
        told += ["", f"── {each.name} (pid {each.pid}, {each.cpu_percent:.0f} % of a core)", *_stack(each)]
        told += [f"   log: {line}" for line in _tail(each.log, lines)]
    return told


def write_stacks(run: Path) -> str:
    """Write the report of a run that hangs into ``stacks.txt`` of its folder; returns words that say where it is, or
    why there is none."""
    try:
        told = report(diagnose(run), run, STACK_LOG_LINES)
        path = run / "stacks.txt"
        path.write_text("\n".join(told) + "\n")
    except (LaunchError, OSError, psutil.Error) as error:
        return f"; their stacks could not be written: {error}"
    return f"; the stacks of all processes of this host are in {path}"


def _stack(each: Diagnosed) -> list[str]:
    if not each.frames:
        return [f"   no stack: {each.why_not}"]
    left = len(each.frames) - SHOWN
    return [*(f"   {frame}" for frame in each.frames[:SHOWN]), *([f"   … {left} more"] if left > 0 else [])]


def _looked_at(spy: str, pid: int, log: Path | None) -> Diagnosed:
    name = "process"
    if log is not None:
        name = "trainer" if log.name == "console.log" else log.stem.replace("_rank", " rank ").replace("_", " ")
    try:
        process = psutil.Process(pid)
        if log is not None and log in _outputs(process.ppid()):  # a child has its parent's output
            name = f"{name}: {_title(process)}"
        known = Diagnosed(pid, name if log else _title(process), log, process.cpu_percent(0.2))
        # Without stopping the process: one that another debugger or SIGSTOP holds can be read too.
        command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S)
    except psutil.NoSuchProcess:
        return Diagnosed(pid, name, log, 0.0, why_not="it has ended meanwhile")
    except subprocess.TimeoutExpired:
        known.why_not = f"py-spy took more than {DUMP_S:.0f} s"
        return known
    if dumped.returncode:
        known.why_not = (dumped.stderr.strip().splitlines() or ["py-spy failed"])[-1]
    else:
        known.frames = main_frames(json.loads(dumped.stdout))
    return known


def main_frames(threads: Sequence[dict[str, Any]]) -> list[str]:
    """Return ``file:function:line`` of the main thread's frames, innermost first, of what ``py-spy dump --json``
    says."""
    if not threads:
        return []
    main = next((each for each in threads if each.get("thread_name") == "MainThread"), threads[0])
    # Newer Pythons tell the class too: Popen.wait.
    return [f"{frame['filename']}:{frame['name'].rpartition('.')[2]}:{frame['line']}" for frame in main["frames"]]


def _outputs(pid: int) -> list[Path]:
    found = []
    for descriptor in (1, 2):
        try:
            found.append(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
        except OSError:  # of another user, or gone
            continue
    return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    return str(words[0] if words else process.name()).rpartition("/")[2][:24]


def _tail(log: Path | None, lines: int) -> list[str]:
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 65536, 0))
        return file.read().decode(errors="replace").splitlines()[-lines:]
