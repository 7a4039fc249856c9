"""Transformer Engine has an attention kernel for what the configuration asks for, in every family and with context
parallelism; and none where the configuration refuses it. Whether cuDNN has the kernel is for a driver to say and taken
as yes (a Hopper GPU's answer); all the rest is Transformer Engine's own choice."""

import os

import pytest

from tests.bridges.tiny_models import OF_KNOWN_PARTS, TINY

NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
FAMILIES = sorted(set(TINY) - OF_KNOWN_PARTS - {"olmoe", "gpt_oss"})


@pytest.fixture
def kernels(monkeypatch):
    """``kernels(backend, case)``: those that the layer could take with Megatron's ``attention_backend``."""
    from types import SimpleNamespace

    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend
    from transformer_engine.pytorch.attention.dot_product_attention import utils
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    from skyrl_megatron.runtime.model.attention_kernels import attention_kernels
    from skyrl_megatron.runtime.model.build import _attention_environment
    from tests.te.meta import hopper

    there = int(FusedAttnBackend.F16_arbitrary_seqlen)
    monkeypatch.setattr(utils, "_get_fused_attn_backend", lambda **_: (there, ""))
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def of(backend, case):
        module = SimpleNamespace(
            config=SimpleNamespace(attention_backend=AttnBackend[backend], flash_attention_version=None)
        )
        with hopper(), _attention_environment():
            LanguageModule._set_attention_backend(module)
            return attention_kernels(case)

    return of


def case_of(family, cp):
    """What the family's released sizes ask for."""
    from skyrl_megatron.runtime.model.attention_kernels import AttentionCase

    if family == "deepseek_v3":
        return AttentionCase(128, 128, 192, 128, cp=cp)
    heads, kv_heads, width = {
        "llama": (32, 8, 128),
        "qwen2": (28, 4, 128),
        "qwen3": (32, 8, 128),
        "qwen2_moe": (16, 16, 128),
        "qwen3_moe": (32, 4, 128),
        "mixtral": (32, 8, 128),
        "glm4_moe": (96, 8, 128),
    }[family]
    return AttentionCase(heads, kv_heads, width, cp=cp)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_has_a_kernel(kernels, family, cp):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine_settings import transformer_kwargs

    backend = transformer_kwargs(SkyRLTrainConfig(), "policy")["attention_backend"]
    assert kernels(backend, case_of(family, cp))[0] == "fused"


@pytest.mark.parametrize("family", FAMILIES)
def test_unfused_attention_is_for_one_rank_of_a_sequence(kernels, family):
    """``trainer.flash_attn=false``; the configuration refuses it with context parallelism."""
    assert kernels("unfused", case_of(family, 1)) == ["unfused"]
    assert kernels("unfused", case_of(family, 2)) == []


def test_flash_alone_has_none_without_flash_attn(kernels):
    """What the configuration refuses for that reason, and what was the default once."""
    assert kernels("flash", case_of("qwen3_moe", 1)) == []


def test_what_the_doctor_asks(kernels):
    from skyrl_megatron.runtime.model.attention_kernels import CASES

    assert all(kernels("auto", case)[:1] == ["fused"] for case in CASES.values())
