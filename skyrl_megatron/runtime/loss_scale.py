"""The one place that decides what Megatron divides losses and gradients by.

Our losses arrive here already divided by the denominator of the whole optimizer step (``algorithms/reduction.py``), so
gradients must be *summed* over micro-batches and over the dp·cp ranks, and divided by nothing. What Megatron-Core
0.19 would divide by, and how each division is cancelled:

=================================================  ==================================================================
Megatron                                           here
=================================================  ==================================================================
pipeline_parallel/schedules.py                     ``calculate_per_token_loss=True`` and a closure returning three
``forward_step_calc_loss``: loss / num_tokens      values: the loss is left as it is
/ num_microbatches, or · cp_size
distributed/distributed_data_parallel.py:          ``calculate_per_token_loss=True``: factors 1.0 for dense and expert
gradient_scaling_factor 1/dp_cp                    parameters; asks for ``average_in_collective=False``
distributed/finalize_model_grads.py: gradients     ``finalize_model_grads(num_tokens=None)``: no division
/ num_tokens of the step
transformer/moe/moe_utils.py MoEAuxLossAutoScaler  ``moe_grad_scale_func`` = 1 / valid tokens of the step: the
                                                   router multiplies each loss by its micro-batch's tokens
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
"""Fields that ``TransformerConfig`` must be made with; the rest can be set afterwards (:func:`sum_gradients`)."""


class AuxiliaryLossScale:
    """``config.moe_grad_scale_func``: the factor of the router's token-weighted auxiliary losses."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self) -> Tensor:
        return torch.tensor(self.value)

    def over(self, valid_tokens: float, share: float = 1.0) -> None:
        """Weight each micro-batch by its share of ``valid_tokens`` (of the step, all dp ranks), times ``share``."""
        self.value = share / max(valid_tokens, 1.0)


def sum_gradients(config: TransformerConfig, ddp_config: DistributedDataParallelConfig) -> AuxiliaryLossScale:
    """Make Megatron sum where it would average (table above). Call before the model is wrapped in DDP."""
    assert config.calculate_per_token_loss, "build the model with SUMMED_GRADIENTS: routers read it when they are made"
    config.finalize_model_grads_func = None  # runs once per optimizer step, from there: it is not idempotent
    config.grad_scale_func = None
    ddp_config.average_in_collective = False
    config.moe_grad_scale_func = scale = AuxiliaryLossScale()
    return scale


def loss_for_schedule[R](loss: Tensor, result: R) -> tuple[Tensor, Tensor, R]:
    """Make the three values that a loss closure returns to the schedule, with a token count that divides nothing."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), result
