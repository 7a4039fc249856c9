"""A whole GRPO step of the embedded run, and the same step by TRL's GRPOTrainer in one process.

    python benchmarks/step.py [--steps 20] [--rival-path FOLDER]

Prints seconds a step by phase, the share spent outside generation, log-probs, training and weight sync, and, with
``--rival-path`` (a folder made by ``pip install --target FOLDER --no-deps trl accelerate``), the ratio to TRL on the
same model, prompts, samples and lengths: 512 samples of at most 4 tokens, one optimizer step, AdamW, no reference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORK = ("generate", "fwd_logprobs_values_reward", "policy_train", "sync_weights")
"""Phases that are a step's work; everything else is overhead."""
WARM = 5
"""First steps, which are not counted."""


def ours(home: Path, steps: int) -> list[dict[str, float]]:
    """Lines of ``metrics.jsonl`` of the counted steps."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.run_folder import run_folder
    from skyrl_megatron.config.validate import from_command_line
    from skyrl_megatron.entrypoints.embedded import arguments
    from skyrl_megatron.entrypoints.experiment import run_experiment

    os.environ["SKYRL_MEGATRON_HOME"] = str(home)
    intervals = ["eval_interval=0", "ckpt_interval=0", "hf_save_interval=0", "eval_before_train=false"]
    keys = [f"trainer.{key}" for key in (*intervals, f"max_training_steps={steps + WARM}")]
    cfg = from_command_line(SkyRLTrainConfig, arguments(keys))
    run_experiment(cfg)
    lines = [json.loads(line) for line in (run_folder(cfg) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if WARM < line["step"] < steps + WARM]  # the last one saves


def rival(home: Path, steps: int) -> None:
    """TRL's step times as JSON on the last line; runs in a process of its own."""
    import pandas
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    folder = next((home / "embedded").iterdir())
    table = pandas.read_parquet(folder / "data/train.parquet")
    rows = [
        {"prompt": [dict(message) for message in prompt], "answer": spec["ground_truth"]}
        for prompt, spec in zip(table["prompt"], table["reward_spec"], strict=True)
    ]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times.append(time.perf_counter())

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [float(text[0]["content"] == right) for text, right in zip(completions, answer, strict=True)]

    settings = GRPOConfig(
        output_dir=str(home / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=512,
        num_generations=8,
        max_completion_length=4,
        max_steps=steps + WARM,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps([after - before for before, after in zip(times[WARM:], times[WARM + 1 :], strict=False)]))


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rival-path")
    parser.add_argument("--as-rival", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rival:
        rival(args.as_rival, args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        lines = ours(Path(folder), args.steps)
        median = {name: statistics.median(line[name] for line in lines) for name in lines[0] if name in lines[-1]}
        step, work = median["timing/step"], sum(median[f"timing/{name}"] for name in WORK)
        print(f"a step: {step:.3f} s, median of {len(lines)}")
        for name in WORK:
            print(f"  {name:28} {median[f'timing/{name}']:.3f} s")
        print(f"  {'everything else':28} {step - work:.3f} s = {1 - work / step:.1%}")
        if args.rival_path:
            environment = {**os.environ, "PYTHONPATH": f"{args.rival_path}:{os.environ.get('PYTHONPATH', '')}"}
            command = [sys.executable, __file__, "--as-rival", folder, "--steps", str(args.steps)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
            theirs = statistics.median(json.loads(done.stdout.splitlines()[-1]))
            print(f"TRL: {theirs:.3f} s a step, in one process; ours takes {step / theirs:.2f}x")


if __name__ == "__main__":
    main()
