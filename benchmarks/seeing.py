"""What it costs to see a run: its page of 10,000 steps, and what is kept of each step.

    python benchmarks/run.py seeing [--steps 10000] [--rows 2048] [--tokens 256] [--run]

The page is written in a process of its own, as a run does: seconds, largest memory, size of the file, and the seconds
until a headless Chromium has drawn it; beside them the report that it replaced: matplotlib's curves of the same file.
What is kept of a step is measured in CPU seconds of the process around the code of tracking, samples and lanes, for a
batch of ``--rows`` rows of ``--tokens`` tokens, against the CPU seconds of what a driver does anyway with that batch:
make tensors of it, compute advantages and cut it for two ranks. ``--run``: a whole run of the tiny model as well (two
ranks, one engine, 2,048 samples a step), in which the CPU seconds of the driver are taken around the same code, calls
to the ranks included, of steps whose samples are kept and of others.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = 120
PAGE = (
    "import resource, sys, time; from pathlib import Path; began = time.perf_counter()\n"
    "from skyrl_megatron_observe.run_report import write_page\n"
    "from skyrl_megatron_observe.run_report import RunReader\n"
    "run = RunReader(Path(sys.argv[1])); run.refresh(); size = write_page([run], run.folder / 'report.html')\n"
    "used = resource.getrusage(resource.RUSAGE_SELF)\n"
    "print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, size)"
)
CURVES = (
    "import resource, sys, time; from pathlib import Path; began = time.perf_counter()\n"
    "from skyrl_megatron_observe.curves import write_curves\n"
    "write_curves(Path(sys.argv[1]))\n"
    "used = resource.getrusage(resource.RUSAGE_SELF)\n"
    "print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, 0)"
)


def long_run(folder: Path, steps: int) -> Path:
    """A ``metrics.jsonl`` of so many steps, with the names that curves are drawn of and others."""
    rng = random.Random(0)
    names = [f"environment/made_{number}" for number in range(NAMES - 5)]
    names += ["reward/avg_raw_reward", "policy/grad_norm", "policy/final_loss", "timing/step", "timing/generate"]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **{name: rng.random() for name in names}}) + "\n")
    return folder


def in_process(code: str, folder: Path) -> tuple[float, float, float, float]:
    """Seconds, CPU seconds with the start of Python, bytes of memory and bytes of the file."""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
    seconds, used, memory, size = map(float, done.stdout.split())
    return seconds, used, memory, size


def opened(path: Path) -> float | None:
    """Seconds until the page has drawn what is seen; None without a Chromium."""
    from tests.support.browser import browser, chromium

    command = chromium()
    if command is None:
        return None
    with browser(command) as page:
        page.size(1280)
        page.open(f"file://{path}")  # the browser's own start
        began = time.perf_counter()
        page.open(f"file://{path}")
        page.wait("document.querySelector('[data-chart=reward] path.curve')")
        return time.perf_counter() - began


def cpu(work: Callable[[], Any], times: int) -> float:
    """CPU seconds of the process for one call, the first one left out."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def step_costs(folder: Path, rows: int, tokens: int) -> tuple[float, float, float]:
    """CPU seconds of a step: tracking, samples and lanes, what the driver does anyway."""
    import torch

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.rollout.outputs import to_training_batch
    from skyrl_megatron.trainer.tracking import Tracking
    from skyrl_megatron_observe.samples import SampleLog
    from skyrl_megatron_observe.timeline import LaneLog
    from tests.observe.made_run import batch_of, byte_tokenizer, metrics

    keys = {"trainer.log_path": str(folder), "trainer.logger": "tensorboard", "trainer.run_name": "run"}
    cfg = SkyRLTrainConfig.from_cli_overrides(keys)
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    batch, masks, logprobs = batch_of(tokenizer, tokens, rng, groups=rows // 8, samples=8)
    samples, lanes, tracking = SampleLog(cfg, tokenizer, 1), LaneLog(folder / "spans.jsonl"), Tracking(cfg)
    tracking.open(total_steps=100)
    numbers = metrics(1, 100, rng)
    known: Any = {"stop_reasons": ["stop"] * rows, "loss_masks": masks}

    def keep() -> None:
        samples.note(known)
        chosen = samples.chosen(batch)
        samples.write(1, batch, chosen, logprobs[chosen].numpy())
        lanes.write(1, {})

    output: Any = {
        "prompt_token_ids": [[1] * 16] * rows,
        "response_ids": [[2] * tokens] * rows,
        "rewards": [[0.0] * (tokens - 1) + [float(rng.random() < 0.5)] for _ in range(rows)],
        "loss_masks": [[1] * tokens] * rows,
        "rollout_logprobs": [[-0.5] * tokens] * rows,
        "stop_reasons": None,
        "rollout_metrics": None,
    }
    uids = [str(row // 8) for row in range(rows)]

    def anyway() -> None:
        from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

        made = to_training_batch(output, uids)
        assert made.rewards is not None
        with torch.no_grad():
            compute_advantages_and_returns(
                token_level_rewards=made.rewards,
                response_mask=made.response_mask,
                index=made.uids,
                adv_estimator="grpo",
                config=cfg.trainer.algorithm,
            )
        for half in range(2):
            made.select(range(half, rows, 2))

    with open("/dev/null", "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        try:
            track = cpu(lambda: tracking.log(numbers, 1), 20)
        finally:
            sys.stdout = shown
    return track, cpu(keep, 10), cpu(anyway, 5)


NOTES = """
import functools, json, time
from skyrl_megatron_observe.report_recorder import ReportRecorder

seen, before = [0.0], [time.process_time()]

def around(owner, name):
    work = getattr(owner, name)
    @functools.wraps(work)
    def timed(*args, **kwargs):
        began = time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            seen[0] += time.thread_time() - began
    setattr(owner, name, timed)

from skyrl_megatron.trainer.tracking import Tracking
around(Tracking, "log"); around(ReportRecorder, "on_step_end"); around(ReportRecorder, "on_rollouts")
around(Trainer, "keep_samples")

def log_step(self):
    RayPPOTrainer.log_step(self)
    now = time.process_time()
    with open("{costs}", "a") as file:
        [recorder] = [each for each in self.recorders if isinstance(each, ReportRecorder)]
        print(json.dumps([recorder.samples.due(self.global_step), seen[0], now - before[0]]), file=file)
    seen[0], before[0] = 0.0, now
Trainer.log_step = log_step
"""


def whole_run(folder: Path, steps: int = 12) -> list[tuple[bool, float, float]]:
    """Of each step but the first two: whether samples are kept, CPU seconds of seeing, of the driver in all."""
    import importlib

    runs: Any = importlib.import_module("tests.job.runs")
    runs.prepare(folder)
    keys = {"train_batch_size": 32, "policy_mini_batch_size": 32, "max_training_steps": steps, "epochs": steps}
    keys |= {"samples_per_run": 8 * steps // 2, "max_tokens_per_microbatch": 8192}
    given: dict[str, Any] = {f"trainer__{name}": value for name, value in keys.items()}
    given |= {"generator__n_samples_per_prompt": 64, "generator__inference_engine__max_num_seqs": 512}
    runs.run(folder, NOTES.replace("{costs}", str(folder / "costs.jsonl")), **given).check()
    lines = [json.loads(line) for line in (folder / "costs.jsonl").read_text().splitlines()]
    return [(bool(due), float(cost), float(whole)) for due, cost, whole in lines[2:]]


def main() -> None:
    """Print all figures."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--run", action="store_true")
    args = parse(parser, steps=50, rows=16, tokens=16)
    if args.run:
        with tempfile.TemporaryDirectory() as name:
            found = whole_run(Path(name))
        for kept in (True, False):
            costs = [(cost, whole) for due, cost, whole in found if due == kept]
            cost, whole = (sum(each) / len(costs) for each in zip(*costs, strict=True))
            print(f"a whole step {'with' if kept else 'without'} samples: {1e3 * cost:.1f} ms of the ", end="")
            print(f"driver's {whole:.2f} s of CPU, {100 * cost / whole:.1f} %")
    with tempfile.TemporaryDirectory() as name:
        folder = long_run(Path(name), args.steps)
        seconds, used, memory, size = in_process(PAGE, folder)
        curves, curve_used, curve_memory, _ = in_process(CURVES, folder)
        print(f"page of {args.steps:,} steps, {NAMES} metrics: {seconds:.2f} s, {used:.2f} CPU s, ", end="")
        print(f"{memory / 1e6:.0f} MB, a file of {size / 1e6:.1f} MB", end="")
        print(f"; curves of matplotlib: {curves:.2f} s, {curve_used:.2f} CPU s, {curve_memory / 1e6:.0f} MB, ", end="")
        print(f"ratio {curve_used / used:.2f} of CPU")
        shown = opened(folder / "report.html")
        print("opened: no Chromium here" if shown is None else f"opened in Chromium: {shown:.2f} s")
        track, keep, anyway = step_costs(folder, args.rows, args.tokens)
        print(f"a step of {args.rows} × {args.tokens} tokens, CPU: tracking {1e3 * track:.1f} ms, ", end="")
        print(f"samples and lanes {1e3 * keep:.1f} ms; batch, advantages, cuts {1e3 * anyway:.0f} ms: ", end="")
        print(f"{100 * (track + keep) / anyway:.1f} % of these")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
