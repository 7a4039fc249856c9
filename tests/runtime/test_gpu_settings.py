"""What a GPU run asks of Megatron, Transformer Engine and torch's kernels, as far as it can be seen without a GPU."""

import os
from types import SimpleNamespace

import pytest

from skyrl_megatron.errors import ConfigError
from tests.bridges.tiny_models import LATENT_FAMILIES, TINY, save_tiny, tiny_config

LAYOUTS = {
    "single": dict(),
    "tp2": dict(world_size=2, tp=2),
    "ep2": dict(world_size=2, ep=2),
    "pp2": dict(world_size=2, pp=2),
    "cp2": dict(world_size=2, cp=2),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DENSE = {"llama", "qwen2", "qwen3"}
OUR_LAYERS = frozenset(
    {
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "mimo_v2_flash",
        "minimax_m2",
        "olmoe",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
)
"""Families that Transformer Engine's layers cannot express: norms of q and k over all heads; experts with biases;
latent norms of another epsilon than the others'."""


@pytest.fixture
def fused_kernels(monkeypatch):
    """Transformer Engine's fused kernels are there: Megatron asks for no more when it makes a config."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    sorts = ("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs")
    moves = ("fused_permute", "fused_permute_with_probs", "fused_unpermute", *sorts)
    for module, names in (
        (rope_utils, ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")),
        (moe_utils, moves),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_: None)


def config_of(model_type, layout, fields=None, **overrides):
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.model.build import transformer_config
    from skyrl_megatron.runtime.model.description import read_hf_model

    if model_type not in LATENT_FAMILIES:
        overrides["num_key_value_heads"] = 2
    model = read_hf_model(tiny_config(model_type, num_hidden_layers=4, **overrides))
    return transformer_config(model, ParallelConfig(**layout), dtype=torch.bfloat16, use_te=True, overrides=fields)


@pytest.mark.parametrize("model_type", sorted(set(TINY) - OUR_LAYERS))
def test_megatron_takes_the_settings_of_every_family(fused_kernels, model_type):
    """Plain rotary embedding, as the families are released but for gpt-oss and DeepSeek."""
    for layout in LAYOUTS.values():
        if "ep" in layout and model_type in DENSE:
            continue
        config = config_of(model_type, layout)
        assert config.transformer_impl == "transformer_engine" and config.bf16
        assert config.apply_rope_fusion == (model_type not in ("deepseek_v3", "ernie4_5_moe"))


@pytest.mark.parametrize("model_type, fused", [("qwen3", False), ("qwen3_moe", False), ("deepseek_v3", True)])
def test_yarn_is_fused_in_latent_attention_alone(fused_kernels, model_type, fused):
    """Elsewhere the kernel for packed sequences knows no ``mscale``."""
    assert config_of(model_type, {}, rope_parameters=YARN).apply_rope_fusion == fused


@pytest.mark.around
def test_families_that_need_our_layers_get_them():
    """And ``--check`` counts memory of the same."""
    from skyrl_megatron.runtime.model.description import read_hf_model, unsupported_by_te
    from skyrl_megatron_observe.estimate.memory_phases import LOCAL_LAYERS

    needs = {name for name in TINY if unsupported_by_te(read_hf_model(tiny_config(name)))}
    assert needs == OUR_LAYERS == LOCAL_LAYERS


def test_the_users_attention_kernels_are_kept(monkeypatch):
    """Two models with different backends, of a user who rules out cuDNN's kernels."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    from skyrl_megatron.runtime.model import build

    names = [f"NVTE_{kind}_ATTN" for kind in ("FLASH", "FUSED", "UNFUSED")]
    monkeypatch.setattr(os, "environ", os.environ | {names[1]: "0", names[0]: "1"})
    monkeypatch.setattr(build, "_CHOSEN_BACKENDS", {names[1]: "0"})
    for backend, expected in ((AttnBackend.auto, ["1", "0", "1"]), (AttnBackend.unfused, ["0", "0", "1"])):
        module = SimpleNamespace(config=SimpleNamespace(attention_backend=backend, flash_attention_version=None))
        with build._attention_environment():
            LanguageModule._set_attention_backend(module)
        assert [os.environ[name] for name in names] == expected


def test_the_default_leaves_the_choice_to_transformer_engine():
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine_settings import transformer_kwargs

    cfg = SkyRLTrainConfig()
    assert transformer_kwargs(cfg, "policy")["attention_backend"] == "auto"
    cfg.trainer.flash_attn = False
    assert transformer_kwargs(cfg, "policy")["attention_backend"] == "unfused"


@pytest.mark.parametrize("model_type, sizes", [("qwen3_moe", (3, 1, 16, None)), ("deepseek_v3", (3, 3, 24, 12))])
def test_a_deterministic_run_has_a_kernel_or_is_refused(fused_kernels, monkeypatch, model_type, sizes):
    """What Transformer Engine answers is tested in tests/te; here, what a rank asks, and what it makes of answers."""
    from megatron.core.transformer.enums import AttnBackend

    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.runtime.model import attention_kernels as kernels

    config, asked = config_of(model_type, dict(world_size=2, tp=2)), []
    answers = {"": [], "unfused": ["unfused"], "fused": ["fused", "unfused"], "flash": ["flash"]}
    for first, answer in answers.items():
        monkeypatch.setattr(kernels, "attention_kernels", lambda case, answer=answer: asked.append(case) or answer)
        config.deterministic_mode = False
        kernels.require_deterministic(config, 3, 512, "M.")
        config.deterministic_mode, config.attention_backend = True, AttnBackend.unfused
        kernels.require_deterministic(config, 3, 512, "M.")
        assert len(asked) == list(answers).index(first), "asked without need"
        config.attention_backend = AttnBackend.auto
        if first in ("fused", "flash"):
            kernels.require_deterministic(config, 3, 512, "M.")
        else:
            with pytest.raises(
                ConfigError, match=r"3 sequence\(s\) of 512 tokens with 3 heads a rank.*M\.transformer_c"
            ):
                kernels.require_deterministic(config, 3, 512, "M.")
    assert asked[0] == kernels.AttentionCase(*sizes, 1, 3, 512, deterministic=True)


def test_attention_of_our_layers_is_deterministic_where_other_operations_warn():
    """The kernel's backward alone sees torch's strict mode, in which it takes its deterministic form."""
    import torch

    from skyrl_megatron.runtime.model.attention import with_deterministic_backward

    seen = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(strict())
            return gradient * 2

    def strict():
        return (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )

    try:
        for mode, expected in (((False,), False), ((True,), True)):
            torch.use_deterministic_algorithms(*mode, warn_only=True)
            x = torch.ones(3, requires_grad=True)
            x.register_hook(lambda _: seen.append(strict()))
            (with_deterministic_backward(Kernel.apply(x)) * 3).sum().backward()
            assert x.grad.tolist() == [6.0] * 3
            assert seen == [expected, False] and torch.are_deterministic_algorithms_enabled() == mode[0]
            seen.clear()
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------- kernels of our own layers
def attention():
    from megatron.core.transformer import TransformerConfig

    from skyrl_megatron.runtime.model.attention import PackedAttention

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    return PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=one, tp=one), k_channels=24)


