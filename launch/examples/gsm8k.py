"""Train on GSM8K (arXiv:2110.14168) as it is published, columns ``question`` and ``answer``, converted when read.

    python launch/examples/gsm8k.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``; ``data.train_data=['openai/gsm8k:main:train']`` and
``data.val_data=['openai/gsm8k:main:test']`` unless given. Any data set with columns other than those of
docs/guides/data.md is read this way. To convert once and keep the files:
``python -m skyrl_megatron.data.prepare gsm8k``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.data import prepare
from skyrl_megatron.data.prompts import PromptDataset, load_source
from skyrl_megatron.entrypoints.main_base import BasePPOExp
from skyrl_megatron.errors import DataError


def row(record: dict[str, Any]) -> dict[str, Any]:
    """Make a row for the environment ``gsm8k`` of a published one. Raises DataError where the answer has no number."""
    _, marker, answer = record["answer"].rpartition("#### ")
    if not marker:
        raise DataError(f"the answer holds no '#### ': {record['answer'][-80:]!r}")
    question = f"{record['question']} {prepare.STEP_BY_STEP}"
    return prepare.make_row("gsm8k", question, "gsm8k", answer.replace(",", ""), {"answer": record["answer"]})


class GSM8KExp(BasePPOExp):
    """An experiment that converts rows before it reads prompts."""

    def get_train_dataset(self) -> PromptDataset:
        """Convert and read the prompts to train on."""
        return self.converted("train", self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        """Convert and read the prompts to evaluate on."""
        return self.converted("test", self.cfg.data.val_data) if self.cfg.data.val_data else None

    def converted(self, split: str, names: Sequence[str]) -> PromptDataset:
        """Read prompts from files that are written beside what the run exports."""
        trainer, files = self.cfg.trainer, []
        for number, name in enumerate(names):
            file = Path(trainer.export_path) / "gsm8k" / f"{split}_{number}.parquet"
            prepare.write([row(record) for record in load_source(name, hub_commits=trainer.hub_commits)], file)
            files.append(str(file))
        return PromptDataset(files, self.tokenizer, trainer.max_prompt_length)


if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    data = ["data.train_data=['openai/gsm8k:main:train']", "data.val_data=['openai/gsm8k:main:test']"]
    sys.exit(main([*data, *sys.argv[1:]], experiment=GSM8KExp))
