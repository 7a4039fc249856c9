"""Training on preferences: ``skyrl-megatron dpo [--config FILE.yaml] [--check [--show-config]] key=value …``

Trains the model of ``trainer.policy.model.path`` to prefer the better of two answers: rows with the columns ``chosen``
and ``rejected``, or with ``dpo.loss=kto`` ``completion`` and ``label``, in ``data.train_data``. The reference is
``trainer.ref.model.path``, by default the initial policy; with LoRA it is the policy without its adapters. Guide:
docs/guides/preferences.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from skyrl_megatron.config.schema.preferences import DPOTrainConfig
from skyrl_megatron_supervised.sft import run_on_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    return run_on_rows(argv, __doc__ or "", DPOTrainConfig, _trainer)


def _trainer() -> type[Any]:
    from skyrl_megatron_supervised.preference_trainer import PreferenceTrainer

    return PreferenceTrainer


if __name__ == "__main__":
    sys.exit(main())
