"""Folders of 8-bit weights mean what compressed-tensors, transformers and the definition in fp64 say; others are
refused."""

import json

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.support.quantised import BLOCK, KINDS, quantise

SIZES = dict(moe_intermediate_size=32, head_dim=16)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp("base")
            made[kind] = quantise(save_tiny("qwen3_moe", root / "model", **SIZES), root, kind)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_dequantised(pair, kind):
    import torch

    from bridges.source import open_hf

    ours, expected = (open_hf(folder) for folder in pair(kind))
    assert ours.shapes() == expected.shapes()
    for name in expected.shapes():
        assert ours.dtype(name) == expected.dtype(name) and torch.equal(ours.read(name), expected.read(name)), name
    assert sum(ours.block(name) is not None for name in ours.shapes()) == 3 * (4 + 3 * 4)


def test_fp8_is_dequantised_as_by_transformers(pair):
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    from bridges.source import open_hf

    source, compared = open_hf(pair("fp8")[0]), 0
    for name in source.shapes():
        if source.block(name) is None or any(n % b for n, b in zip(source.shapes()[name], BLOCK, strict=True)):
            continue  # transformers takes whole blocks alone
        values, scales = (source.folder.read(each) for each in (name, f"{name}_scale_inv"))
        theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
        assert torch.equal(source.read(name), theirs)
        compared += 1
    assert compared


@pytest.mark.parametrize("size", [2, 3, 6])
def test_shares_of_columns_begin_inside_of_blocks(size):
    import torch

    from bridges.quantized import matrix_of_blocks

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (40, 48), generator=generator, dtype=torch.int8)
    scales = torch.rand(3, 3, generator=generator)
    matrix = matrix_of_blocks(values, scales, (16, 20))
    every = scales.double().repeat_interleave(16, 0)[:40].repeat_interleave(20, 1)[:, :48]
    whole = (values.float() * every.float()).bfloat16()
    assert torch.equal(matrix.dequantized(), whole)
    shares = [matrix.share(size, rank) for rank in range(size)]
    assert torch.equal(torch.cat([share.dequantized() for share in shares], 1), whole)
    order = torch.randperm(40, generator=generator)
    assert torch.equal(shares[1].rows(lambda rows: rows[order]).dequantized(), shares[1].dequantized()[order])


def change(folder, **weights):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "weights, says",
    [
        (dict(num_bits=4), "'num_bits': 4.* cannot be dequantised exactly"),
        (dict(symmetric=False), "'symmetric': False"),
        (dict(actorder="group"), "'actorder': 'group'"),
        (dict(strategy="token"), "'strategy': 'token'"),
        (
            dict(strategy="group", group_size=7),
            r"down_proj.weight_scale is \[48, 1\], expected \[48, 5\] for blocks",
        ),
    ],
    ids=str,
)
def test_other_quantisations_are_refused(pair, tmp_path, weights, says):
    import shutil

    from bridges.errors import BridgeError
    from bridges.source import open_hf

    folder = shutil.copytree(pair("int8 channels")[0], tmp_path / "folder")
    change(folder, **weights)
    with pytest.raises(BridgeError, match=says):
        open_hf(folder)
