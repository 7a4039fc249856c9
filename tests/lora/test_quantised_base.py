"""A frozen base in the 8 bits of its checkpoint: bit for bit the same model dequantised, trained and exported."""

import contextlib
from unittest import mock

import pytest

from tests.lora import bodies
from tests.support.quantised import KINDS, quantise
from tests.training.conftest import batch, folder  # noqa: F401  (the model and batch of the training step)

LAYOUTS = {
    "single": dict(world=1),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2": dict(world=2, tp=2),
    "dp2·ep2": dict(world=2, ep=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "cp2": dict(world=2, cp=2),
    "tp2·dp2·ep2": dict(world=4, tp=2, ep=2),
}
PLAIN = [("fp8", "tp2·etp2"), ("int8 channels", "dp2·ep2")]
MATRIX = [(kind, name) for name in LAYOUTS for kind in KINDS if (kind, name) not in PLAIN]
RECOMPUTED = {
    "trainer.gradient_checkpointing": True,
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity": "full",
}


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):  # noqa: F811
    """kind → (the folder quantised, the same in bfloat16)."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = quantise(folder, tmp_path_factory.mktemp("base"), kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def dequantised(ranks, pair, batch, tmp_path_factory):  # noqa: F811
    """(kind, layout) → (what a run of the model in bfloat16 leaves behind, its merged folder). Run once each."""
    made = {}

    def get(kind, name):
        if (kind, name) not in made:
            root, layout = tmp_path_factory.mktemp("plain"), LAYOUTS[name]
            made[kind, name] = ranks(layout["world"], body, pair(kind)[1], batch, layout, root), root
        return made[kind, name]

    return get


def body(folder, batch, layout, root, fault=None, overrides=None):  # noqa: F811
    """What a run leaves behind: (loss, gradient norm) of three steps, factors, bytes of the base; the merged model in
    ``root``."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.hf_weights import save_hf
    from skyrl_megatron_lora.folder import stream_factors

    with planted(fault):
        engine = bodies.adapted_engine(folder, layout, overrides or {})
        part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
        steps = [(engine.forward_backward(part)["final_loss"], engine.optim_step().grad_norm) for _ in range(3)]
        scores = engine.compute_logprobs(part, adapters=False)
        save_hf(engine.model, engine.groups, root, of=engine.adapters.merged)
        factors = {f"{f.module}.{f.letter}": f.tensor.clone() for f in stream_factors(engine.adapters, engine.groups)}
    return steps, scores, factors, held(engine)


def held(engine):
    """Bytes of the base: each storage of parameters and of what they are made of, once."""
    from skyrl_megatron.runtime.model.scaled_weights import scaled_buffers

    factors = {id(factor.tensor) for factor in engine.adapters.factors()}
    tensors = [each for chunk in engine.model.chunks for each in chunk.parameters() if id(each) not in factors]
    tensors += [each for chunk in engine.model.chunks for each in scaled_buffers(chunk)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@contextlib.contextmanager
def planted(fault):
    """Run with a mistake: a rank's columns are taken to begin with a block, or rows in the order on disk."""
    from dataclasses import replace

    from bridges.quantized import ScaledMatrix, matrix_of_blocks

    if fault is None:
        yield
    elif fault == "columns":
        share = ScaledMatrix.share
        with mock.patch.object(ScaledMatrix, "share", lambda *args: replace(share(*args), first=0)):
            yield
    elif fault == "rows":
        rolled = lambda values, scales, block: matrix_of_blocks(values, scales.roll(1, 0), block)  # noqa: E731
        with mock.patch("bridges.quantized.matrix_of_blocks", rolled):
            yield


def compare(ours, theirs):
    """Assert that every rank saw the same in both, and that ours held less."""
    import torch

    for (steps, scores, factors, nbytes), (other_steps, other_scores, others, other_nbytes) in zip(
        ours, theirs, strict=True
    ):
        assert steps == other_steps and torch.equal(scores, other_scores)
        assert factors.keys() == others.keys() and all(torch.equal(factors[name], others[name]) for name in factors)
        assert nbytes < 0.75 * other_nbytes  # fp32 on a CPU; embedding and output layer are most of a tiny model


def same_folders(one, other):
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(each / "model.safetensors") for each in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "kind, name", [*PLAIN, *(pytest.param(*each, marks=pytest.mark.full_matrix) for each in MATRIX)]
)
def test_it_is_the_dequantised_model(ranks, pair, dequantised, batch, tmp_path, kind, name):  # noqa: F811
    theirs, plain = dequantised(kind, name)
    layout = LAYOUTS[name]
    compare(ranks(layout["world"], body, pair(kind)[0], batch, layout, tmp_path), theirs)
    same_folders(tmp_path, plain)


@pytest.mark.full_matrix
def test_recomputed_layers_make_their_weights_again(ranks, pair, batch, tmp_path):  # noqa: F811
    ours, theirs = (
        ranks(1, body, base, batch, dict(world=1), tmp_path / base.name, None, RECOMPUTED) for base in pair("fp8")
    )
    compare(ours, theirs)


@pytest.mark.parametrize("fault", ["columns", "rows"])
def test_planted_faults_are_seen(ranks, pair, dequantised, batch, tmp_path, fault):  # noqa: F811
    theirs, plain = dequantised("fp8", "tp2·etp2")
    ours = ranks(2, body, pair("fp8")[0], batch, LAYOUTS["tp2·etp2"], tmp_path, fault)
    with pytest.raises(AssertionError):
        compare(ours, theirs)
    with pytest.raises(AssertionError):
        same_folders(tmp_path, plain)


def lifetimes(folder, batch):  # noqa: F811
    """The most weights that were alive at once, and how many were made."""
    import gc
    import weakref

    from skyrl_megatron.runtime.model import scaled_weights

    engine = bodies.adapted_engine(folder, dict(world=1), {})
    made, most = [], 0
    plain = scaled_weights.ScaledWeight.dequantized

    def counted(self):
        nonlocal most
        weight = plain(self)
        made.append(weakref.ref(weight.untyped_storage()))
        gc.collect()
        most = max(most, sum(each() is not None for each in made))
        return weight

    with mock.patch.object(scaled_weights.ScaledWeight, "dequantized", counted):
        engine.forward_backward(batch)
    return most, len(made)


def test_one_layer_is_made_at_a_time(ranks, pair, batch):  # noqa: F811
    """Autograd keeps none: in each of three micro-batches 16 maps make their weights, and 15 again in the backward
    pass, as nothing before the first map learns."""
    ((most, made),) = ranks(1, lifetimes, pair("fp8")[0], batch)
    assert made == 3 * (16 + 15)
    assert most == 1
