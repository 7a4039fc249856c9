"""Reward models: ``skyrl-megatron reward [--config FILE.yaml] [--check [--show-config]] key=value …``

Trains the model of ``trainer.policy.model.path``, with a value head, to score the better of two answers higher: rows
with the columns ``chosen`` and ``rejected``, and optionally ``margin``, in ``data.train_data``. The export is a folder
for ``AutoModelForSequenceClassification`` of transformers. Guide: docs/guides/preferences.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from skyrl_megatron.config.schema.preferences import RewardTrainConfig
from skyrl_megatron_supervised.sft import run_on_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    return run_on_rows(argv, __doc__ or "", RewardTrainConfig, _trainer)


def _trainer() -> type[Any]:
    from skyrl_megatron_supervised.preference_trainer import RewardTrainer

    return RewardTrainer


if __name__ == "__main__":
    sys.exit(main())
