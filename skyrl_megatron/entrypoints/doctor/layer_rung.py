"""One layer in half precision as a run builds it, forward and backward, against our own layers in fp32."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.workers.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups

VOCABULARY = 512
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # all: rounding then changes no choice of experts
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LENGTHS = (37, 64, 27)
LARGEST_ERROR = 0.03
"""Relative, in the Euclidean norm; bf16 has 8 bits, and comes to 0.01."""


def layer() -> str:
    """Compare logits and the gradient of every weight."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.rules.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.cpu import megatron_patches
    from skyrl_megatron.runtime.model.build import build_model

    megatron_patches.install()
    device.set_local_device(0)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(LOOPBACK, free_port(), 1, True, timeout)
    dist.init_process_group(device.collective_backend(), store=store, rank=0, world_size=1, timeout=timeout)
    groups = parallel_state.initialize(ParallelConfig(1), seed=0, timeout_s=60)
    ours = {"transformer_impl": "local"}
    exact = build_model(CONFIG, groups, dtype=torch.float32, transformer_config_kwargs=ours)
    tested = build_model(CONFIG, groups, dtype=torch.bfloat16)
    _same_weights(exact, tested, groups)
    (logits, gradients), (other_logits, other_gradients) = (_step(model, groups) for model in (exact, tested))
    errors = {"logits": _relative(other_logits, logits)}
    errors |= {name: _relative(other_gradients[name], gradient) for name, gradient in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    dist.destroy_process_group()
    if not errors[worst] <= LARGEST_ERROR:  # NaN too
        raise RuntimeError(
            f"{tested.layer_kind}: {worst} is {errors[worst]:.2g} off in bf16, at most {LARGEST_ERROR} is usual"
        )
    return f"{tested.layer_kind}, forward and backward within {errors[worst]:.1%} of fp32"


def _same_weights(exact: ModelChunks, tested: ModelChunks, groups: ProcessGroups) -> None:
    """Give both models the same weights, of which bf16 loses nothing."""
    import torch

    from skyrl_megatron.runtime.model.local_weights import local_weights

    generator = torch.Generator().manual_seed(0)
    theirs = {weight.name: weight.tensor for weight in local_weights(tested, groups)}
    for weight in local_weights(exact, groups):
        scale, offset = (0.1, 1.0) if weight.name.endswith("norm.weight") else (0.05, 0.0)
        values = offset + scale * torch.randn(weight.tensor.shape, generator=generator)
        values = values.to(torch.bfloat16)
        weight.tensor.copy_(values)
        theirs[weight.name].copy_(values)


def _step(model: ModelChunks, groups: ProcessGroups) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits, gradient by name) of a sum of logits with fixed factors."""
    import torch

    from skyrl_megatron.runtime.model.local_weights import local_weights
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import TrainingBatch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        tokens[row, -length:] = torch.randint(VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = True
    ones = torch.ones(len(LENGTHS), 1)
    chunk: Any = model.chunks[0]
    logits = chunk(**pack(TrainingBatch(tokens, mask, ones, ones), groups, device.device()).model_arguments())
    factors = torch.randn(logits.shape, generator=generator).to(logits.device)
    (logits.float() * factors).sum().backward()
    gradients = local_weights(model, groups, of=_gradient)
    return logits.detach().float(), {weight.name: weight.tensor.float() for weight in gradients}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
