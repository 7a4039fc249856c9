"""Other kinds of state: bfloat16 with fp32 masters, tied embeddings, frozen weights, an optimizer not spread."""

import pytest

from tests.checkpoint import training
from tests.checkpoint.ranks import RankCheckpointer

SPREAD = "trainer.policy.megatron_config.optimizer_config_kwargs"


def save_variant(folder, root, layout, overrides):

    engine = training.engine(folder, layout, **overrides)
    training.train(engine, [1, 2])
    checkpointer = RankCheckpointer(root, training.state_of(engine), seed=0)
    checkpointer.save(2)
    checkpointer.close()
    held = training.global_digests(engine) if not overrides else None
    return held, training.train(engine, [3, 4, 5])


def load_variant(folder, root, layout, overrides):
    import warnings

    engine = training.engine(folder, layout, seed=7, **overrides)
    training.train(engine, [10])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RankCheckpointer(root, training.state_of(engine)).load()
    held = training.global_digests(engine) if not overrides else None
    return held, training.train(engine, [3, 4, 5])


def check(ranks, folder, root, source, target, save_with=None, load_with=None):
    held, following = ranks(training.LAYOUTS[source]["world"], save_variant, folder, root, source, save_with or {})[0]
    loaded, losses = ranks(training.LAYOUTS[target]["world"], load_variant, folder, root, target, load_with or {})[0]
    if held is not None and loaded is not None:
        assert loaded == held
    for found, expected in zip(losses, following, strict=True):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6)
    return held


def by_name(engine):
    """Digest of every weight and moment of this rank under its global name; dp 1, so that each is held whole.

    Megatron's own gather cannot be the judge here: with several buckets it reads positions in the padded buffer from
    a copy that has no padding (``sharded_param_state_fully_reshardable``), and stores other parameters' moments.
    """
    import re

    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges

    first, names = 2 * engine.groups.pp.rank(), {}
    for name, parameter in engine.chunks[0].module.named_parameters():
        name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first}", name)
        names[id(parameter)] = name.replace("output_layer", "embedding.word_embeddings")
    held = {}
    for each in owned_ranges(engine.optimizer):
        assert each.start == 0 and each.stop == each.parameter.numel()
        tensors = each.tensors | {"weight": each.parameter}
        held |= {f"{names[id(each.parameter)]} {key}": training.digest(value) for key, value in tensors.items()}
    return held


