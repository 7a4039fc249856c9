"""Transformer Engine has an attention kernel for what the configuration asks for, in every family and with context
parallelism; and none where the configuration refuses it. Whether cuDNN has the kernel is for a driver to say and taken
as yes (a Hopper GPU's answer); all the rest is Transformer Engine's own choice."""

import os
from types import SimpleNamespace

import pytest

from tests.bridges.tiny_models import OF_KNOWN_PARTS, TINY
from tests.runtime.test_gpu_settings import OUR_LAYERS

NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
FAMILIES = sorted(set(TINY) - OF_KNOWN_PARTS - OUR_LAYERS)


@pytest.fixture
def kernels(monkeypatch):
    """``kernels(backend, case)``: those that the layer could take with Megatron's ``attention_backend``."""
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


@pytest.mark.parametrize(
    "sequences, tokens, expected", [(2, 4096, "unfused"), (1, 4096, "fused"), (1, 8192, "unfused")]
)
def test_a_deterministic_backward_is_for_small_micro_batches(kernels, sequences, tokens, expected):
    """On Hopper. What ``--check`` knows of it is what Transformer Engine does."""
    from skyrl_megatron.runtime.model.attention_kernels import AttentionCase
    from skyrl_megatron_observe.preflight.machine_checks import LIMIT

    case = AttentionCase(32, 4, 128, sequences=sequences, tokens=tokens, deterministic=True)
    assert kernels("auto", case)[0] == expected
    assert (sequences * case.heads * tokens**2 >= LIMIT) == (expected == "unfused")


def test_what_a_rank_asks_of_its_model(kernels):
    """Of its sizes and layout; a run is refused before weights are read."""
    from megatron.core.transformer.enums import AttnBackend

    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.runtime.model.attention_kernels import require_deterministic
    from tests.te.meta import hopper

    settings = dict(deterministic_mode=True, attention_backend=AttnBackend.auto, tensor_model_parallel_size=2)
    config = SimpleNamespace(
        num_attention_heads=64, num_query_groups=4, kv_channels=128, multi_latent_attention=False, **settings
    )
    config.context_parallel_size = 1
    kernels("auto", case_of("qwen3_moe", 1))  # sets what the layer reads
    with hopper():
        require_deterministic(config, 1, 4096, "here.")
    with (
        hopper(),
        pytest.raises(ConfigError, match=r"1 sequence\(s\) of 8192 tokens with 32 heads a rank.*here.transformer"),
    ):
        require_deterministic(config, 1, 8192, "here.")
