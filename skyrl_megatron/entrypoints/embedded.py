"""The embedded default: ``python -m skyrl_megatron.entrypoints.embedded [--check] [key=value …]``

A small seeded Qwen3-MoE learns two-digit sums with GRPO on two CPU cores, with everything that a large run has: two
Megatron ranks, a vLLM engine, weight sync, checkpoints, evaluation on held-out operand pairs, an export. Keys are
those of every run, on top of ``launch/recipes/embedded.yaml``; files are kept in ``$SKYRL_MEGATRON_HOME`` (default
``~/.cache/skyrl_megatron``), so that the same command again continues where the last one ended.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.validate import from_command_line
from skyrl_megatron.entrypoints import check
from skyrl_megatron.entrypoints.command import require_memory, run_command
from skyrl_megatron.entrypoints.main_base import config_dir

NEEDED_GIB = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (0 done, 1 failed, 2 the configuration is wrong)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    if "--check" in args:
        return check.run(arguments([arg for arg in args if arg != "--check"]))
    return run_command(lambda: _train(args))


def arguments(args: Sequence[str]) -> list[str]:
    """Return the recipe, model and data for the seed that ``args`` ask for, and ``args`` themselves, which win."""
    from skyrl_megatron.entrypoints.embedded_model import write_embedded_model

    seed = next((arg.partition("=")[2] for arg in reversed(args) if arg.startswith("trainer.seed=")), "42")
    number = int(seed) if seed.isdigit() else 42  # anything else is an error that the configuration names
    home = Path(os.environ.get("SKYRL_MEGATRON_HOME", "~/.cache/skyrl_megatron")).expanduser()
    folder = home / "embedded" / f"seed_{number}"
    model = write_embedded_model(folder / "model", number)
    data = write_problems(folder / "sums", number)
    return [
        f"--config={config_dir}/embedded.yaml",
        f"trainer.policy.model.path={model}",
        f"data.train_data=['{data}/train.parquet']",
        f"data.val_data=['{data}/validation.parquet']",
        f"trainer.seed={number}",
        f"trainer.ckpt_path={folder}/ckpts",
        f"trainer.export_path={folder}/exports",
        f"trainer.log_path={folder}/logs",
        *args,
    ]


def write_problems(folder: Path, seed: int) -> Path:
    """Write every two-digit sum of two two-digit numbers, in both orders: 3,240 problems.

    A random fifth of the pairs of operands is held out in both orders.
    """
    from skyrl_megatron.data import prepare

    pairs = [(a, b) for a in range(10, 50) for b in range(a, 100 - a)]
    random.Random(seed).shuffle(pairs)
    held_out = len(pairs) // 5
    if not (folder / "validation.parquet").exists():
        for split, some in (("train", pairs[held_out:]), ("validation", pairs[:held_out])):
            both_orders = [problem for a, b in some for problem in sorted({(a, b), (b, a)})]
            prepare.write(prepare.addition_rows(split, both_orders), folder / f"{split}.parquet")
    return folder


def _train(args: Sequence[str]) -> int:
    began = time.perf_counter()
    cfg = from_command_line(SkyRLTrainConfig, arguments(args))
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.trainer.warmup import WarmedUpTrainer

    class EmbeddedExp(BasePPOExp):
        """The usual experiment with a trainer that warms up first."""

        def get_trainer(self, *args: Any, **kwargs: Any) -> WarmedUpTrainer:
            return WarmedUpTrainer(*args, **kwargs)

    require_memory(NEEDED_GIB, "the embedded default")
    run_experiment(cfg, EmbeddedExp, began=began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
