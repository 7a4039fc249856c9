"""The first hour on a GPU: rungs in the order of what they prove per minute, each with a time limit of its own.

    launch/gpu_hour.sh [--minutes N] [--without te,vllm,ray] [--only RUNG,…] [--out DIR] [--again] [--list]

A rung that fails stops only the rungs that need it. ``DIR`` (default ``gpu_hour``) has at most eight files, and is
complete after each rung: ``summary.md`` with the outcome of every rung and the next thing to do, ``results.json`` with
the figures, ``environment.txt``, ``logs.txt`` with the end of every rung's output. A second call runs the rungs that
have not passed; ``--again`` repeats them all. The exit code is 0 when no rung failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import installed

ROOT = Path(__file__).resolve().parents[2]
LOG_BYTES = 200_000
"""The end of a rung's output that is kept."""
SLICE = ("benchmarks/gpu_run.py", "--layers", "4")
LOCAL = "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl=local"


@dataclass(frozen=True)
class Rung:
    """A command with a time limit. ``needs``: packages. ``after``: rungs without which it can only fail."""

    name: str
    command: tuple[str, ...]
    seconds: int
    proves: str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def tests(*chosen: str) -> tuple[str, ...]:
    """A rung of tests of ``tests/gpu``."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8", *chosen)


TESTS = "tests/gpu/test_"
RUNGS = (
    Rung("imports", tests(f"{TESTS}00_imports.py"), 120, "torch, NCCL, TE and vLLM import and fit the driver"),
    Rung("step", tests(f"{TESTS}20_training_step.py"), 240, "a training step equals transformers"),
    Rung("transports", tests(f"{TESTS}50_transports.py"), 120, "weights travel over NCCL and CUDA IPC"),
    Rung("kernels", ("benchmarks/gpu_kernels.py",), 90, "log-prob kernels against the bandwidth of memory"),
    Rung("train_local", ("benchmarks/gpu_train.py", "--layers", "2", LOCAL), 150, "tokens/s and MFU, own layers"),
    Rung("sync", ("benchmarks/gpu_weight_sync.py", "--layers", "4"), 90, "GB/s of a weight sync within the GPU"),
    Rung("engines", tests(f"{TESTS}60_engines.py"), 300, "weights change under load, graphs, sleep", ("vllm",)),
    Rung("run", tests(f"{TESTS}90_run.py"), 300, "two colocated steps", ("vllm", "ray"), ("step",)),
    Rung("offload", tests(f"{TESTS}30_offload.py"), 240, "state leaves the GPU and returns whole", (), ("step",)),
    Rung("checkpoint", tests(f"{TESTS}40_checkpoint.py"), 240, "checkpoints, bit for bit", (), ("step",)),
    Rung("layers", tests(f"{TESTS}10_layers.py"), 240, "Transformer Engine's layers compute what ours do", ("te",)),
    Rung("sinks", tests(f"{TESTS}16_sinks.py"), 90, "flash attention with sinks is that of all scores"),
    Rung("delta", tests(f"{TESTS}15_delta_net.py"), 120, "gated delta nets by kernels are ours", ("fla",)),
    Rung("adapters", tests(f"{TESTS}25_adapters.py"), 180, "adapters are PEFT's", (), ("step",)),
    Rung("train_te", ("benchmarks/gpu_train.py", "--layers", "2"), 150, "tokens/s and MFU, TE's layers", ("te",)),
    Rung("costs", ("benchmarks/gpu_costs.py",), 420, "what each setting is worth against the one it replaces"),
    Rung("slice", SLICE, 420, "seconds by phase of a colocated step", ("vllm", "ray", "te")),
    Rung("slice_local", (*SLICE, LOCAL), 420, "the same on own layers", ("vllm", "ray")),
)


class Report:
    """The folder of results: written anew, file by file, after each rung."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._results = folder / "results.json"
        self.rungs: dict[str, dict[str, object]] = {}
        if self._results.exists():
            self.rungs = json.loads(self._results.read_text())

    def add(self, rung: Rung, outcome: str, seconds: float, output: str) -> None:
        """Record the outcome of a rung and the figures that it printed."""
        figures = printed_json(output)
        self.rungs[rung.name] = {"outcome": outcome, "seconds": round(seconds, 1)} | (
            {"figures": figures} if figures is not None else {}
        )
        kept = self.folder / "logs.txt"
        text = kept.read_text() if kept.exists() else ""
        _write(kept, f"{text}\n===== {rung.name}: {outcome}, {seconds:.0f} s\n{output[-LOG_BYTES:]}\n")
        self.write()

    def write(self) -> None:
        """Write results and summary."""
        _write(self._results, json.dumps(self.rungs, indent=2))
        lines = ["| rung | outcome | s | proves |", "|---|---|---|---|"]
        for rung in RUNGS:
            entry = self.rungs.get(rung.name, {"outcome": "not run", "seconds": ""})
            lines.append(f"| {rung.name} | {entry['outcome']} | {entry['seconds']} | {rung.proves} |")
        failed = [
            rung.name for rung in RUNGS if self.rungs.get(rung.name, {}).get("outcome") in ("failed", "too slow")
        ]
        waiting = [rung.name for rung in RUNGS if rung.name not in self.rungs]
        if failed:
            following = f"mend {failed[0]} (logs.txt), then run the same command"
        else:
            following = f"run the same command: {waiting[0]} is next" if waiting else "nothing: all rungs ran"
        _write(self.folder / "summary.md", "\n".join([*lines, "", f"Next: {following}.", ""]))


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.rename(path)


