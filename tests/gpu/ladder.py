"""The first hour on a GPU: rungs in the order of what they prove per minute, each with a time limit of its own.

    launch/gpu_hour.sh [--minutes N] [--without te,vllm,ray] [--only RUNG,…] [--out DIR] [--again] [--smoke] [--list]

A rung that fails stops only the rungs that need it. ``DIR`` (default ``gpu_hour``) is described in ``report.py``. A
second call runs the rungs that have not passed, and of those the tests that have not; ``--again`` repeats them all.
``--smoke``: tiny sizes, and without a GPU what a CPU can run of each rung. A rung is "not runnable" where this machine
lacks something, which follows, and "out of time" where the end of ``--minutes`` stops it: the next call resumes it.
Where this process is killed, so is the rung. The exit code is 0 when no rung failed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.gpu import installed
from tests.gpu.report import FAILED, NOT_RUNNABLE, OUT_OF_TIME, Report

ROOT = Path(__file__).resolve().parents[2]
POLL_S, GRACE_S = 0.2, 10.0
CPU_FACTOR = 3
"""Time limits of a rehearsal without a GPU, on few cores."""
SLICE = ("benchmarks/gpu_run.py", "--layers", "4", "--folder", "{work}/run")
ONE_GPU = (
    *("benchmarks/gpu_run.py", "--recipe", "olmoe-1b-7b"),
    *("--layers", "16", "--steps", "2"),
    "--folder",
    "{work}/one",
)
MEGATRON = "trainer.policy.megatron_config."
LOCAL = f"{MEGATRON}transformer_config_kwargs.transformer_impl=local"
TRAIN, EXCHANGE = "benchmarks/gpu_train.py", "benchmarks/gpu_exchange.py"
PROFILE = (
    *(TRAIN, "--layers", "1", "--steps", "1", "--sequences", "4"),
    *(f"{MEGATRON}torch_profiler_config.{key}" for key in ("enable=true", "save_path={work}/profile")),
    *("trainer.policy.record_memory=true", "trainer.ckpt_path={work}"),
)


@dataclass(frozen=True)
class Rung:
    """A command with a time limit. ``needs``: packages, and a GPU. ``after``: rungs without which it can only fail."""

    name: str
    command: tuple[str, ...]
    seconds: int
    proves: str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def arguments(self, work: Path, passed: Sequence[str]) -> list[str]:
        """Return the arguments of Python. ``work``: a folder for its files; ``passed``: tests to leave out."""
        command = [*self.command]
        if os.environ.get("SKYRL_SMOKE") == "1" and command[0].startswith("benchmarks/"):
            for size in {"--layers", "--steps", "--sequences"} & {*command}:
                del command[command.index(size) : command.index(size) + 2]
            command.append("--smoke")
        command += [f"--deselect={name}" for name in passed]
        return [part.replace("{work}", str(work)) for part in command]


def tests(*chosen: str) -> tuple[str, ...]:
    """A rung of tests of ``tests/gpu``."""
    options = ("-rfEs", "-p", "no:cacheprovider", "--durations=8", "--basetemp={work}/tests")
    return ("-m", "pytest", "-v", *options, *chosen)


def pair(name: str, seconds: int, proves: str, needs: tuple[str, ...], after: tuple[str, ...] = ()) -> Rung:
    """A rung of ``benchmarks/gpu_pairs.py``."""
    return Rung(name, ("benchmarks/gpu_pairs.py", name), seconds, proves, needs, after)


def cost(name: str, proves: str, *needs: str) -> Rung:
    """A rung of ``benchmarks/gpu_costs.py``: two runs of ``gpu_train.py``."""
    return Rung(name, ("benchmarks/gpu_costs.py", "--only", name), 180, proves, needs)


TESTS = "tests/gpu/test_"
RUNGS = (
    Rung("imports", tests(f"{TESTS}00_imports.py"), 120, "torch, NCCL, TE and vLLM import and fit the driver"),
    Rung("step", tests(f"{TESTS}20_training_step.py"), 240, "a training step equals transformers"),
    Rung("transports", tests(f"{TESTS}50_transports.py"), 120, "weights travel over NCCL and CUDA IPC"),
    Rung("kernels", ("benchmarks/gpu_kernels.py",), 90, "log-prob kernels against the bandwidth of memory"),
    Rung("train_local", (TRAIN, "--layers", "2", LOCAL), 150, "tokens/s and MFU, own layers"),
    Rung("sync", ("benchmarks/gpu_weight_sync.py", "--layers", "4"), 90, "GB/s of a weight sync within the GPU"),
    Rung("engines", tests(f"{TESTS}60_engines.py"), 420, "weights change under load, graphs, sleep"),
    Rung("run", tests(f"{TESTS}90_run.py"), 300, "two colocated steps", ("ray",), ("step",)),
    Rung(
        "one_gpu",
        ONE_GPU,
        540,
        "two steps of the quick start for one GPU, random weights",
        ("ray", "vllm", "gpu"),
        ("run",),
    ),
    Rung("offload", tests(f"{TESTS}30_offload.py"), 240, "state leaves the GPU and returns whole", (), ("step",)),
    Rung("checkpoint", tests(f"{TESTS}40_checkpoint.py"), 240, "checkpoints, bit for bit", (), ("step",)),
    Rung(
        "layers", tests(f"{TESTS}10_layers.py"), 240, "Transformer Engine's layers compute what ours do", ("te", "gpu")
    ),
    Rung("sinks", tests(f"{TESTS}16_sinks.py"), 90, "flash attention with sinks is that of all scores", ("gpu",)),
    Rung("prefixes", tests(f"{TESTS}17_shared_prefixes.py"), 240, "shared prefixes are those of rows", (), ("step",)),
    Rung("delta", tests(f"{TESTS}15_delta_net.py"), 120, "gated delta nets by kernels are ours", ("fla", "gpu")),
    Rung("adapters", tests(f"{TESTS}25_adapters.py"), 180, "adapters are PEFT's", (), ("step",)),
    Rung("train_te", (TRAIN, "--layers", "2"), 150, "tokens/s and MFU, TE's layers", ("te", "gpu")),
    Rung("profile", (*PROFILE, LOCAL), 120, "a torch profile and a memory snapshot of a step"),
    Rung("slice", SLICE, 540, "seconds by phase of a colocated step", ("ray", "te", "gpu")),
    Rung("slice_local", (*SLICE, LOCAL), 540, "the same on own layers", ("ray",)),
    Rung(
        "exact",
        (*SLICE, LOCAL, "trainer.exact_rollouts=true", "trainer.rollout_gap_exceeded=warn"),
        540,
        "the log-prob gap that batch-invariant kernels leave",
        ("ray", "te", "vllm", "gpu"),
        ("slice_local",),
    ),
    pair("graphs", 300, "a decoded token with CUDA graphs, and without", ("vllm", "gpu")),
    pair("moves", 150, "offload and onload beside other work, and alone", (), ("offload",)),
    pair("attention", 90, "attention with sinks by the kernel, and with all scores", ("gpu",), ("sinks",)),
    pair("delta_net", 120, "gated delta nets by kernels, and by our loop", ("fla", "gpu"), ("delta",)),
    cost("caches", "caches emptied for others only, and after each update"),
    cost("recompute", "activations kept, and computed again"),
    cost("gradients", "gradients added in their product, and after it", "te", "gpu"),
    cost("allocator", "memory in expandable segments, and in fixed ones", "gpu"),
    cost("host_threads", "Adam on the host with all cores, and with one", "gpu"),
    cost("host_copies", "Adam on the host beside its copies, and after them", "gpu"),
    Rung("exchange", (EXCHANGE,), 300, "experts' exchange beside another micro-batch, and by DeepEP", (), ("step",)),
)

SKIPPED = re.compile(r"^SKIPPED \[\d+\] \S+?: (.*)", re.MULTILINE)
"""Reasons in pytest's summary."""
UNTIL_KILLED = 'trap "kill -KILL -$$" USR1; "$@" & trap "" TERM; wait $!'
"""Runs a command; kills it, with its process group, at the signal that the kernel sends when the ladder ends."""


