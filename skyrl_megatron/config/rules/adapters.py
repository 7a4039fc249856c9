"""Rules of low-rank adapters that need no model: what is asked of them while they are off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.config.rules.idle import asked_for
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

_LORA = "trainer.policy.model.lora."
_HOW = "trainer.policy.megatron_config.lora_config."
_TOLD_ANYWAY = frozenset({f"{_LORA}lora_sync_path"})
"""What no run reads, with or without adapters: a warning says so."""


def adapter_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield a Problem where settings of adapters are asked for while ``rank=0`` trains all weights: a run would look
    like one of adapters, and be none."""
    if cfg.trainer.policy.model.lora.rank:
        return
    asked = {key: value for key, value in asked_for(cfg, (_LORA, _HOW)) if key not in _TOLD_ANYWAY}
    if asked:
        values = ", ".join(
            f"{key.removeprefix(_LORA).removeprefix('trainer.policy.megatron_config.')}={value}"
            for key, value in asked.items()
        )
        fix = f"trains all weights, but {values} {'is' if len(asked) == 1 else 'are'} set: set a rank, such as 16, "
        yield Problem(f"{_LORA}rank", 0, fix + f"or leave {'it' if len(asked) == 1 else 'them'} out")