def tied_body(folder, root, layout, save):
    import warnings

    engine = training.engine(folder, layout)
    training.train(engine, [1, 2] if save else [10])
    checkpointer = RankCheckpointer(root, training.state_of(engine), seed=0)
    if save:
        checkpointer.save(2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpointer.load()
    checkpointer.close()
    return by_name(engine), training.train(engine, [3, 4, 5])


@pytest.mark.parametrize(("source", "target"), [("single", "pp2"), ("pp2", "single")])
def test_tied_embeddings(ranks, tmp_path, source, target):
    """First and last stage hold a copy each; it is stored once and loaded on both."""
    from tests.bridges.tiny_models import save_tiny

    folder = save_tiny("qwen2", tmp_path / "m", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    root = str(tmp_path / "run")
    saved = ranks(training.LAYOUTS[source]["world"], tied_body, folder, root, source, True)
    loaded = ranks(training.LAYOUTS[target]["world"], tied_body, folder, root, target, False)
    whole = {key: value for held, _ in saved for key, value in held.items()}
    assert "embedding.word_embeddings.weight exp_avg" in whole
    for held, _ in loaded:
        assert held == {key: whole[key] for key in held}
    assert {key for held, _ in loaded for key in held} == set(whole)
    for found, expected in zip(loaded[0][1], saved[0][1], strict=True):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6)


def test_optimizer_of_another_kind(ranks, tmp_path):
    """Spread over data parallelism or not: the files are the same, and each loads the other's."""
    folder = training.save_model(tmp_path / "model")
    check(ranks, folder, str(tmp_path / "a"), "dp2·ep2", "single", {SPREAD: {"use_distributed_optimizer": False}})
    check(ranks, folder, str(tmp_path / "b"), "tp2", "dp2·ep2", None, {SPREAD: {"use_distributed_optimizer": False}})


def test_frozen_router(ranks, tmp_path):
    """Weights without an optimizer state are stored too, split evenly over the ranks that hold them."""
    folder = training.save_model(tmp_path / "model")
    frozen = {"trainer.policy.megatron_config.freeze_moe_router": True}
    check(ranks, folder, str(tmp_path / "a"), "dp2", "tp2", frozen, frozen)


def bf16_state(*args, **options):
    """The state of :func:`bf16_model`."""
    return bf16_model(*args, **options)[1]


def bf16_model(
    folder,
    degrees,
    seed,
    options=None,
    dtype="bfloat16",
    optimizer="adam",
    *,
    distributed=True,
    fields=None,
    **changes,
):
    """Model in bfloat16 with fp32 masters, and its state. No engine: it computes in fp32 on CPU.

    ``fields``: of Megatron's ``TransformerConfig``. ``changes``: of ``optimizer_config``.
    """
    import types

    import torch
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.optimizer import build_lr_schedule, build_optimizer
    from skyrl_megatron.runtime.partial_optimizer import partial_optimizer

    megatron_patches.install()
    layout = ParallelConfig(world_size=dist.get_world_size(), **degrees)
    groups = parallel_state.initialize(layout, seed=seed)
    dtype = getattr(torch, dtype)
    model = build_model(folder, groups, dtype=dtype, transformer_config_kwargs=fields)
    load_hf(model, folder, groups)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    chunks = [
        DistributedDataParallel(model.config, buffers, chunk, pg_collection=groups.collection)
        for chunk in model.chunks
    ]
    usual = dict(
        optimizer=optimizer, adam_lr=None,
        lr=1e-2, min_lr=0.0, weight_decay=0.01, adam_betas=(0.9, 0.95), max_grad_norm=1.0, scheduler="constant",
        num_warmup_steps=0, num_decay_steps=None, decay_norms_and_biases=False,
    )  # fmt: skip
    settings = types.SimpleNamespace(**(usual | changes))
    partial = partial_optimizer(optimizer, model, groups, None, "optimizer")
    optimizer = build_optimizer(
        chunks, settings, options or {}, groups, params_dtype=dtype, use_distributed_optimizer=distributed,
        overlap_param_gather=False, partial=partial,
    )  # fmt: skip
    return model, RankState(chunks, groups, optimizer, build_lr_schedule(optimizer, settings, None))


def set_gradients(state, step):
    """The gradient of a global element is a function of its weight: the same at every layout."""
    for chunk in state.model_chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_((parameter.detach().float() * 7 + step).sin())


def bf16_body(folder, root, degrees, save):
    import types
    import warnings

    import torch

    state = bf16_state(folder, degrees, seed=1 if save else 2)
    engine = types.SimpleNamespace(chunks=state.model_chunks, groups=state.groups, optimizer=state.optimizer)

    def steps(numbers):
        for number in numbers:
            set_gradients(state, number)
            state.optimizer.config.clip_grad = 0.0  # a norm is summed in another order at another layout
            state.optimizer.prepare_grads()
            state.optimizer.step_with_ready_grads()
        return training.global_digests(engine)

    checkpointer = RankCheckpointer(root, state, seed=0)
    if save:
        held = steps([1, 2])
        assert any(p.dtype == torch.bfloat16 for chunk in state.model_chunks for p in chunk.parameters())
        checkpointer.save(2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpointer.load()
        held = training.global_digests(engine)
    checkpointer.close()
    return held, steps([3, 4, 5])


def test_bf16_with_masters(ranks, tmp_path):
    """Masters and moments are not derived from the weights: all of it is equal, and stays so for three steps."""
    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    saved = ranks(4, bf16_body, folder, root, dict(tp=2, ep=2), True)[0]
    loaded = ranks(2, bf16_body, folder, root, dict(pp=2, vpp=2), False)[0]
    assert loaded == saved and len(saved[0]) == 48


@pytest.mark.full_matrix
@pytest.mark.parametrize(("source", "target"), [("tp2·ep2", "pp2"), ("cp2", "tp2·ep2")])
def test_gated_delta_nets(ranks, tmp_path, source, target):
    """Their short convolutions, decay rates and steps are split by head over tp.

    Weights are smaller than parity's: with those, rounding of another layout grows a hundredfold with each step of
    Adam, here as little as in Qwen3-MoE.
    """
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    folder = save_tiny("qwen3_next", tmp_path / "model", num_hidden_layers=4, **sizes)
    check(ranks, folder, str(tmp_path / "run"), source, target)