@pytest.mark.parametrize("widths", [(192, 128), (128, 128)], ids=["latent", "grouped query"])
def test_the_varlen_kernel_takes_our_arguments(widths):
    """torch's own description of the kernel, forward and backward, on sizes of DeepSeek-V3 and Qwen3, also of shared
    prefixes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from skyrl_megatron.runtime.model.attention import flash_pieces

    def run(device, segments):
        options = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
        inputs = [torch.empty(12, 4, width, **options) for width in (widths[0], widths[0], widths[1])]
        flash_pieces.cache_clear()  # of tensors of a mode that has ended
        pieces = flash_pieces((5, 7), 1, 0, None, torch.device(device), segments)
        return inputs, attention()._join(*inputs, pieces)

    for segments in (None, ((-1, 5), (0, 7))):
        with FakeTensorMode():
            assert run("cuda:0", segments)[1].shape == (12, 4 * widths[1])
        inputs, out = run("meta", segments)  # autograd asks the driver for a stream where a device is named
        out.sum().backward()
        assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    flash_pieces.cache_clear()


def test_the_grouped_product_takes_our_arguments():
    """As above, for the experts of Qwen3-30B-A3B (hidden 2048, 768 each)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from skyrl_megatron.runtime.cpu_patches import grouped_gemm

    def run(device, call):
        options = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
        x, weight = torch.empty(24, 2048, **options), torch.empty(8, 1536, 2048, **options)
        return x, weight, call(x, weight, torch.empty(8, dtype=torch.int64, device=device))

    with FakeTensorMode():
        assert run("cuda:0", grouped_gemm)[2].shape == (24, 1536)

    def grouped_mm(x, weight, tokens_per_expert):
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    x, weight, out = run("meta", grouped_mm)
    out.backward(torch.empty_like(out))
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


