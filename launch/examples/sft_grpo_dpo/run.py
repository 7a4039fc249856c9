"""Supervised training, then GRPO, then DPO of one model: each begins with the folder that the one before exported.

    python launch/examples/sft_grpo_dpo/run.py [FOLDER] [--steps SFT GRPO DPO]

A Qwen3-MoE of a million parameters that knows nothing learns two-digit sums, on two CPU cores in about five minutes.
``FOLDER`` (default ``tiny/sft_grpo_dpo``) gets model, data, and for each stage logs, checkpoints and exports, all in
the layout of every run. A stage that has finished is not repeated. The three commands are printed: with your own model
and data they train something larger.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_megatron.data.row_files import load_source
from skyrl_megatron.entrypoints.main_base import config_dir
from skyrl_megatron.tiny_model import write_embedded_model
from skyrl_megatron_tools.embedded.embedded import write_problems

LAYOUT = {
    "trainer.placement.policy_num_gpus_per_node": 2,  # ranks; on a machine without GPUs a rank is a process
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
    "trainer.gradient_checkpointing": "false",
    "trainer.max_tokens_per_microbatch": 8192,
    "trainer.logger": "console",
    "trainer.project_name": "sft_grpo_dpo",
    "trainer.epochs": 1000,
}
STAGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sft": (
        ["skyrl_megatron", "sft"],
        {
            **LAYOUT,
            "sft.max_length": 32,
            "trainer.train_batch_size": 256,
            "trainer.policy.optimizer_config.lr": 1e-3,
        },
    ),
    "grpo": (["skyrl_megatron.entrypoints.main_base", f"--config={config_dir}/embedded.yaml"], {}),
    "dpo": (
        ["skyrl_megatron", "dpo"],
        {
            **LAYOUT,
            "dpo.max_length": 32,
            "trainer.train_batch_size": 256,
            "trainer.policy.optimizer_config.lr": 1e-4,
        },
    ),
}
"""Stage → its command, and the keys that are not those of all stages."""


def sums(folder: Path) -> dict[str, Path]:
    """Write the data of all stages; returns ``<stage>_<split>`` → file."""
    written, draw = write_problems(folder / "prompts", seed=42), random.Random(0)
    for split in ("train", "validation"):
        rows = list(load_source(str(written / f"{split}.parquet")))
        for stage, make in (("sft", conversations), ("dpo", pairs)):
            lines = "".join(json.dumps(row) + "\n" for row in make(rows, draw))
            (folder / f"{stage}_{split}.jsonl").write_text(lines)
    files = {f"sft_{split}": folder / f"sft_{split}.jsonl" for split in ("train", "validation")}
    files |= {f"dpo_{split}": folder / f"dpo_{split}.jsonl" for split in ("train", "validation")}
    return files | {f"grpo_{split}": written / f"{split}.parquet" for split in ("train", "validation")}


def conversations(rows: list[dict[str, Any]], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield each question with its answer."""
    for row in rows:
        yield {"messages": [*row["prompt"], answer(row["reward_spec"]["ground_truth"])]}


def pairs(rows: list[dict[str, Any]], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield each question with its answer, which is preferred to one that is off by ten or less."""
    for row in rows:
        right = int(row["reward_spec"]["ground_truth"])
        wrong = right + draw.choice([-10, -2, -1, 1, 2, 10])
        yield {"prompt": row["prompt"], "chosen": [answer(right)], "rejected": [answer(wrong)]}


def answer(text: object) -> dict[str, str]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": str(text)}


def main(arguments: list[str]) -> int:
    """Run the stages; returns the exit code of the first that fails, or 0."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tiny/sft_grpo_dpo"))
    parser.add_argument("--steps", type=int, nargs=3, default=(80, 8, 8), metavar="N", help="of each stage")
    given = parser.parse_args(arguments)
    folder = given.folder.absolute()
    model, files = write_embedded_model(folder / "model"), sums(folder)
    for (stage, (command, keys)), steps in zip(STAGES.items(), given.steps, strict=True):
        place = folder / stage
        every = {
            "trainer.policy.model.path": model,
            "data.train_data": f"[{files[f'{stage}_train']}]",
            "data.val_data": f"[{files[f'{stage}_validation']}]",
            **{f"trainer.{name}_path": place / name for name in ("log", "ckpt", "export")},
            **{f"trainer.{name}": steps for name in ("max_training_steps", "hf_save_interval", "eval_interval")},
            "trainer.run_name": stage,
        }
        words = [sys.executable, "-m", *command, *(f"{key}={value}" for key, value in (keys | every).items())]
        print(f"\n# {stage}\n{shlex.join(words)}", flush=True)
        if code := subprocess.run(words, check=False).returncode:
            return code
        model = place / "export" / f"global_step_{steps}" / "policy"
    print(f"\nthe model of all three stages: {model}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