def end_with(ladder: int) -> None:
    """Between fork and exec: let the kernel send a signal when the ladder ends, however it does."""
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG
    if os.getppid() != ladder:
        os._exit(1)


def run(arguments: Sequence[str], seconds: float, report: Report) -> int | None:
    """Run Python for at most ``seconds``, its output in ``report.running``; return the exit code, None if it did not
    end. Nothing that it started is left."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    with report.running.open("ab") as output:
        process = subprocess.Popen(
            ["sh", "-c", UNTIL_KILLED, "rung", sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),
        )
    try:
        deadline = time.monotonic() + seconds
        while (code := process.poll()) is None and time.monotonic() < deadline:
            report.cut_running()
            time.sleep(POLL_S)
        if code is None:
            os.killpg(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        return code
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(10)


def outcome_of(code: int | None, output: str, passed: Sequence[str], *, cut_off: bool) -> str:
    """Return what an exit code and the output mean. ``passed``: tests that had passed before and were left out;
    ``cut_off``: the limit was the end of the climb, not the rung's own."""
    if code is None:
        return OUT_OF_TIME if cut_off else "too slow"
    if code and code != 5:  # pytest's 5: no test was left to run
        return "failed"
    reasons = why_nothing_ran(output, code)
    return "passed" if reasons is None or passed else f"{NOT_RUNNABLE}: {reasons}"


