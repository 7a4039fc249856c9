"""What a GPU run imports, and the smallest computation with each."""

import pytest

from tests.gpu import installed

PROVES = "torch, NCCL, Transformer Engine and vLLM import and fit the driver, and attention has a kernel"
REPORT = "the versions that `pip list` shows for torch, transformer-engine, vllm, nvidia-nccl and nvidia-cudnn"


def test_torch_computes_in_bf16():
    import torch

    from skyrl_megatron import device

    assert device.has_cuda() or installed.is_rehearsal(), "torch does not see the driver: another CUDA than its own"
    x = torch.randn(256, 512, device=device.device(), dtype=torch.bfloat16)
    expected = x.float() @ x.float().T
    assert (x @ x.T).float().sub(expected).norm() < 0.01 * expected.norm()


@pytest.mark.needs("gpu")
def test_nccl_is_there():
    import torch

    assert torch.cuda.nccl.version() >= (2, 20)


@pytest.mark.needs("te")
def test_megatron_sees_transformer_engine():
    from skyrl_megatron.runtime.model.description import _import_error

    assert _import_error() is None


@pytest.mark.needs("te", "gpu")
def test_transformer_engine_has_an_attention_kernel():
    """Packed sequences, causal, grouped queries, as ``attention_backend=auto`` lets it choose: equals torch's own."""
    import torch
    from torch.nn import functional as F
    from transformer_engine.pytorch import DotProductAttention

    lengths, heads, groups, width = (5, 32, 91), 8, 2, 64
    starts = torch.tensor([0, 5, 37, 128], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(128, n, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (heads, groups, groups)
    )
    attention = DotProductAttention(
        heads, width, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    out = attention(
        q, k, v, qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=91, max_seqlen_kv=91
    ).view(128, heads, width)
    for first, length in zip((0, 5, 37), lengths, strict=True):
        one = (x[first : first + length].transpose(0, 1).float() for x in (q, k, v))
        expected = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(out[first : first + length].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.needs("vllm", "gpu")
def test_vllm_imports():
    import vllm
    from vllm.platforms import current_platform

    assert vllm.__version__ and current_platform.is_cuda()
