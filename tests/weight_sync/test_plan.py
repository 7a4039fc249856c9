"""The export plan without engines: the buckets that Megatron ranks fill, read by a receiver, are the HF folder."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import write_tiny_model
from tests.weight_sync.test_layouts import FAMILIES, MORE, PLAIN, VOCABULARY

BUCKET_BYTES = 1 << 17  # smaller than the largest tensor
LAYOUTS = PLAIN | MORE
OTHERS = dict.fromkeys(("qwen2", "qwen2_moe", "llama"), (2, dict(tp=2), {}))
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


def apart(tensors):
    """Experts that share a tensor on disk (gpt-oss), one by one."""
    for name, tensor in tensors.items():
        layer, shared, leaf = name.partition(".mlp.experts.")
        if shared and not leaf[0].isdigit():
            yield from ((f"{layer}{shared}{expert}.{leaf}", one) for expert, one in enumerate(tensor))
        else:
            yield name, tensor


def check(ranks, tmp_path, model_type, world, layout, **overrides):
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron.weight_sync.tensors import FUSED_EXPERTS, as_on_disk
    from tests.weight_sync.recording import received

    folders = [write_tiny_model(model_type, tmp_path / str(seed), seed, **overrides) for seed in (0, 1)]
    results = [(a, s) for a, s in ranks(world, sent_by_rank, *folders, world, layout) if a]
    for number, folder in enumerate(folders):
        buckets = [syncs[number] for _, syncs in results]
        found, _ = received([metadata for metadata, _ in results], buckets, BUCKET_BYTES)
        assert any(name.endswith(".experts.down_proj") for name in found) == (model_type in FUSED_EXPERTS)
        if model_type in FUSED_EXPERTS:
            found = dict(one_by_one(found))
        found = dict(as_on_disk(found.items(), [metadata for metadata, _ in results]))
        expected = dict(apart(load_file(folder / "model.safetensors")))
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
@pytest.mark.parametrize("model_type", FAMILIES | OTHERS)
def test_buckets_of_other_families(ranks, tmp_path, model_type):
    world, layout, overrides = (FAMILIES | OTHERS)[model_type]
    check(ranks, tmp_path, model_type, world, layout, **overrides)


def test_rows_of_every_expert_are_one_copy():
    """Gate and up, which alternate in Megatron's tensor; and rows that no stride describes."""
    import torch

    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.export_plan import ExportPlan
    from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard

    experts, held, local = 6, 5, torch.randn(6 * 2 * 5, 3)
    odd = [RowRange(0, 0, 2, 7), RowRange(0, 2, 2, 1), RowRange(0, 4, 2, 12, step=3), RowRange(0, 6, 1, 40)]

    class Source:
        """What one rank has all of."""

        def shards(self):
            gate, up = (
                [RowRange(0, expert * held, held, (2 * expert + half) * held) for expert in range(experts)]
                for half in (0, 1)
            )
            named = {"gate": gate, "up": up, "odd": odd}
            rows = {name: sum(span.count for span in ranges) for name, ranges in named.items()}
            return [
                TensorShard(TensorMeta(name, "float32", (rows[name], 3)), local, ranges)
                for name, ranges in named.items()
            ]

        def addresses(self):
            return []

    plan = ExportPlan(Source(), 1 << 14, torch.device("cpu"))
    assert [len(step.copies.targets) for step in plan._steps] == [1 + 1 + len(odd), 0]
    buffer = plan.fill(0)
    both = local.view(experts, 2, held, 3)
    expected = [both[:, 0].reshape(-1, 3), both[:, 1].reshape(-1, 3), local[[7, 8, 1, 2, 12, 15, 40]]]
    for segment, whole in zip(plan.buckets[0].segments, expected, strict=True):
        found = buffer[segment.offset : segment.offset + segment.nbytes].view(torch.float32).view(-1, 3)
        assert torch.equal(found, whole)
