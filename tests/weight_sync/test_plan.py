"""The export plan without engines: the buckets that Megatron ranks fill, read by a receiver, are the HF folder."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import write_tiny_model
from tests.weight_sync.test_layouts import FAMILIES, MORE, PLAIN, VOCABULARY

BUCKET_BYTES = 1 << 17  # smaller than the largest tensor
LAYOUTS = PLAIN | MORE
IN_THE_PLAIN_SUITE = ("tp2·cp2·etp2·ep2", "pp2·vpp2")


def sent_by_rank(folder, other, world, layout):
    """Body of a rank: what it sends, and the buckets of two syncs, the second with another folder's weights."""
    from tests.weight_sync.megatron_ranks import Rank
    from tests.weight_sync.recording import sent

    rank = Rank(folder, world, layout, BUCKET_BYTES)
    metadata, syncs = rank.weight_metadata(), []
    for weights in (folder, other):
        rank.load(weights)
        syncs.append(sent(rank.sender).sent)
    return metadata, syncs


def one_by_one(tensors):
    """Experts as they are on disk."""
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, (gate, up) in enumerate(both.chunk(2) for both in tensor):
                yield f"{layer}.{expert}.gate_proj.weight", gate
                yield f"{layer}.{expert}.up_proj.weight", up
        elif kind == "down_proj":
            yield from ((f"{layer}.{expert}.down_proj.weight", down) for expert, down in enumerate(tensor))
        else:
            yield name, tensor


def check(ranks, tmp_path, model_type, world, layout, **overrides):
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron.weight_sync.metadata import FUSED_EXPERTS
    from tests.weight_sync.recording import received

    folders = [write_tiny_model(model_type, tmp_path / str(seed), seed, **overrides) for seed in (0, 1)]
    results = [(a, s) for a, s in ranks(world, sent_by_rank, *folders, world, layout) if a]
    for number, folder in enumerate(folders):
        buckets = [syncs[number] for _, syncs in results]
        found, _ = received([metadata for metadata, _ in results], buckets, BUCKET_BYTES)
        assert any(name.endswith(".experts.down_proj") for name in found) == (model_type in FUSED_EXPERTS)
        found = dict(one_by_one(found))
        expected = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "name",
    [name if name in IN_THE_PLAIN_SUITE else pytest.param(name, marks=pytest.mark.full_matrix) for name in LAYOUTS],
)
def test_buckets_of_megatron_ranks_are_the_folder(ranks, tmp_path, name):
    check(ranks, tmp_path, "qwen3_moe", *LAYOUTS[name], vocab_size=VOCABULARY)


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type", [*FAMILIES, "qwen2", "qwen2_moe", "llama"])
def test_buckets_of_other_families(ranks, tmp_path, model_type):
    world, layout, overrides = FAMILIES.get(model_type, (2, dict(tp=2), {}))
    check(ranks, tmp_path, model_type, world, layout, **overrides)