def why_nothing_ran(output: str, code: int) -> str | None:
    """Return why a rung that ended well proved nothing, as its skipped tests or its last line say; None if it did."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if "nothing measured" in last:
        return last.partition(": nothing measured")[0]
    if code == 5 or (" skipped" in last and " passed" not in last):
        return ", ".join(dict.fromkeys(SKIPPED.findall(output))) or "no test is left"
    return None


def environment() -> str:
    """What a reader of the results wants to know of the machine."""
    found = [f"python {sys.version}"]
    for command in (["nvidia-smi"], ["nvcc", "--version"], [sys.executable, "-m", "pip", "list"]):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            found.append(f"$ {' '.join(command)}\n{ended.stdout}")
        except (OSError, subprocess.TimeoutExpired) as error:
            found.append(f"$ {' '.join(command)}\n{error}")
    return "\n".join(found)


def climb(report: Report, rung: Rung, left: float, again: bool) -> tuple[str, str]:
    """Run a rung and record it. ``left``: seconds of the climb. Return its outcome and its last line."""
    limit = rung.seconds * (CPU_FACTOR if installed.is_rehearsal() else 1)
    passed = [] if again else list(report.rungs.get(rung.name, {}).get("tests", []))
    report.begin(rung.name, passed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_hour_", ignore_cleanup_errors=True) as name:
        code = run(rung.arguments(Path(name), passed), min(limit, left), report)
        output = report.running.read_text(errors="replace")
        outcome = outcome_of(code, output, passed, cut_off=left < limit)
        return outcome, report.add(rung, outcome, time.monotonic() - started, Path(name))


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/gpu_hour.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="start no rung later than this, and end by then")
    parser.add_argument("--without", default="", help="packages to do without: te,vllm,ray")
    parser.add_argument("--only", default="", help="names of rungs, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("gpu_hour"), help="folder of the results")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; on a CPU too")
    parser.add_argument("--list", action="store_true", help="show the rungs and end")
    args = parser.parse_args()
    if args.without:
        os.environ["SKYRL_WITHOUT"] = args.without
    if args.smoke:
        os.environ["SKYRL_SMOKE"] = "1"
    try:
        installed.missing()
    except ValueError as error:
        parser.error(f"--without: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of the rung, which leaves no process
    only = [name for name in args.only.split(",") if name]
    if unknown := set(only) - {rung.name for rung in RUNGS}:
        parser.error(f"--only: no rung {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in RUNGS)}")
    if args.list:
        for rung in RUNGS:
            print(f"{rung.name:12s} {rung.seconds:4d} s  {rung.proves}")
        return 0
    began, report = time.monotonic(), Report(args.out, RUNGS)
    report.write_text("environment.txt", environment())
    for rung in RUNGS:
        left = args.minutes * 60 - (time.monotonic() - began)
        if (only and rung.name not in only) or left <= 0:
            continue
        if not args.again and report.outcome(rung.name) == "passed":
            continue
        lacking = installed.lacking(rung.needs)
        broken = [name for name in rung.after if report.outcome(name) in FAILED]
        if lacking or broken:
            reason = f"skipped: {broken[0]} {report.outcome(broken[0])}" if broken else ""
            reason = f"{NOT_RUNNABLE}: {lacking}" if lacking else reason
            report.set(rung.name, reason)
            print(f"{rung.name:13s} {reason}", flush=True)
            continue
        outcome, last = climb(report, rung, left, args.again)
        print(f"{rung.name:13s} {outcome:11s} {report.rungs[rung.name]['seconds']:6.1f} s  {last:.100}", flush=True)
    print(f"{report.counts()}\nresults: {args.out}\nnext: {report.following()}")
    return int(any(report.outcome(rung.name) in FAILED for rung in RUNGS))


if __name__ == "__main__":
    sys.exit(main())
