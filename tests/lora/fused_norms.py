"""Maps that normalise their input themselves, as Transformer Engine's ``LayerNormLinear`` does, on a CPU."""

from __future__ import annotations

from typing import Any


def fuse_norms(model: Any) -> None:
    """Move the norms of a local model's layers to where Transformer Engine's layers have them, by its names
    (``layer_norm_weight``, ``eps``)."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from torch.nn import functional as F

    from bridges.tensor_names import fused_norms

    class NormLinear(ColumnParallelLinear):
        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            norm = self.layer_norm_weight
            return super().forward(F.rms_norm(x, norm.shape, norm, self.eps), *args, **kwargs)

    mla, fused = model.hf.megatron.multi_latent_attention, 0
    for chunk in model.chunks:
        for layer in chunk.decoder.layers:
            moe = hasattr(layer.mlp, "experts")
            for plain, place in fused_norms(mla=mla, moe=moe).items():
                norm = layer.get_submodule(plain.removesuffix("."))
                linear = layer.get_submodule(place.removesuffix(".layer_norm_"))
                linear.__class__ = NormLinear
                linear.layer_norm_weight, linear.eps = norm.weight, norm.eps
                layer.set_submodule(plain.removesuffix("."), IdentityOp())
                fused += 1
    assert fused


def forget_norms(model: Any) -> None:
    """The mistake: adapters take their map's input as it comes."""
    from skyrl_megatron_lora.attach import _Addition

    for chunk in model.chunks:
        for module in chunk.modules():
            for hook in module._forward_hooks.values():
                if isinstance(hook, _Addition):
                    hook.norm = None
