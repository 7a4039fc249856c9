"""How vLLM's CPU kernel packs experts, and that it is undone bit for bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_packing_is_undone(name, isa):
    import torch
    from vllm.platforms import current_platform

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync import vllm_reshard as vllm_targets

    current_platform.import_kernels()  # those that this processor can run
    word = vllm_targets.word_of(getattr(torch, name), isa)
    assert word is not None
    experts = torch.randn(3, 96, 160).to(getattr(torch, name))
    experts[0, 5, 7], experts[1, 0, 0] = float("nan"), -0.0
    packed, together = torch.zeros_like(experts), torch.empty_like(experts)
    packing = vllm_targets.ExpertPacking("model.experts", {"w2_weight": packed}, isa, word)
    for part in (2, 0, 1):
        packing.pack("w2_weight", part, experts[part].flatten())
    vllm_targets.prepack(experts, together, isa)
    assert torch.equal(packed.view(torch.uint8), together.view(torch.uint8))
    assert not torch.equal(packed.view(torch.uint8), experts.view(torch.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_targets, "prepack", lambda expert, into, isa: None)
        with pytest.raises(WeightSyncError, match=r"model.experts.w2_weight\[2\] is wrong in the memory"):
            packing.pack("w2_weight", 2, experts[0].flatten())
