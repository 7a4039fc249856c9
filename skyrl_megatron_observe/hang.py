"""The processes of a run on this host, their stacks, and what each of them waits for.

A process belongs to the run if its output goes into the run's folder, or if one of its ancestors belongs to the run.
This finds trainer, ranks, engines and their children, without any file that the run would have to write.
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

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import LaunchError, install_command
from skyrl_megatron.trainer.recorders import RunRecorder

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
    (r"trainer/event_loop\.py:run", "the event loop: engines, environments or the weight sync"),
    (r"ray/_private/worker\.py:(get|wait)", "an actor's answer"),
    (r"ray/_private/worker\.py:main_loop|:run_task_loop", "nothing: idle until it is called"),
    (r"vllm/v1/engine/core\.py:(run_busy_loop|_process_input_queue)", "requests"),
    (r"envs/", "an environment"),
    (r"asyncio/base_events\.py:(run_forever|_run_once)|selectors\.py:select", "events: idle, or a silent peer"),
    (r"subprocess\.py:\w*(wait|communicate)|multiprocessing/connection", "another process"),
)
"""Pattern of a frame (``file:function``) → what the process waits for. The innermost matching frame decides."""


class HangRecorder(RunRecorder):
    """Writes the stacks of all processes when ranks exceed a time limit."""

    def on_hang(self) -> str:
        return write_stacks(run_folder(self.run.cfg))


@dataclass(slots=True)
class ProcessState:
    """A process and the stack of its main thread."""

    pid: int
    name: str
    log: Path | None
    cpu_percent: float
    frames: list[str] = field(default_factory=list)
    """``file:function:line``, innermost first; empty if they cannot be read."""
    why_not: str = ""
    """Why there are no frames."""

    @property
    def waits_for(self) -> str:
        """What the process seems to wait for."""
        if not self.frames:
            return "unknown"
        for frame in self.frames:
            for pattern, meaning in WAITS:
                if re.search(pattern, frame):
                    return meaning
        return "nothing: it is computing" if self.cpu_percent > 20 else "something unknown"


def diagnose(run: Path) -> list[ProcessState]:
    """Return the state of each process of a run. Raises LaunchError if there is none, or if py-spy is missing."""
    run = run.expanduser().resolve()
    if not run.is_dir():
        raise LaunchError(f"RUN={run}: no such folder. Pass log_path/project_name/run_name of a run")
    logs = processes(run)
    if not logs:
        raise LaunchError(f"RUN={run}: no process of it on this host. It has ended, or it runs on another host")
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{sys.prefix}/bin") or shutil.which("py-spy")
    if spy is None:
        raise LaunchError(f"py-spy, which reads the stacks, is not installed: {install_command('py-spy')}")
    for process in psutil.process_iter():
        if process.pid in logs:
            process.cpu_percent(None)
    states = [_state(spy, pid, log) for pid, log in sorted(logs.items())]
    return sorted(states, key=lambda state: (state.name != "trainer", state.name))


def processes(run: Path) -> dict[int, Path | None]:
    """Return pid → log file, for the Python processes of a run."""
    logs: dict[int, Path | None] = {}
    for process in psutil.process_iter():
        log = next((path for path in _outputs(process.pid) if path.is_relative_to(run)), None)
        if log is not None:
            logs[process.pid] = log
            for child in _children(process):
                logs.setdefault(child.pid, None)
    return {pid: log for pid, log in logs.items() if _is_python(pid)}


def report(states: Sequence[ProcessState], run: Path, lines: int) -> list[str]:
    """Return the lines of a report on all processes; ``lines``: lines of each log."""
    text = [f"{len(states)} processes of {run}"]
    text += [f"  {state.name:<24} pid {state.pid:<9} waits for {state.waits_for}" for state in states]
    for state in states:
        text += ["", f"── {state.name} (pid {state.pid}, {state.cpu_percent:.0f} % of a core)", *_stack(state)]
        text += [f"   log: {line}" for line in _tail(state.log, lines)]
    return text


def write_stacks(run: Path) -> str:
    """Write the report of a hanging run to ``stacks.txt`` in its folder. Returns the end of a message: where the file
    is, or why it could not be written."""
    try:
        lines = report(diagnose(run), run, STACK_LOG_LINES)
        path = run / "stacks.txt"
        path.write_text("\n".join(lines) + "\n")
    except (LaunchError, OSError, psutil.Error) as error:
        return f"; their stacks could not be written: {error}"
    return f"; the stacks of all processes of this host are in {path}"


def _stack(state: ProcessState) -> list[str]:
    if not state.frames:
        return [f"   no stack: {state.why_not}"]
    left = len(state.frames) - SHOWN
    return [*(f"   {frame}" for frame in state.frames[:SHOWN]), *([f"   … {left} more"] if left > 0 else [])]


def _state(spy: str, pid: int, log: Path | None) -> ProcessState:
    name = "process"
    if log is not None:
        name = "trainer" if log.name == "console.log" else log.stem.replace("_rank", " rank ").replace("_", " ")
    try:
        process = psutil.Process(pid)
        if log is not None and log in _outputs(process.ppid()):  # a child inherits the output of its parent
            name = f"{name}: {_title(process)}"
        state = ProcessState(pid, name if log else _title(process), log, process.cpu_percent(0.2))
        # --nonblocking does not stop the process, and also reads one that is stopped by a debugger or SIGSTOP.
        command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S)
    except psutil.NoSuchProcess:
        return ProcessState(pid, name, log, 0.0, why_not="it has ended")
    except subprocess.TimeoutExpired:
        state.why_not = f"py-spy took more than {DUMP_S:.0f} s"
        return state
    if dumped.returncode:
        state.why_not = (dumped.stderr.strip().splitlines() or ["py-spy failed"])[-1]
    else:
        state.frames = main_frames(json.loads(dumped.stdout))
    return state


def main_frames(threads: Sequence[dict[str, Any]]) -> list[str]:
    """Return ``file:function:line`` of the main thread's frames, innermost first. ``threads``: the output of ``py-spy
    dump --json``."""
    if not threads:
        return []
    main = next((thread for thread in threads if thread.get("thread_name") == "MainThread"), threads[0])
    # Newer versions of Python include the class, as in Popen.wait.
    return [f"{frame['filename']}:{frame['name'].rpartition('.')[2]}:{frame['line']}" for frame in main["frames"]]


def _outputs(pid: int) -> list[Path]:
    paths = []
    for descriptor in (1, 2):
        try:
            paths.append(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
        except OSError:  # it belongs to another user, or has ended
            continue
    return paths


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
