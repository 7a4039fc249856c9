"""The training loop with rollouts that run ahead: groups are sampled while the ranks train.

It differs from :class:`RayPPOTrainer` only in the source of its rollouts, :class:`StreamedRollouts`. Engines pause for
each weight sync and keep the requests in flight. With ``max_staleness_steps=0`` nothing may run ahead, and the run is
the synchronous one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.rules.training_rules import generates_ahead
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.trainer.ppo import RayPPOTrainer
from skyrl_megatron.trainer.rollout_source import PromptRollouts, StreamedRollouts

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A trainer whose rollouts run ahead by at most ``trainer.fully_async.max_staleness_steps``.

    Raises ConfigError unless ``trainer.fully_async.enabled``, on which rules of the configuration depend.
    """

    def __init__(self, cfg: SkyRLTrainConfig, *args: Any, **kwargs: Any) -> None:
        if not cfg.trainer.fully_async.enabled:
            raise ConfigError([Problem("trainer.fully_async.enabled", False, "FullyAsyncRayPPOTrainer needs true")])
        super().__init__(cfg, *args, **kwargs)

    def make_rollouts(self) -> PromptRollouts:
        """Return the stream, or the synchronous source if nothing may run ahead."""
        return StreamedRollouts(self) if generates_ahead(self.cfg) else super().make_rollouts()