# ---------------------------------------------------------------------- exact rollouts
def test_exact_rollouts_take_batch_invariant_attention(fused_kernels, monkeypatch):
    """Megatron accepts the fields; our layers have their own attention."""
    from skyrl_megatron import device
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine_settings import transformer_kwargs

    cfg = SkyRLTrainConfig.from_cli_overrides({"trainer.exact_rollouts": True})
    plain = transformer_kwargs(cfg, "policy")
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    names = ("batch_invariant_mode", "attention_backend", "flash_attention_version")
    fields = {name: value for name, value in transformer_kwargs(cfg, "policy").items() if name in names}
    assert fields == dict(zip(names, (True, "flash", 3), strict=True)) and names[0] not in plain
    found = config_of("qwen3", {}, fields=fields)
    assert found.batch_invariant_mode and (found.attention_backend.name, found.flash_attention_version) == ("flash", 3)
    with pytest.raises(ConfigError, match="flash-attention-version 3 or 4"):
        config_of("qwen3", {}, fields=fields | {"flash_attention_version": 2})
    cfg.trainer.policy.megatron_config.transformer_config_kwargs["transformer_impl"] = "local"
    assert names[0] not in transformer_kwargs(cfg, "policy")


def test_exact_rollouts_take_batch_invariant_products(monkeypatch):
    """Of each expert, by fake tensors. Transformer Engine is not installed, so its part of Megatron's kernels is left
    out."""
    import torch
    from megatron.core.transformer.custom_layers import batch_invariant_kernels
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from skyrl_megatron import device
    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.runtime.cpu_patches import grouped_gemm
    from skyrl_megatron.runtime.trained_model import use_exact_operations

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    def products(counts):
        called.clear()
        with FakeTensorMode(), Called():
            options = dict(device="cuda:0", dtype=torch.bfloat16)
            out = grouped_gemm(torch.empty(24, 64, **options), torch.empty(3, 32, 64, **options), counts)
            assert out.shape == (24, 32)
        return [name for name in called if "mm" in name]

    called = []
    counts = SimpleNamespace(tolist=lambda: [10, 0, 14], to=lambda device: torch.empty(3, device=device).long())
    assert products(counts) == ["aten._grouped_mm.default"]
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(batch_invariant_kernels, "_te_patch_for_batch_invariant", lambda: None)
    try:
        use_exact_operations(True)
        assert batch_invariant_kernels.is_batch_invariant_mode_enabled() and not exact_ops.active()
        assert products(counts) == ["aten.mm.default"] * 3
    finally:
        batch_invariant_kernels.disable_batch_invariant_mode()


