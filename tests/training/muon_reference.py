"""Muon and AdamW in float64 on whole Hugging Face tensors: no Megatron, no bridge, no shards."""

import math
import zlib

MOMENTUM, LR, ADAM_LR, DECAY, STEPS = 0.9, 0.5, 0.25, 0.1, 2
BETAS, ADAM_EPS = (0.9, 0.95), 1e-3
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
OTHERS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "mlp.router.weight",
    "mlp.router.gate.weight",
    "block_sparse_moe.gate.weight",
    "shared_expert_gate.weight",
)


def gradient(name, index, shape, step):
    """The gradient of a HF tensor (of one expert's slice) at a step."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {index} {step}".encode()))
    return torch.randn(shape, generator=generator)


def orthogonal(matrix):
    """Five steps of Newton-Schulz on one matrix."""
    x = matrix / matrix.norm()
    for a, b, c in QUINTIC:
        gram = x.T @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def parts(name, hf):
    """(rows, or columns, of each linear map that one HF tensor fuses; 0 for rows, 1 for columns). ``hf``: its
    ``config.json``."""
    family = hf["model_type"]
    if family == "gpt_oss" and name.endswith("gate_up_proj"):  # [H, 2M], columns gate, up, gate, up …
        return [slice(0, None, 2), slice(1, None, 2)], 1
    if name.endswith("gate_up_proj"):
        half = hf["moe_intermediate_size"]
        return [slice(0, half), slice(half, None)], 0
    if family.startswith(("qwen3_next", "qwen3_5")) and name.endswith("self_attn.q_proj.weight"):
        size, heads = hf["head_dim"], hf["num_attention_heads"]
        return [
            [head * 2 * size + gate * size + row for head in range(heads) for row in range(size)] for gate in (0, 1)
        ], 0
    if "linear_attn." in name:
        keys, ratio = hf["linear_num_key_heads"], hf["linear_num_value_heads"] // hf["linear_num_key_heads"]
        k, v = hf["linear_key_head_dim"], hf["linear_value_head_dim"] * ratio
        sizes = {"in_proj_qkvz.weight": (k, k, v, v), "in_proj_ba.weight": (ratio, ratio)}
        for tail, counts in sizes.items():
            if name.endswith(tail):
                starts = [sum(counts[:i]) for i in range(len(counts))]
                return [
                    [key * sum(counts) + start + row for key in range(keys) for row in range(count)]
                    for start, count in zip(starts, counts, strict=True)
                ], 0
        if name.endswith("in_proj_qkv.weight"):
            return [slice(0, keys * k), slice(keys * k, 2 * keys * k), slice(2 * keys * k, None)], 0
    return [slice(None)], 0


def steps(name, index, weight, hf, shards=1, rate=1.0, between=lambda now: now):
    """A HF tensor after :data:`STEPS` steps from ``weight``, in float64. ``shards``: each is a matrix of its own.

    ``rate``: multiplies both rates. ``between``: what happens to the tensor between two steps.
    """
    import torch

    now = weight.double().clone()
    first, second = torch.zeros_like(now), torch.zeros_like(now)
    matrix = now.dim() == 2 and not name.endswith(OTHERS)
    lr, adam_lr = LR * rate, ADAM_LR * rate
    for step in range(STEPS):
        now = between(now) if step else now
        grad = gradient(name, index, weight.shape, step).double()
        if not matrix:
            first = BETAS[0] * first + (1 - BETAS[0]) * grad
            second = BETAS[1] * second + (1 - BETAS[1]) * grad**2
            above, below = first / (1 - BETAS[0] ** (step + 1)), second / (1 - BETAS[1] ** (step + 1))
            decay = DECAY if now.dim() > 1 else 0.0
            now = now * (1 - adam_lr * decay) - adam_lr * above / (below.sqrt() + ADAM_EPS)
            continue
        first = MOMENTUM * first + (1 - MOMENTUM) * grad
        direction, update = MOMENTUM * first + (1 - MOMENTUM) * grad, torch.zeros_like(now)
        rows, axis = parts(name, hf)
        for each in rows:
            where = (each,) if axis == 0 else (slice(None), each)
            split = name.endswith(("o_proj.weight", "down_proj.weight"))  # over columns
            own = direction[where].chunk(shards, int(split))
            found = [0.2 * math.sqrt(max(block.shape)) * orthogonal(block) for block in own]
            update[where] = torch.cat(found, int(split))
        now = now * (1 - lr * DECAY) - lr * update
    return now
