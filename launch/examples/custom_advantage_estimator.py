"""Train with an advantage estimator of one's own: the reward of a response minus the mean reward of the batch.

    python launch/examples/custom_advantage_estimator.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``.
"""

import sys
from typing import Any

import torch

from skyrl_megatron.algorithms import register_advantage_estimator


@register_advantage_estimator("batch_baseline")
def batch_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T]. ``index`` [B] tells the prompts apart; this estimator does not ask."""
    with torch.no_grad():
        scores = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
        advantages = (scores - scores.mean()) * response_mask
    return advantages, advantages.clone()


if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    sys.exit(main(["trainer.algorithm.advantage_estimator=batch_baseline", *sys.argv[1:]]))
