"""What travels with ``sync_mode=merged``: the weights of the merged export, bit for bit, at any layout."""

import pytest

from tests.lora import bodies, reference
from tests.training.conftest import folder  # noqa: F401

BUCKET_BYTES = 8 * 4096  # several buckets, and tensors that are cut


@pytest.fixture(scope="module")
def factors(folder):  # noqa: F811
    from skyrl_megatron.runtime.model.description import read_hf_model

    return reference.start_factors(read_hf_model(folder).plan, separate=False)


def body(folder, factors, root, layout, overrides):  # noqa: F811
    """Whole tensors by their sent names, put together of the buckets of the second of three passes, before which the
    adapters grow, and of the third, before which they become zero."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.hf_weights import save_hf
    from skyrl_megatron.weight_sync.export_plan import ExportPlan
    from skyrl_megatron_lora.source import MergedWeightSource

    engine = bodies.adapted_engine(folder, layout, overrides, factors)
    source = MergedWeightSource(engine.adapters, engine.groups)
    plan = ExportPlan(source, BUCKET_BYTES, torch.device("cpu"))
    metas = list(source.metadata())
    passes = []
    for number in range(3):
        source.refresh()
        sent = {}
        for index, bucket in enumerate(plan.buckets):
            buffer = plan.fill(index)
            for segment in bucket.segments:
                meta = metas[segment.index]
                place = meta.first_byte + segment.start
                stretch = buffer[segment.offset : segment.offset + segment.nbytes].clone()
                sent.setdefault((meta.name, meta.shape), []).append((place, stretch))
        plan.finish()
        save_hf(engine.model, engine.groups, root / str(number), of=engine.adapters.merged)
        for factor in engine.adapters.factors():
            factor.tensor.data.mul_(1.5 if number == 0 else 0.0)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sent)
        passes.append(joined(everyone))
    return passes[1:]


def joined(everyone):
    import torch

    whole = {}
    for (name, shape), stretches in (item for sent in everyone for item in sent.items()):
        flat = whole.setdefault(name, torch.zeros(shape)).view(-1).view(torch.uint8)
        for start, stretch in stretches:
            flat[start : start + len(stretch)] = stretch
    return whole


@pytest.mark.parametrize(
    "layout, lora_type",
    [
        (dict(world=4, tp=2, ep=2), "lora"),
        pytest.param(dict(world=2, pp=2, vpp=2), "canonical_lora", marks=pytest.mark.full_matrix),
        pytest.param(dict(world=2, tp=2, etp=2), "lora", marks=pytest.mark.full_matrix),
        pytest.param(dict(world=4, tp=2, cp=2, ep=4), "canonical_lora", marks=pytest.mark.full_matrix),
    ],
    ids=str,
)
def test_buckets_hold_the_merged_weights(ranks, folder, factors, tmp_path, layout, lora_type):  # noqa: F811
    import torch
    from safetensors.torch import load_file

    overrides = {f"{bodies.HOW}lora_type": lora_type}
    if lora_type == "canonical_lora":
        from skyrl_megatron.runtime.model.description import read_hf_model

        factors = reference.start_factors(read_hf_model(folder).plan, separate=True)
    sent, of_zeros = ranks(layout["world"], body, folder, factors, tmp_path, layout, overrides)[0]
    merged, base, unmerged = (
        load_file(path / "model.safetensors") for path in (tmp_path / "1", folder, tmp_path / "2")
    )
    assert unmerged.keys() == base.keys() and all(torch.equal(unmerged[name], base[name]) for name in base)
    assert all(torch.equal(of_zeros[name], base[name]) for name in set(of_zeros) & set(base))
    for name, tensor in sent.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            prefix = name.rpartition(".")[0]
            for expert, matrix in enumerate(tensor):
                expected = torch.cat([merged[f"{prefix}.{expert}.{part}.weight"] for part in parts])
                assert (matrix - expected).abs().max() < 1e-6, f"{name} of expert {expert}"
        else:
            assert (tensor - merged[name]).abs().max() < 1e-6, name
            adapted = any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
            assert torch.equal(tensor, base[name]) != adapted, name
    assert len(sent) == 4 * 11 + 3


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("fp8", dict(world=4, tp=2, ep=2)),
        pytest.param("int8 channels", dict(world=2, tp=2, etp=2), marks=pytest.mark.full_matrix),
        pytest.param("fp8", dict(world=2, pp=2, vpp=2), marks=pytest.mark.full_matrix),
    ],
    ids=str,
)
def test_a_base_of_8_bits_is_sent_dequantised(ranks, folder, factors, tmp_path, kind, layout):  # noqa: F811
    """Bit for bit what the same base in bfloat16 sends: rows are made while a bucket is filled."""
    import torch

    from tests.support.quantised import quantise

    sent = []
    for base in quantise(folder, tmp_path, kind):
        (out := tmp_path / f"of {base.name}").mkdir()
        sent.append(ranks(layout["world"], body, base, factors, out, layout, {})[0])
    for ours, theirs in zip(*sent, strict=True):
        assert ours.keys() == theirs.keys() and len(ours) == 4 * 11 + 3
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert all(tensor.isfinite().all() for tensor in ours.values())
