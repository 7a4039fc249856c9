"""What travels with ``sync_mode=memory``: the factors that checkpoints and folders are made of, at any layout."""

import pytest

from tests.lora import bodies
from tests.lora.test_merged_sync import joined
from tests.training.conftest import folder  # noqa: F401

BUCKET_BYTES = 4 * 4096  # several buckets
SHARED, NORMALISED = f"{bodies.HOW}experts_shared_outer_loras", f"{bodies.HOW}normalize_moe_lora"
ATTENTION = {f"{bodies.LORA}train_mlp": False}


def body(folder, layout, overrides):  # noqa: F811
    """(Tensors as sent, their metadata, the same factors as they go into folders) of this rank, after two passes."""
    import torch

    from skyrl_megatron.weight_sync.export_plan import ExportPlan
    from skyrl_megatron_lora.folder import stream_factors
    from skyrl_megatron_lora.source import AdapterSource

    engine = bodies.adapted_engine(folder, layout, overrides)
    source = AdapterSource(engine.every_adapter(), engine.groups)
    plan = ExportPlan(source, BUCKET_BYTES, torch.device("cpu"))
    metas = list(source.metadata())
    for factor in engine.adapters.factors():
        factor.tensor.data.copy_(_random(factor, engine.groups))
    for _ in range(2):
        for factor in engine.adapters.factors():
            factor.tensor.data.mul_(1.5)
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
    whole = {
        f"{each.module}.{each.letter}": each.tensor * (each.scale if each.letter == "B" else 1)
        for each in stream_factors(engine.adapters, engine.groups)
    }
    return sent, metas, {name: tensor.clone() for name, tensor in whole.items()}


def _random(factor, groups):
    """Random values, the same on all ranks that hold copies of a factor."""
    import torch

    over = groups.tp if factor.experts is None else groups.etp
    own = (over.rank() if factor.split is not None else 0) + 7 * (factor.experts[0] if factor.experts else 0)
    generator = torch.Generator().manual_seed(sum(map(ord, factor.name)) + 100_000 * own)
    return torch.randn(factor.tensor.shape, generator=generator)


@pytest.mark.parametrize(
    "layout, overrides",
    [
        (dict(world=4, tp=2, ep=2), {}),
        (dict(world=1), ATTENTION),
        pytest.param(dict(world=2, ep=2), {SHARED: True}, marks=pytest.mark.full_matrix),
        pytest.param(dict(world=2, tp=2, etp=2), {NORMALISED: True}, marks=pytest.mark.full_matrix),
        pytest.param(dict(world=2, tp=2, etp=2), {SHARED: True}, marks=pytest.mark.full_matrix),
        pytest.param(dict(world=2, pp=2, vpp=2), {}, marks=pytest.mark.full_matrix),
        pytest.param(
            dict(world=4, tp=2, cp=2, ep=4),
            {f"{bodies.HOW}lora_type": "canonical_lora"},
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(
            dict(world=4, tp=2, etp=2, ep=2),
            {f"{bodies.HOW}lora_type": "canonical_lora", f"{bodies.LORA}target_modules": "q_proj,v_proj,mlp.experts"},
            marks=pytest.mark.full_matrix,
        ),
        pytest.param(
            dict(world=2, ep=2),
            {"trainer.policy.megatron_config.moe_grouped_gemm": False},
            marks=pytest.mark.full_matrix,
        ),
    ],
    ids=str,
)
def test_buckets_hold_the_factors(ranks, folder, layout, overrides):  # noqa: F811
    import torch

    from skyrl_megatron_lora.tensors import FactorName, check_adapters, configured_pairs, stacked
    from tests.training.bodies import config

    results = ranks(layout["world"], body, folder, layout, overrides)
    sent = joined([each for each, _, _ in results])
    expected = {name: tensor for _, _, whole in results for name, tensor in whole.items()}
    memory = {f"{bodies.LORA}sync_mode": "memory"}
    pairs = configured_pairs(config(folder, **layout, overrides=bodies.KEYS | overrides | memory))
    check_adapters([metas for _, metas, _ in results if metas], pairs)
    (pairs,) = pairs.values()

    looked_at = set()
    for name, tensor in sent.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            for expert in range(pairs[module].experts or 1):
                own = module.replace(".experts.", f".experts.{expert}.")
                matrix = tensor if pairs[module].experts is None else tensor[expert if len(tensor) > 1 else 0]
                assert stacked(own) == module
                assert torch.equal(matrix, expected[f"{own}.{factor.letter}"]), f"{name}: {own}"
                looked_at.add(f"{own}.{factor.letter}")
    assert looked_at == set(expected)
