"""A reference becomes the policy's copy, bit for bit, between any two layouts."""

import pytest

from tests.training import bodies
from tests.training.test_step import LAYOUTS, MORE

PAIRS = [("tp2·cp2·ep4", "pp2·vpp2"), ("pp2", "dp2·ep2"), ("single", "tp2"), ("tp2·pp2", "pp4"), ("dp2·ep2", "single")]
EVERY = [(source, target) for source in LAYOUTS for target in LAYOUTS | MORE]


def given_body(folder, layout, nbytes):
    """Weights of a policy that has taken a step, in rounds, as each rank gives them, and their digest."""
    import torch

    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.offload import weight_buckets

    engine = MegatronEngine(bodies.config(folder, **layout))
    with torch.no_grad():
        for _number, chunk in enumerate(engine.chunks):
            for name, parameter in chunk.named_parameters():  # alike on all ranks that hold it
                parameter.add_(torch.full_like(parameter, 0.01 + 0.001 * len(name)))
    return list(weight_buckets(engine.model, engine.groups, nbytes)), exported(engine)


def exported(engine):
    """HF name → digest, of what this rank would export."""
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from tests.checkpoint.training import digest

    return {(piece.name, piece.index): digest(piece.tensor) for piece in stream_hf(engine.model, engine.groups)}


def taken_body(folder, layout, given, fault):
    """Digest of a reference after it took all rounds; also of the tied or replicated copies on each rank."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.offload import ShardReceiver

    long = dict(tp="tensor_model", pp="pipeline_model", cp="context", ep="expert_model", etp="expert_tensor")
    keys = {f"trainer.ref.megatron_config.{long[k]}_parallel_size": v for k, v in layout.items() if k in long}
    if "vpp" in layout:
        keys["trainer.ref.megatron_config.virtual_pipeline_model_parallel_size"] = layout["vpp"]
    world = {"trainer.placement.ref_num_gpus_per_node": layout["world"]}
    engine = MegatronEngine(bodies.config(folder, overrides=keys | world), "ref")
    taker = ShardReceiver(engine.model, engine.groups)
    for part in given:
        taker.take(part[1:] if fault == "a weight is lost" else part)
    taker.finish()
    return exported(engine)


def copied(ranks, folder, source, target, fault=None, nbytes=2**18):
    layouts = LAYOUTS | MORE
    ranks_given = ranks(layouts[source]["world"], given_body, folder, layouts[source], nbytes)
    wanted = {name: digest for _, mine in ranks_given for name, digest in mine.items()}
    assert len({len(given) for given, _ in ranks_given}) == 1 or layouts[source].get("pp"), "a stage goes in step"
    parts = [part for given, _ in ranks_given for part in given]
    assert len(parts) > 2, "in more than one round"
    names = [weight.name for part in parts for weight in part]
    assert len(names) == len(set(names)), "a weight travels once"
    found = ranks(layouts[target]["world"], taken_body, folder, layouts[target], parts, fault)
    return wanted, {name: digest for mine in found for name, digest in mine.items()}


@pytest.mark.parametrize(
    "source, target",
    [*PAIRS[:2], *(pytest.param(*pair, marks=pytest.mark.full_matrix) for pair in EVERY if pair not in PAIRS[:2])],
)
def test_between_layouts(ranks, folder, source, target):
    wanted, found = copied(ranks, folder, source, target)
    assert found == wanted and len(wanted) > 40


def test_tied_embeddings(ranks, tmp_path):
    """The last stage's copy of the embedding follows, too."""
    from tests.bridges.tiny_models import save_tiny

    folder = save_tiny("qwen3_moe", tmp_path, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=True)
    wanted, found = copied(ranks, folder, "single", "pp2", nbytes=2**16)
    assert found == wanted


def test_a_weight_that_never_comes_is_named(ranks, folder):
    from tests.support.rank_pool import RankFailure

    with pytest.raises(RankFailure, match=r"WeightSyncError: .* more weights of the reference are missing"):
        copied(ranks, folder, "single", "single", "a weight is lost")
