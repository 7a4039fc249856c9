"""An optimizer of a plugin: named by the configuration, and made by a rank."""

import pytest

from tests.training import bodies, reference

KEY = "trainer.policy.optimizer_config."


def register():
    """Register ``half``: Adam at half of the schedule's rate."""
    from skyrl_megatron.plugins import register_optimizer
    from skyrl_megatron.runtime.partial_optimizer import RATIO, PartialOptimizer

    class HalfRate(PartialOptimizer):
        def __init__(self, model, groups, adapters, key):
            self.key = key

        def overrides(self, settings):
            from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

            return {ParamKey(predicate=ParamPredicate(name="all", fn=lambda parameter: True)): {RATIO: 0.5}}

        def install(self, optimizer, options):
            assert self.key == f"{KEY}optimizer"

    register_optimizer("half")(HalfRate)


@pytest.fixture
def registered():
    from skyrl_megatron.plugins import OPTIMIZERS

    register()
    yield
    OPTIMIZERS._classes.pop("half")


def test_names_are_those_that_are_registered(registered, tmp_path):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.validate import find_problems

    for name, known in {"half": True, "haft": False}.items():
        cfg = bodies.config(tmp_path, overrides={f"{KEY}optimizer": name, "trainer.logger": "console"})
        found = [problem for problem in find_problems(cfg, Hardware(1, 1)) if problem.key == f"{KEY}optimizer"]
        last_words = [problem.fix.split()[-1] for problem in found]
        assert last_words == ([] if known else ["half"]), found  # "not registered; known: adam, …, half"


def weights_after_two_steps(folder, batch, settings):
    """HF name → weight."""
    from skyrl_megatron.plugins import OPTIMIZERS
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf

    register()
    try:
        engine = MegatronEngine(bodies.config(folder, overrides=settings))
        for _ in range(2):
            engine.forward_backward(batch)
            engine.optim_step()
    finally:
        OPTIMIZERS._classes.pop("half")
    return {piece.name: piece.tensor.clone() for piece in stream_hf(engine.model, engine.groups)}


@pytest.mark.process
def test_a_rank_trains_with_it(ranks, tmp_path):
    import torch

    from tests.bridges.tiny_models import save_tiny

    folder = save_tiny("qwen3_moe", tmp_path)
    batch = reference.make_batch(vocab_size=1003)
    batch = reference.with_logprobs(batch, reference.all_logprobs(folder, batch))
    settings = ({f"{KEY}lr": 2e-3}, {f"{KEY}lr": 4e-3, f"{KEY}optimizer": "half"}, {f"{KEY}lr": 4e-3})
    [plain], [half], [other] = [ranks(1, weights_after_two_steps, folder, batch, keys) for keys in settings]
    assert all(torch.equal(weight, half[name]) for name, weight in plain.items())
    assert not all(torch.equal(weight, other[name]) for name, weight in plain.items())
