"""A whole GRPO step, and the same step by TRL's GRPOTrainer in one process.

    python benchmarks/run.py step [--model embedded|large] [--steps N] [--rival-path FOLDER]

Prints seconds a step by phase, the share spent outside generation, log-probs, training and weight sync, and, with
``--rival-path`` (a folder made by ``pip install --target FOLDER --no-deps trl accelerate``), the ratio to TRL on the
same model, prompts, samples and lengths; one optimizer step, AdamW, no reference.

``embedded``: the embedded model, 512 samples of at most 4 tokens. ``large``: hidden 512, 8 layers, 32 experts top-4,
256 samples of 32 to 512 tokens, log-normal; where a sample ends is imposed on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORK = ("generate", "fwd_logprobs_values_reward", "policy_train", "sync_weights")
"""Phases that are a step's work; everything else is overhead."""
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Scenario:
    """What both sides run."""

    prompts: int
    longest: int
    warm: int
    """First steps, which are not counted."""
    steps: int
    rival_rows: int
    """Rows of a micro-batch of TRL's."""
    shape: Mapping[str, int] | None = None
    """What differs from the embedded model."""

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * SAMPLES_PER_PROMPT

    def lengths(self) -> list[int] | None:
        """Tokens of each sample of a step; None: the model decides."""
        if self.shape is None:
            return None
        rng = random.Random(0)
        drawn = (round(rng.lognormvariate(4.7, 0.7)) for _ in range(self.samples))
        return [min(max(length, 32), self.longest) for length in drawn]


