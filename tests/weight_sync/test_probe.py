"""What trainer and engines are compared by."""

import pytest


def test_limits():
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.probe import LogprobDiff as Diff
    from skyrl_megatron.weight_sync.probe import limit_of, logprob_diff

    assert logprob_diff([-1.0, -2.0], [-1.5, -2.0]) == Diff(0.5, 0.25)
    steady = Diff(1e-6, 1e-7)
    assert Diff(3e-4, 9e-5).within(limit_of("float32", steady))
    assert not Diff(1.1e-4, 1.1e-4).within(limit_of("float32", steady))
    small, large = Diff(0.2, 0.01), Diff(1.0, 0.4)
    assert Diff(3.0, 0.14).within(limit_of("bfloat16", small))
    assert not Diff(0.2, 0.16).within(limit_of("bfloat16", small))
    assert Diff(3.0, 1.1).within(limit_of("bfloat16", large)) and not Diff(3.0, 1.3).within(
        limit_of("bfloat16", large)
    )
    for dtype in ("float32", "bfloat16"):
        assert not logprob_diff([-1.0, float("nan")], [-1.0, -1.0]).within(limit_of(dtype, small))
    with pytest.raises(WeightSyncError, match="scored 1 tokens, the engine 2"):
        logprob_diff([-1.0], [-1.0, -1.0])


def score(folder, layout):
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.scoring import score_tokens
    from skyrl_megatron.weight_sync.probe import probe_tokens
    from tests.training.bodies import config

    engine = MegatronEngine(config(folder, world=2, **layout))
    tokens = probe_tokens(engine.model.vocab_size)
    return [score_tokens(engine, tokens, perturbation=perturbation) for perturbation in (0.0, 2.0**-8, 2.0**-24, 0.0)]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_a_perturbation_moves_scores_and_leaves_nothing_behind(ranks, tmp_path, layout):
    from tests.support.tiny_models import write_tiny_model

    found = [scores for scores in ranks(2, score, write_tiny_model("qwen3_moe", tmp_path / "m"), layout) if scores[0]]
    ((plain, perturbed, least, again),) = found
    distance = [
        sum(abs(a - b) for a, b in zip(plain, other, strict=True)) / len(plain) for other in (perturbed, least)
    ]
    assert 1e-3 < distance[0] < 0.3 and 0 < distance[1] < 1e-4
    assert again == plain


@pytest.mark.parametrize("given, limit", [(None, 0.3), (0.7, 0.7)])
def test_a_run_may_set_the_limit_itself(given, limit):
    """Otherwise three times what rounding does to the trainer's own scores."""
    import asyncio

    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    class Rank:
        async def score(self, tokens, perturbation=0.0):
            return [-1.0 - (0.1 if perturbation else 0.0) for _ in tokens]

    made = WeightSynchronizer(None, [Rank()], hf_config={}, dtype="bfloat16", probe_limit=given)
    scores, found = asyncio.run(made._expected([1, 2], ""))
    assert scores == [-1.0, -1.0] and found == pytest.approx(limit)
