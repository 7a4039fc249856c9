"""The critic's output layer: one number per token instead of logits over a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from skyrl_megatron.runtime.parallel_state import ProcessGroups


class ValueHead(torch.nn.Module):
    """Linear map H → 1 in place of ``GPTModel.output_layer``; whole on every tp rank.

    Starts from a normal distribution of deviation 1 / (H + 1), equal on all ranks. Computes in fp32, because values
    are regressed.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, *, seed: int = 0) -> None:
        super().__init__()
        self.groups, self.sequence_parallel = groups, config.sequence_parallel
        hidden = config.hidden_size
        weight = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed), device="cpu") / (hidden + 1)
        parameter: Any = torch.nn.Parameter(weight.to(config.params_dtype))
        parameter.sequence_parallel = config.sequence_parallel  # its gradient is summed over tp
        self.weight: torch.nn.Parameter = parameter

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Map [s, b, H] (s / tp under sequence parallelism) → ([s, b, 1] float32 on every tp rank, None)."""
        values = hidden.float() @ self.weight.float().t()
        if self.sequence_parallel:
            # Every tp rank goes on to compute the same loss, so a rank keeps the gradient of its own tokens.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the one replicated tensor, ``output_layer.weight`` [1, H]."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.groups.tp, dp_cp_group=self.groups.dp_cp
        )
        return sharded
