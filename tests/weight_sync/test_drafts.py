"""Engines that draft tokens with the layer of multi-token prediction: a sync brings it too, where it is trained."""

from __future__ import annotations

import pytest

from tests.support.engines import largest_gap, reference_logprobs
from tests.support.tiny_models import write_tiny_model
from tests.training.draft_reference import LAYERS, PREFIX, last_as_draft
from tests.weight_sync.megatron_ranks import MegatronRanks, Rank
from tests.weight_sync.test_layouts import BUCKET_BYTES, SAMPLING, TOKENS, Model, digest

pytestmark = pytest.mark.vllm
DRAFTING = {
    "worker_extension_cls": "tests.weight_sync.draft_extension.DraftExtension",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}
MORE_TOKENS = SAMPLING | {"max_tokens": 100}


class TrainsDraft(Rank):
    """A rank that trains the layer of multi-token prediction."""

    overrides = {"trainer.policy.megatron_config.mtp.train": True}


class Drafting(Model):
    """A model whose engine drafts; what it says includes what it drafts with, and what it drafted."""

    def answers(self, pool) -> tuple:
        engine = pool.slots[0].engine

        async def ask():
            await engine._llm.collective_rpc("drafted_tokens")
            sample = await engine.generate(f"drafted {id(object())}", TOKENS[:20], MORE_TOKENS)
            drafted = await engine._llm.collective_rpc("drafted_tokens")
            weights = await engine._llm.collective_rpc("draft_weights")
            return await engine.score(TOKENS), sample.token_ids, sample.logprobs, drafted, weights

        return self.loop(ask())

    def draft_weights(self) -> dict[str, str]:
        """Digest of each tensor that the first worker drafts with."""
        found, same = self.answers(self.pool)[-1][0]
        assert same == [True, True]
        return found

    def synchronizer(self, trainer, *, draft=True, **options):
        synchronizer = super().synchronizer(trainer, **options)
        synchronizer.draft = draft
        return synchronizer


def seeds(folder, model_type, **overrides):
    return {
        name: last_as_draft(
            write_tiny_model(model_type, folder / name, seed, num_hidden_layers=LAYERS + 1, **overrides), seed
        )
        for name, seed in (("A", 0), ("B", 1))
    }


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory, loop):
    model = Drafting(seeds(tmp_path_factory.mktemp("deepseek_v3"), "deepseek_v3"), loop, extra=DRAFTING)
    yield model
    model.close()


def check(model, ranks, world, layout, exports, routes=False):
    """A → B → A: scores, samples, drafts, and all that is drafted with, are those of an engine on what ranks export."""
    with MegatronRanks(ranks, model.folders["A"], world, layout, BUCKET_BYTES, kind=TrainsDraft) as trainer:
        synchronizer = model.synchronizer(trainer, routes=routes)
        for number, name in enumerate("ABA"):
            trainer.together("load", model.folders[name])
            report = model.loop(synchronizer.sync(f"{name}{number}"), 250)
            assert not report.failures and (synchronizer.plan is not None) == routes
            assert report.logprob_diffs["engine 0"].largest <= 1e-4
            trainer.together("export", exports / f"{name}{number}")
            assert digest(exports / f"{name}{number}") == digest(model.folders[name])
            found = model.answers(model.pool)
            assert found == model.fresh_answers(exports / f"{name}{number}")
            assert found[-1][0][1] == [True, True]
    one, other = (fresh[-1][0][0] for fresh in model.fresh.values())
    alike = [name for name in one if one[name] == other[name]]
    assert alike == [], "A and B are to differ in all that is drafted with"


@pytest.mark.parametrize("routes", [False, True], ids=["in buckets for all", "by routes"])
def test_what_is_drafted_with_is_that_of_a_fresh_engine(ranks, deepseek, tmp_path, routes):
    check(deepseek, ranks, 2, dict(pp=2), tmp_path, routes)
