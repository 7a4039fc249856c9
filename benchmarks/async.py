"""Rollouts that run ahead against the synchronous loop, in one run, and what the stream of groups itself costs.

    python benchmarks/run.py async [--only run|stream] [--train-s 5]

The run: the embedded model on two ranks and a vLLM engine, 8 prompts of 4 samples a step. Passes over the batch are
added until training takes ``--train-s`` seconds or more, and the environment sleeps as long as that, so that sampling
and training are each half of a synchronous step. The same process takes synchronous steps first and then steps whose
rollouts run ahead. In the second part the environment of one prompt in each batch sleeps eight times as long as the
others', and four times as long as a training step takes in all. Beside what was measured stands what the queue on
paper says of the same phases and sleeps (``skyrl_megatron_observe/estimate/staleness.py``).

The stream: groups that are sampled at once, 768 at a time; processor time of everything from a prompt to a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.sources.rollout_stream import RolloutStream, StreamLimits
from skyrl_megatron.trainer.callbacks import TrainerCallback
from skyrl_megatron_observe.estimate.staleness import RunAhead, run_ahead

PROMPTS, SAMPLES, STRAGGLER = 8, 4, 8.0
SYNCHRONOUS, WARM, AHEAD = 3, 6, 6
"""Steps of a part: synchronous ones, those until the stream is full, those that are counted."""
FIRST = 2
"""Steps that only find out how long one takes."""


class Sleeps(BaseTextEnv):
    """Is asleep for a while, longer for some prompts."""

    seconds = 0.0
    slow: tuple[str, ...] = ()
    factor = 1.0

    def init(self, prompt: Any) -> Any:
        """See BaseTextEnv."""
        self.prompt = str(prompt[-1]["content"])
        return super().init(prompt)

    def step(self, action: str) -> Any:
        """See BaseTextEnv."""
        time.sleep(Sleeps.seconds * (Sleeps.factor if self.prompt in Sleeps.slow else 1.0))
        return {"observations": [], "reward": len(action) / 6, "done": True, "metadata": {}}


class Lines(TrainerCallback):
    """Keeps the numbers of each step."""

    def __init__(self, lines: list[dict[str, float]]) -> None:
        self.lines = lines

    def on_log(self, trainer: Any, metrics: Any) -> None:
        """See TrainerCallback."""
        self.lines.append(dict(metrics))


def run(home: Path, train_s: float) -> None:
    """Print the figures of the run."""
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.sources.source import PromptRollouts
    from skyrl_megatron.sources.streamed_source import StreamedRollouts
    from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer
    from skyrl_megatron_tools.embedded.embedded import arguments

    class LongStream(StreamedRollouts):
        """A stream that has no last step."""

        def make_stream(self) -> RolloutStream:
            stream = super().make_stream()
            stream.limits = dataclasses.replace(stream.limits, steps=10_000)
            return stream

    class Compared(FullyAsyncRayPPOTrainer):
        """Takes the steps of all parts and keeps the numbers of each."""

        def train_steps(self) -> None:
            lines: list[dict[str, float]] = []
            self.callbacks.append(Lines(lines))
            self.rollouts = PromptRollouts(self.run_state, self)
            self.to_step(FIRST)
            one = lines[-1]["timing/policy_train"]
            passes = max(round((train_s - _training(lines[-1]) + one) / one), 1)
            self.cfg.trainer.update_epochs_per_batch = passes
            self.to_step(FIRST + 1)
            seconds = _training(lines[-1])
            print(f"training takes {seconds:.2f} s in {passes} passes; the rest of a step is generation")
            Sleeps.seconds = seconds
            self.part("equal halves", lines)
            Sleeps.seconds, Sleeps.factor = seconds / 2, STRAGGLER
            place = self.train_dataloader.number
            many = [self.train_dataloader.prompt(n) for n in range(place, place + 64 * PROMPTS, PROMPTS)]
            Sleeps.slow = tuple(str(each["prompt"][-1]["content"]) for each in many)
            self.part("an 8x straggler in each batch", lines)

        def part(self, name: str, lines: list[dict[str, float]]) -> None:
            lines.clear()
            self.to_step(self.global_step + SYNCHRONOUS)
            before = list(lines)
            lines.clear()
            self.rollouts = LongStream(self.run_state, self)  # not opened: what goes to disk is measured in journal.py
            self.rollouts.load_state({})
            self.to_step(self.global_step + WARM + AHEAD)
            self.rollouts.close()
            self.rollouts = PromptRollouts(self.run_state, self)
            bound = self.cfg.trainer.fully_async.max_staleness_steps
            _show(name, before, lines[-AHEAD:], predicted(before, lines[-AHEAD:], bound))

        def to_step(self, last: int) -> None:
            self.total_steps = last
            super().train_steps()

        def save_checkpoints(self) -> None:
            pass

    class Experiment(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            return Compared(*args, **kwargs)

    register("sleeps", Sleeps)
    os.environ["SKYRL_MEGATRON_HOME"] = str(home)
    with (home / "prompts.jsonl").open("w") as file:
        for number in range(1024):
            file.write(json.dumps({"prompt": [{"role": "user", "content": f"{number}+{number}=?"}]}) + "\n")
    keys = [f"trainer.{key}=0" for key in ("eval_interval", "ckpt_interval", "hf_save_interval")]
    keys += [
        f"data.train_data=[{home}/prompts.jsonl]",
        "data.val_data=[]",
        "trainer.eval_before_train=false",
        f"trainer.train_batch_size={PROMPTS}",
        f"trainer.policy_mini_batch_size={PROMPTS}",
        "trainer.update_epochs_per_batch=1",
        "trainer.fully_async.enabled=true",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "generator.batched=false",
        f"generator.n_samples_per_prompt={SAMPLES}",
        "environment.env_class=sleeps",
        "environment.skyrl_gym.max_env_workers=512",
    ]
    cfg, _ = load_config(SkyRLTrainConfig, arguments(keys, local_hardware()))
    run_experiment(cfg, Experiment)


def _training(line: dict[str, float]) -> float:
    """Seconds of a step in which the trainer does not wait for rollouts."""
    return line["timing/step"] - line["timing/generate"]


def predicted(before: list[dict[str, float]], ahead: list[dict[str, float]], bound: int) -> RunAhead:
    """Return what the queue on paper says of the steps ``ahead``, from their phases of training and sync, and the
    sampling of the synchronous steps ``before``. The first prompt of each batch sleeps longer."""
    sampling_s = statistics.median(line["generate/trajectory_time_llm_mean"] for line in before)
    sync_s = statistics.median(line["timing/sync_weights"] for line in ahead)
    train_s = statistics.median(_training(line) for line in ahead) - sync_s
    factor = Sleeps.factor if Sleeps.slow else 1.0

    def group_s(number: int) -> float:
        return sampling_s + Sleeps.seconds * (1.0 if number % PROMPTS else factor)

    limits = StreamLimits(batch=PROMPTS, steps=0, bound=bound, workers=PROMPTS * (1 + bound))
    return run_ahead(limits, group_s, train_s, sync_s)


def _show(name: str, before: list[dict[str, float]], ahead: list[dict[str, float]], on_paper: RunAhead) -> None:
    steps = [statistics.median(line["timing/step"] for line in lines) for lines in (before, ahead)]
    waits = [statistics.median(line["timing/generate"] for line in lines) for lines in (before, ahead)]
    paused = statistics.median(line["async/pause_seconds"] for line in ahead)
    sync = statistics.median(line["timing/sync_weights"] for line in ahead)
    ages = max(line["async/staleness_max"] for line in ahead)
    print(f"{name}: synchronous {steps[0]:.2f} s a step, {waits[0]:.2f} s of it generation")
    print(f"  running ahead {steps[1]:.2f} s, {waits[1]:.2f} s of it waiting: {steps[1] / steps[0]:.2f}x")
    print(f"  engines paused {paused:.3f} s, sync {sync:.3f} s: {sync / steps[1]:.1%} of a step; lag up to {ages:.0f}")
    print(
        f"  on paper {on_paper.step_s:.2f} s: {on_paper.step_s / steps[1]:.2f} of measured; lag up to {on_paper.most}"
    )


def stream_ms(steps: int = 60, batch: int = 256) -> float:
    """Return milliseconds of the processor a group: 4 rows with versions each, 768 in flight, a bound of 4."""
    row = [("0", 0, 64)]
    output: Any = {"loss_masks": [[1] * 64] * SAMPLES, "rollout_versions": [row] * SAMPLES}

    async def sample(group: Any) -> Any:
        for _ in range(4):
            await asyncio.sleep(0)
        return output

    async def train() -> None:
        limits = StreamLimits(batch=batch, steps=steps, bound=4, workers=768)
        stream = RolloutStream(sample, lambda number: {"uid": number}, limits)
        stream.start(0)
        for version in range(steps):
            stream.trained(await stream.take())
            stream.staleness([])
            stream.advance(version + 1)

    began = time.process_time()
    asyncio.run(train())
    return (time.process_time() - began) / (steps * batch) * 1e3


def main() -> None:
    """Run it."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["run", "stream"])
    parser.add_argument("--train-s", type=float, default=5.0)
    args = parse(parser, only="stream")
    if args.only != "run":
        print(f"stream: {min(stream_ms() for _ in range(3)):.3f} ms of the processor a group at 768 in flight")
    if args.only != "stream":
        with tempfile.TemporaryDirectory() as home:
            run(Path(home), args.train_s)


if __name__ == "__main__":
    main()