SCENARIOS = {
    "embedded": Scenario(prompts=64, longest=4, warm=5, steps=20, rival_rows=512),
    "large": Scenario(
        prompts=32,
        longest=512,
        warm=1,
        steps=2,
        rival_rows=16,
        shape={
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "moe_intermediate_size": 256,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}


def ours(home: Path, scenario: Scenario, steps: int) -> list[dict[str, float]]:
    """Lines of ``metrics.jsonl`` of the counted steps."""
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.config.resolve import run_folder
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron_tools.embedded.embedded import arguments

    class Experiment(BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            lengths = scenario.lengths()
            client = inference_engine_client if lengths is None else OfLength(inference_engine_client, lengths)
            return super().get_generator(cfg, tokenizer, client)

    os.environ["SKYRL_MEGATRON_HOME"] = str(home)
    intervals = ["eval_interval=0", "ckpt_interval=0", "hf_save_interval=0", "eval_before_train=false"]
    batch = [f"train_batch_size={scenario.prompts}", f"policy_mini_batch_size={scenario.prompts}"]
    total = steps + scenario.warm + 1  # the last step saves
    plain = ["update_epochs_per_batch=1", "algorithm.zero_variance_filter=false", "algorithm.use_entropy_loss=false"]
    keys = [f"trainer.{key}" for key in (*intervals, *batch, *plain, f"max_training_steps={total}")]
    keys.append(f"generator.n_samples_per_prompt={SAMPLES_PER_PROMPT}")
    if scenario.shape is not None:
        keys += [
            f"trainer.policy.model.path={large_model(home / 'large', scenario.shape)}",
            f"generator.sampling_params.max_generate_length={scenario.longest}",
            "generator.inference_engine.engine_init_kwargs={max_model_len: 640, kv_cache_memory_bytes: 2147483648}",
            "generator.inference_engine.max_num_seqs=256",
            "generator.inference_engine.weight_sync_probe_interval=20",
        ]
    cfg, _ = load_config(SkyRLTrainConfig, arguments(keys, local_hardware()))
    run_experiment(cfg, Experiment)
    lines = [json.loads(line) for line in (run_folder(cfg) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if scenario.warm < line["step"] < total]


class OfLength:
    """The engines, with the length of each sample imposed."""

    def __init__(self, engines: Any, lengths: Sequence[int]) -> None:
        self.engines, self.lengths = engines, lengths

    async def generate(self, prompts: Any, sampling: Sequence[Mapping[str, Any]], sessions: Any = None) -> Any:
        """Generate responses of the lengths that are imposed."""
        imposed = [
            {**one, "max_tokens": length, "min_tokens": length, "ignore_eos": True}
            for one, length in zip(sampling, self.lengths, strict=True)
        ]
        return await self.engines.generate(prompts, imposed, sessions)


def large_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write the embedded model's tokenizer with a model of ``shape``."""
    import torch
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    from skyrl_megatron.tiny_model import write_embedded_model

    write_embedded_model(folder)
    config = AutoConfig.from_pretrained(folder)
    for name, value in shape.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def rival(home: Path, scenario: Scenario, steps: int) -> None:
    """TRL's step times as JSON on the last line; runs in a process of its own."""
    import pandas
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    (folder,) = (home / "embedded").iterdir()
    source = folder / "model" if scenario.shape is None else home / "large"
    table = pandas.read_parquet(folder / "sums/train.parquet")
    rows = [
        {"prompt": [dict(message) for message in prompt], "answer": spec["ground_truth"]}
        for prompt, spec in zip(table["prompt"], table["reward_spec"], strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    class Impose(LogitsProcessor):
        """A sample ends where it is told to."""

        def __init__(self, lengths: Sequence[int]) -> None:
            self.lengths, self.made = torch.tensor(lengths), 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.made += 1
            scores[:, tokenizer.eos_token_id] = -torch.inf
            scores[self.made >= self.lengths] = -torch.inf
            scores[self.made >= self.lengths, tokenizer.eos_token_id] = 0.0
            return scores

    lengths = scenario.lengths()
    if lengths is not None:
        generate = model.generate
        model.generate = lambda *args, **kwargs: generate(*args, logits_processor=[Impose(lengths)], **kwargs)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times.append(time.perf_counter() - self.began)

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [float(text[0]["content"][:1] == right[:1]) for text, right in zip(completions, answer, strict=True)]

    settings = GRPOConfig(
        output_dir=str(home / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=scenario.rival_rows,
        gradient_accumulation_steps=scenario.samples // scenario.rival_rows,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=scenario.longest,
        max_steps=steps + scenario.warm,
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
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps(times[scenario.warm :]))


def main() -> None:
    """Run both and print the table."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SCENARIOS), default="embedded")
    parser.add_argument("--steps", type=int, help="counted steps")
    parser.add_argument("--rival-path")
    parser.add_argument("--as-rival", type=Path, help=argparse.SUPPRESS)
    args = parse(parser, steps=1)
    scenario = SCENARIOS[args.model]
    steps = args.steps or scenario.steps
    if args.as_rival:
        rival(args.as_rival, scenario, steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        lines = ours(Path(folder), scenario, steps)
        median = {name: statistics.median(line[name] for line in lines) for name in lines[0] if name in lines[-1]}
        step, work = median["timing/step"], sum(median[f"timing/{name}"] for name in WORK)
        print(f"a step: {step:.3f} s, {median['trainer/tokens_per_second']:,.0f} tokens/s, median of {len(lines)}")
        for name in WORK:
            print(f"  {name:28} {median[f'timing/{name}']:.3f} s")
        print(f"  {'everything else':28} {step - work:.3f} s = {1 - work / step:.1%}")
        if args.rival_path:
            environment = {**os.environ, "PYTHONPATH": f"{args.rival_path}:{os.environ.get('PYTHONPATH', '')}"}
            command = [sys.executable, __file__, "--as-rival", folder, "--model", args.model, "--steps", str(steps)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
            theirs = statistics.median(json.loads(done.stdout.splitlines()[-1]))
            print(f"TRL: {theirs:.3f} s a step, in one process; it takes {theirs / step:.2f}x ours")


if __name__ == "__main__":
    main()
