"""Train with a policy loss of one's own: plain REINFORCE.

    python launch/examples/custom_policy_loss.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. Registered before Ray starts, the function reaches every
worker; it needs no installed module.
"""

import sys
from typing import Any

import torch

from skyrl_megatron.algorithms import register_policy_loss


@register_policy_loss("reinforce")
def reinforce(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Any,
    loss_mask: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """-A·log p of each token [B, T]. Returned per token, it is masked and averaged by ``algorithm.loss_reduction``.

    A scalar, ``(-log_probs * advantages).mean()``, would do too, but depends on how a batch is cut.
    """
    return -advantages * log_probs, {"clip_ratio": 0.0}


if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    sys.exit(main(["trainer.algorithm.policy_loss_type=reinforce", *sys.argv[1:]]))
