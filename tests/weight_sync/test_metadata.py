"""What the ranks send must be the whole model: each mistake is named before a byte travels."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import TINY

LAYER = "model.layers.2.mlp.experts"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 512]}


@pytest.fixture
def model():
    """(config.json, weight metadata) of the tiny model, with tied embeddings."""
    from transformers import AutoConfig

    from bridges.plan import Plan
    from skyrl_megatron.weight_sync.buckets import TensorMeta

    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=3, tie_word_embeddings=True, **TINY["qwen3_moe"])
    hf = config.to_dict()
    return hf, {name: TensorMeta(name, "float32", tuple(shape)) for name, shape in Plan.of(hf).hf.items()}


def check(config, metas):
    from skyrl_megatron.weight_sync.tensors import check_metadata

    check_metadata([metas], config)


def test_tied_embeddings_may_travel_once_or_twice(model):
    import dataclasses

    config, metas = model
    check(config, list(metas.values()))
    check(config, [*metas.values(), dataclasses.replace(metas["model.embed_tokens.weight"], name="lm_head.weight")])


def test_fused_experts_may_travel_in_parts_of_several_ranks(model):
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.tensors import check_metadata

    config, metas = model
    others = [meta for name, meta in metas.items() if ".experts." not in name]
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    halves = [
        [
            TensorMeta(f"model.layers.{layer}.mlp.experts.{name}", "float32", (8, *shape), rows)
            for layer in range(3)
            for name, shape in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width)))
        ]
        for rows in ((0, 4), (4, 8))
    ]
    check_metadata([others + halves[0], halves[1]], config)
    from skyrl_megatron.errors import WeightSyncError

    with pytest.raises(WeightSyncError, match=r"rows 4 to 8 of model.layers.0.mlp.experts.gate_up_proj are missing"):
        check_metadata([others + halves[0]], config)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(drop=f"{LAYER}.5.up_proj.weight"), f"1 tensors are missing: {LAYER}.5.up_proj.weight"),
        (dict(add="model.layers.7.mlp.gate.weight"), "model.layers.7.mlp.gate.weight is not a tensor of the model"),
        (dict(rename=f"{LAYER}.5.up_proj.weight"), r"up_proj.weights is not a tensor .*nearest: .*experts.5.up_proj"),
        (dict(shape=(3, 4)), r"model.norm.weight is \[3, 4\], the model has"),
        (dict(shape=(0,)), r"model.norm.weight is \[0\], the model has"),
        (dict(twice="model.norm.weight"), "of model.norm.weight are sent twice"),
    ],
    ids=["missing", "extra", "misnamed", "misshapen", "without elements", "twice"],
)
def test_a_mistake_is_named(model, change, message):
    import dataclasses

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.buckets import TensorMeta

    config, metas = model
    if name := change.get("drop"):
        del metas[name]
    if name := change.get("add"):
        metas[name] = TensorMeta(name, "float32", (8, 4))
    if name := change.get("rename"):
        metas[name] = dataclasses.replace(metas[name], name=f"{name}s")
    if shape := change.get("shape"):
        metas["model.norm.weight"] = TensorMeta("model.norm.weight", "float32", shape)
    listed = list(metas.values()) + ([metas[change["twice"]]] if "twice" in change else [])
    with pytest.raises(WeightSyncError, match=message):
        check(config, listed)


@pytest.mark.parametrize(
    ("quantised", "scales", "message"),
    [
        (BLOCKS, ((1, 4), "float32"), ""),
        (
            BLOCKS,
            None,
            r"_proj.weight_scale_inv is missing, .*\[1, 4\]",
        ),
        (
            BLOCKS | {"weight_block_size": [64, 1024]},
            ((1, 4), "float32"),
            r"is \[1, 4\] float32, .*\[1, 2\]",
        ),
        (
            BLOCKS,
            ((1, 4), "bfloat16"),
            "bfloat16, the model has .*float32",
        ),
        (
            {"quant_method": "mxfp8"},
            ((64, 4), "float32"),
            "up_proj.weight_scale is missing.*scale_inv is not a tensor",
        ),
        ({"quant_method": "mxfp4"}, ((1, 4), "float32"), "not to quant_method='mxfp4'"),
        (None, ((1, 4), "float32"), "up_proj.weight are sent in 8 bits, but config.json has no quantization_config"),
    ],
)
def test_values_of_8_bits_come_with_their_scales(model, quantised, scales, message):
    import contextlib
    import dataclasses

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.buckets import TensorMeta

    config, metas = model
    name = f"{LAYER}.5.up_proj.weight"
    metas[name] = dataclasses.replace(metas[name], dtype="float8_e4m3fn")
    assert metas[name].shape == (64, 2048)
    if scales is not None:
        shape, dtype = scales
        metas[f"{name}_scale_inv"] = TensorMeta(f"{name}_scale_inv", dtype, shape)
    raised = pytest.raises(WeightSyncError, match=message) if message else contextlib.nullcontext()
    with raised:
        check(config | {"quantization_config": quantised}, list(metas.values()))
