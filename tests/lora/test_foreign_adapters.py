"""Adapters that PEFT made of transformers' models: ``bridges merge`` gives PEFT's merged weights, bit for bit."""

import pytest

from tests.bridges.tiny_models import LATENT_FAMILIES, TINY

ALWAYS = {"qwen3_moe", "mixtral", "hy_v3", "gpt_oss"}
"""Fused experts, other names in transformers, an adapter of the shared expert, experts in one tensor on disk."""
KINDS = {
    "all-linear": dict(target_modules="all-linear"),
    "ranks of their own": dict(
        target_modules="all-linear",
        rank_pattern={"o_proj": 2, r"layers\.1\..*experts\.down_proj": 3},
        alpha_pattern={"k_proj": 20},
        use_rslora=True,
    ),
}
OF_PARAMETERS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
"""How adapters of experts are asked for where PEFT maps no names to them."""


def made_by_peft(family, folder, dtype, **settings):
    """Write the model and an adapter of random factors; return PEFT's model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.bridges.tiny_models import save_tiny

    groups = {} if family in LATENT_FAMILIES else dict(num_key_value_heads=2)
    model = AutoModelForCausalLM.from_pretrained(save_tiny(family, folder / "first", **groups), dtype=dtype)
    model.save_pretrained(folder / "base")
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **settings))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in peft.named_parameters():
        if "lora_" in name:
            tensor.data.normal_(std=0.1, generator=generator)
    peft.save_pretrained(folder / "adapter")
    return peft


def check_merge(family, folder, dtype, **settings):
    import torch
    from transformers import AutoModelForCausalLM

    from bridges.peft import merge_adapter

    peft = made_by_peft(family, folder, dtype, **settings)
    merge_adapter(folder / "base", folder / "adapter", folder / "merged")
    expected = peft.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=dtype).state_dict()
    before = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype).state_dict()
    assert sum(not torch.equal(before[name], found[name]) for name in found) > 5
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full_matrix) for name in TINY]
)
def test_merged_as_peft_merges(tmp_path, family, kind):
    import torch

    check_merge(family, tmp_path, torch.float32 if kind == "all-linear" else torch.bfloat16, **KINDS[kind])


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("hy_v3", marks=pytest.mark.full_matrix)])
def test_adapters_of_parameters(tmp_path, family):
    import torch

    check_merge(family, tmp_path, torch.bfloat16, **OF_PARAMETERS)