# ---------------------------------------------------------------------- whole down projections
def whole_projections(hf, fault):
    """Load, export and describe for a sync, at tp=2, a model whose down projections are whole on every rank, as
    Transformer Engine's (``parallel_mode="duplicated"``) are."""
    import torch

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf, stream_hf
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource

    megatron_patches.install()
    groups = parallel_state.initialize(ParallelConfig(world_size=2, tp=2), seed=0, timeout_s=60)
    model = build_model(hf, groups, dtype=torch.float32)
    for layer in model.chunks[0].decoder.layers:
        for linear in (layer.self_attention.linear_q_down_proj, layer.self_attention.linear_kv_down_proj):
            rows, columns = linear.weight.shape
            linear.weight = torch.nn.Parameter(torch.full((2 * rows, columns), float("nan")))
    if not fault:
        model.config.transformer_impl = "transformer_engine"
    load_hf(model, hf, groups)
    exported = {piece.name: piece.tensor.clone() for piece in stream_hf(model, groups)}
    sent = {shard.meta.name: shard for shard in MegatronWeightSource(model, groups).shards()}
    return {name: tensor.numpy() for name, tensor in exported.items()}, {
        name: (shard.meta.shape, sum(span.count for span in shard.ranges), shard.group is None)
        for name, shard in sent.items()
    }


@pytest.mark.process
def test_whole_down_projections(ranks, tmp_path):
    import numpy as np
    from safetensors.numpy import load_file

    hf = save_tiny("deepseek_v3", tmp_path / "hf")
    (exported, sent), (others, _) = ranks(2, whole_projections, hf, False)
    for name, tensor in load_file(hf / "model.safetensors").items():
        assert np.array_equal((exported | others)[name], tensor), name
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert sent[name] == ((24, 48), 24, True), "sent whole by the first rank"


@pytest.mark.process
def test_whole_down_projections_planted_fault(ranks, tmp_path):
    """Read as if they were split: the shard does not fit."""
    with pytest.raises(AssertionError, match="must match the size"):
        ranks(2, whole_projections, save_tiny("deepseek_v3", tmp_path / "hf"), True)


# ---------------------------------------------------------------------- other releases of what a GPU run is made of
def test_routers_in_fp32_are_not_rounded(monkeypatch):
    """Transformer Engine's GEMM takes fp32 as TF32; a stand-in that rounds so must not be asked for fp32 inputs."""
    import torch

    from skyrl_megatron.runtime.model import moe as router

    def te_general_gemm(weight, inputs, dtype, **_):
        asked.append(inputs.dtype)
        return [inputs.to(dtype) @ weight.to(dtype).t()]

    asked = []
    monkeypatch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", te_general_gemm)
    monkeypatch.setattr(router, "te_general_gemm", te_general_gemm)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for dtype, asks in ((torch.float32, []), (torch.bfloat16, [torch.bfloat16])):
        gate = router.TokenWeightedRouter.__new__(router.TokenWeightedRouter)
        torch.nn.Module.__init__(gate)
        gate.weight, gate.bias = torch.nn.Parameter(torch.randn(4, 8, dtype=dtype)), None
        gate.config = SimpleNamespace(moe_router_dtype="fp32")
        inputs = torch.randn(3, 1, 8, dtype=dtype)
        logits = gate.gating(inputs)
        torch.testing.assert_close(logits, inputs.float() @ gate.weight.float().t())
        assert (asked, logits.dtype) == (asks, torch.float32)


def test_a_checkpoint_of_a_source_tree_that_is_not_installed(monkeypatch):
    from importlib import metadata

    from skyrl_megatron.runtime.checkpoint import manifest

    def version(name):
        if name == "skyrl-megatron":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    assert manifest.versions() | {"python": ""} == {
        "python": "", "torch": "1", "megatron-core": "1", "skyrl-megatron": "not installed", "numpy": "1",
    }  # fmt: skip
