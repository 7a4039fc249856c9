"""Make Megatron sum losses and gradients instead of averaging them.

Losses are divided by the denominator of the whole optimizer step before they arrive here
(``algorithms/reduction.py``). Gradients must therefore be *summed* over micro-batches and over the dp·cp ranks. This
table lists the divisions of Megatron-Core 0.19 and the setting that removes each:

=================================================  ==================================================================
Megatron                                           here
=================================================  ==================================================================
pipeline_parallel/schedules.py                     ``calculate_per_token_loss=True`` and a closure returning three
``forward_step_calc_loss``: loss / num_tokens      values: the loss is unchanged
/ num_microbatches, or · cp_size
distributed/distributed_data_parallel.py:          ``calculate_per_token_loss=True``: factors 1.0 for dense and expert
gradient_scaling_factor 1/dp_cp                    parameters; asks for ``average_in_collective=False``
distributed/finalize_model_grads.py: gradients     ``finalize_model_grads(num_tokens=None)``: no division
/ num_tokens of the step
transformer/moe/moe_utils.py MoEAuxLossAutoScaler  ``moe_grad_scale_func`` = 1 / valid tokens of the step: the
                                                   router sums its losses over tokens
=================================================  ==================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


SUMMED_GRADIENTS: dict[str, Any] = {"calculate_per_token_loss": True}
"""Fields that must be passed to ``TransformerConfig``. :func:`sum_gradients` sets the others afterwards."""


class AuxiliaryLossScale:
    """``config.moe_grad_scale_func``: the factor of the router's token-weighted auxiliary losses."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self) -> Tensor:
        return torch.tensor(self.value)

    def over(self, valid_tokens: float, share: float = 1.0) -> None:
        """Weight each micro-batch by its fraction of ``valid_tokens`` (step total over dp ranks) times ``share``."""
        self.value = share / max(valid_tokens, 1.0)


def sum_gradients(config: TransformerConfig, ddp_config: DistributedDataParallelConfig) -> AuxiliaryLossScale:
    """Make Megatron sum where it would average (see the table above). Call before the model is wrapped in DDP."""
    # checked before the routers exist: a model built without it would average, and train at another rate
    assert config.calculate_per_token_loss, "build the model with SUMMED_GRADIENTS: routers read it in their __init__"
    config.finalize_model_grads_func = None  # not idempotent; the optimizer step calls it once
    config.grad_scale_func = None
    # average_in_collective divides by the group in NCCL itself, whatever the factors above say
    ddp_config.average_in_collective = False
    config.moe_grad_scale_func = scale = AuxiliaryLossScale()
    return scale


def loss_for_schedule[R](loss: Tensor, result: R) -> tuple[Tensor, Tensor, R]:
    """Return the three values of a loss closure for a scalar ``loss``. The token count is 0, so the schedule does not
    divide the loss."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), result
