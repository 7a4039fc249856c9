"""RMSNorm of the layer spec without Transformer Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (arXiv:1910.07467).

    Megatron's ``WrappedTorchNorm`` (transformer/torch_norm.py) refuses sequence parallelism, which MoE with tp > 1
    requires; this one marks its weight so that ``finalize_model_grads`` sums its gradient over tp. The q and k norms
    see all positions of their own heads: ``finalize_model_grads`` finds those by name.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → same shape and dtype; computed in fp32."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)
