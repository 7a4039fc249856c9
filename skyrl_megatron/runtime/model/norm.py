"""RMSNorm without Transformer Engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.algorithms import exact_ops

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from skyrl_megatron.runtime.parallel_state import ProcessGroups


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (arXiv:1910.07467).

    ``zero_centred``: the stored weight is the weight minus 1; the default is ``layernorm_zero_centered_gamma``.
    Megatron's ``WrappedTorchNorm`` (transformer/torch_norm.py) rejects sequence parallelism, which MoE with tp > 1
    requires. This class marks its weight so that ``finalize_model_grads`` sums the gradient over tp. The q and k norms
    see all positions of their own heads; ``finalize_model_grads`` finds these by name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        zero_centred: bool | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = config.layernorm_zero_centered_gamma if zero_centred is None else zero_centred
        first = torch.zeros if self.zero_centred else torch.ones
        weight: Any = torch.nn.Parameter(first(hidden_size, dtype=config.params_dtype))
        # with sequence parallelism a rank sees part of the tokens; the mark makes Megatron sum the gradient
        weight.sequence_parallel = config.sequence_parallel
        self.weight: torch.nn.Parameter = weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden]: same shape and dtype, computed in fp32."""
        weight = self.weight.float()
        # added in fp32: 1 + w in bfloat16 loses the small part that was trained
        if self.zero_centred:
            weight = 1 + weight
        if exact_ops.active():
            return exact_ops.with_gradient(partial(exact_ops.rms_norm, eps=self.eps), self._normalised, x, weight)
        return self._normalised(x.float(), weight).to(x.dtype)

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class FullWidthNorm(torch.nn.Module):
    """RMSNorm of q or k over all heads together (OLMoE), where heads are split over tp.

    Takes the arguments of the per-head norm that it replaces, and ``heads``, the number of heads of the whole model.
    The weight [heads · head size] is replicated on every rank, because ``finalize_model_grads`` finds q and k norms by
    name and sums their gradients over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        heads: int,
        groups: ProcessGroups,
        **_: object,
    ) -> None:
        super().__init__()
        self.eps, self.tp = eps, groups.tp
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., heads / tp, head size]: same shape and dtype, computed in fp32."""
        flat = x.flatten(-2).float()
        width = flat.shape[-1]
        # the sum over all heads, of which this rank has some
        squares = _SumOverRanks.apply(flat.square().sum(-1, keepdim=True), self.tp)  # type: ignore[no-untyped-call]
        scale = torch.rsqrt(squares / len(self.weight) + self.eps)
        weight = self.weight[self.tp.rank() * width :][:width]
        return (flat * scale * weight.float()).view_as(x).to(x.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sums over a group. Ranks use the sum for different heads, so the backward pass sums the gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    # a copy: autograd may need the input, and all_reduce works in place
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
