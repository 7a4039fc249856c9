"""Matrices in 8 bits: bit for bit vLLM's own, whole and from shards, and what folders of them are read as."""

import itertools
import json

import pytest

FP8_BLOCKS = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3")
FORMS = {
    "fp8": FP8_BLOCKS,
    "fp8, scales 2^n": FP8_BLOCKS | {"scale_fmt": "ue8m0"},
    "fp8, small blocks": FP8_BLOCKS | {"weight_block_size": [16, 32]},
    "mxfp8": {"quant_method": "mxfp8"},
}


def form_of(config):
    from bridges.quantisation import EngineForm

    return EngineForm.of({"quantization_config": config}, "config.json")


def by_vllm(form, weight):
    """What vLLM's own functions make of a matrix, without torch.compile."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if form.method == "mxfp8":
        return _mxfp8_e4m3_quantize_torch(weight)
    plain = per_block_cast_to_fp8._torchdynamo_orig_callable
    return plain(weight, block_size=list(form.block), use_ue8m0=form.powers_of_two)


def matrices(width_in_blocks):
    """Name → matrix. ``width_in_blocks``: of 32 columns, where the last must be whole."""
    import torch

    draw = torch.Generator().manual_seed(5)

    def normal(rows, columns, dtype=torch.bfloat16, scale=0.02):
        columns = -(-columns // 32) * 32 if width_in_blocks else columns
        return (torch.randn(rows, columns, generator=draw) * scale).to(dtype)

    found = {
        f"{rows} x {columns} {str(dtype)[6:]} {scale:g}": normal(rows, columns, dtype, scale)
        for (rows, columns), dtype, scale in itertools.product(
            [(128, 128), (256, 384), (129, 257), (1, 1), (7, 300), (200, 31)],
            [torch.bfloat16, torch.float32, torch.float16],
            [0.02, 3e-6, 3e4],
        )
    }
    found["zeros"] = torch.zeros(130, 288, dtype=torch.bfloat16)
    some = normal(300, 320)
    some[:128, 128:256] = 0
    some[3] = -0.0
    found["blocks of zeros"] = some
    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("-inf", -float("inf"))):
        some = normal(300, 320)
        some[130, 5], some[0, 0] = value, -value
        found[name] = some
    some[131, 7] = float("nan")
    found["nan and inf"] = some
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found["every bfloat16"] = every.view(128, 512)
    found["every bfloat16, in another order"] = every.view(512, 128).t().contiguous()
    exact = torch.pow(2.0, torch.arange(-126.0, 128)) * 448
    found["powers of two"] = torch.stack([exact, exact.nextafter(torch.tensor(0.0))], 1).repeat_interleave(16, 1)
    return found


def same_bits(found, expected):
    import torch

    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.vllm
@pytest.mark.parametrize("form", FORMS)
def test_it_is_vllms(form):
    import torch

    from bridges.quantized import quantise

    form = form_of(FORMS[form])
    for name, weight in matrices(form.method == "mxfp8").items():
        (values, scales), (expected, grid) = quantise(form, weight), by_vllm(form, weight)
        assert values.shape == weight.shape and tuple(scales.shape) == form.grid(weight.shape), name
        nan = scales.isnan()  # which of the NaNs of a block its scale is, depends on the order of vLLM's reduction
        assert torch.equal(nan, grid.isnan()) and same_bits(scales.masked_fill(nan, 0), grid.masked_fill(nan, 0)), name
        assert same_bits(values, expected), name


@pytest.mark.vllm
@pytest.mark.full_matrix
@pytest.mark.parametrize("form", ["fp8", "fp8, scales 2^n"])
def test_it_is_vllms_compiled(form):
    """Compiled, a NaN may have another sign."""
    import torch
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    from bridges.quantized import quantise

    form = form_of(FORMS[form])
    for name, weight in matrices(False).items():
        expected = per_block_cast_to_fp8(weight, block_size=list(form.block), use_ue8m0=form.powers_of_two)
        for ours, theirs in zip(quantise(form, weight), expected, strict=True):
            nan = ours.float().isnan()
            assert torch.equal(nan, theirs.float().isnan()), name
            assert torch.equal(ours.float()[~nan], theirs.float()[~nan]), name


@pytest.mark.parametrize("form", FORMS)
def test_shards_make_the_whole(form):
    """Rows and columns are split where they are no multiple of a block; a rank has its rows in an order of its own."""
    import torch

    from bridges.quantized import (
        block_scales,
        engine_scales,
        new_block_max,
        quantise,
        quantised_rows,
        update_block_max,
    )

    form = form_of(FORMS[form])
    weight = torch.randn(203, 352, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[60, 90], weight[140, 300] = float("nan"), float("inf")
    expected, grid = quantise(form, weight)
    order = torch.randperm(203, generator=torch.Generator().manual_seed(1))
    shards = [(rows, columns) for rows in order.split(51) for columns in torch.arange(352).split(88)]
    largest = []
    for rows, columns in shards:
        largest.append(new_block_max(form, weight.shape))
        update_block_max(form, largest[-1], weight[rows][:, columns], rows, int(columns[0]))
    scales = block_scales(form, torch.stack(largest).amax(0))
    assert same_bits(engine_scales(form, scales), grid)
    found = torch.empty(weight.shape, dtype=torch.uint8)
    for rows, columns in shards:
        part = quantised_rows(form, weight[rows][:, columns], scales, rows, int(columns[0]))
        found[rows.unsqueeze(1), columns] = part.view(torch.uint8)
    assert same_bits(found.view(torch.float8_e4m3fn), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_it_is_read_as_near_as_8_bits_are(form, tmp_path):
    import torch
    from safetensors.torch import save_file

    from bridges.quantized import quantise
    from bridges.source import open_hf
    from tests.bridges.tiny_models import tiny_config

    config, form = FORMS[form], form_of(FORMS[form])
    weight = torch.randn(203, 352, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:16] = 0
    name = "model.layers.0.self_attn.q_proj.weight"
    values, scales = quantise(form, weight)
    save_file({name: values, name + form.suffix: scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe") | {"quantization_config": config}))
    folder = open_hf(tmp_path)
    assert folder.block(name) == form.block
    read = folder.read(name)
    height, width = form.block
    each = scales.float() if form.method == "fp8" else torch.exp2(scales.float() - 127)
    each = each.repeat_interleave(height, 0)[:203].repeat_interleave(width, 1)[:, :352].double()
    assert torch.equal(read, (values.double() * each).float().bfloat16())
    # half a unit of three bits behind the point, at least 2^-9 of a scale; bfloat16's own rounding on top
    assert ((read.double() - weight.double()).abs() <= weight.double().abs() * 2**-3.9 + each * 2**-9.9).all()
    if form.powers_of_two:  # then the product is exact, and a second time changes nothing
        values, scales = quantise(form, read)
        save_file({name: values, name + form.suffix: scales}, tmp_path / "model.safetensors")
        assert torch.equal(open_hf(tmp_path).read(name), read)