def printed_json(output: str) -> object:
    """Return the last JSON object that a benchmark printed over several lines; None without one."""
    start, end = output.rfind("\n{\n"), output.rfind("\n}")
    if output.startswith("{\n") and start < 0:
        start = 0
    if start < 0 or end < start:
        return None
    try:
        return json.loads(output[start : end + 2])
    except ValueError:
        return None


def run(rung: Rung, seconds: float) -> tuple[str, str]:
    """Run a rung for at most ``seconds``; return its outcome and output. Nothing that it started is left."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            [sys.executable, *rung.command],
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
            outcome = {0: "passed", 5: "skipped"}.get(process.returncode, "failed")
        except subprocess.TimeoutExpired:
            outcome = "too slow"
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(3)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait(10)
        file.seek(0)
        output = file.read().decode(errors="replace")
    if outcome == "passed" and ran_nothing(output):
        outcome = "skipped"
    return outcome, output


def ran_nothing(output: str) -> bool:
    """Tell whether a rung that ended well proved nothing: its tests were skipped, or it says "nothing measured"."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return "nothing measured" in last or (" skipped" in last and " passed" not in last)


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/gpu_hour.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="start no rung later than this")
    parser.add_argument("--without", default="", help="packages to do without: te,vllm,ray")
    parser.add_argument("--only", default="", help="names of rungs, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("gpu_hour"), help="folder of the results")
    parser.add_argument("--again", action="store_true", help="also the rungs that have passed")
    parser.add_argument("--list", action="store_true", help="show the rungs and end")
    args = parser.parse_args()
    if args.without:
        os.environ["SKYRL_WITHOUT"] = args.without
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
    began, report = time.monotonic(), Report(args.out)
    _write(args.out / "environment.txt", environment())
    report.write()
    for rung in RUNGS:
        left = args.minutes * 60 - (time.monotonic() - began)
        if (only and rung.name not in only) or left <= 0:
            continue
        if not args.again and report.rungs.get(rung.name, {}).get("outcome") == "passed":
            continue
        lacking = [name for name in rung.needs if name in installed.missing()]
        broken = [name for name in rung.after if report.rungs.get(name, {}).get("outcome") in ("failed", "too slow")]
        if lacking or broken:
            reason = f"without {', '.join(lacking)}" if lacking else f"{', '.join(broken)} failed"
            report.rungs[rung.name] = {"outcome": f"skipped: {reason}", "seconds": 0.0}
            report.write()
            print(f"{rung.name:12s} skipped: {reason}", flush=True)
            continue
        started = time.monotonic()
        outcome, output = run(rung, min(rung.seconds, left))
        report.add(rung, outcome, time.monotonic() - started, output)
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        print(f"{rung.name:12s} {outcome:9s} {time.monotonic() - started:6.1f} s  {last:.100}", flush=True)
    outcomes = [entry["outcome"] for entry in report.rungs.values()]
    print(f"results: {args.out}")
    return int(any(outcome in ("failed", "too slow") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
