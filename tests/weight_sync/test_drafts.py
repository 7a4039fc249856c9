"""Engines that draft tokens with the layer of multi-token prediction: a sync brings it too, where it is trained."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.support.engines import PROBE as TOKENS
from tests.support.engines import PROBE_SAMPLING as SAMPLING
from tests.support.engines import largest_gap, reference_logprobs
from tests.support.tiny_models import write_tiny_model
from tests.training.draft_reference import LAYERS, PREFIX, last_as_draft
from tests.weight_sync.megatron_ranks import MegatronRanks, Rank
from tests.weight_sync.test_layouts import BUCKET_BYTES, Model, digest

pytestmark = pytest.mark.vllm
DRAFTING = {
    "worker_extension_cls": "tests.weight_sync.draft_extension.DraftExtension",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}
HEAD = f"{PREFIX}shared_head.head.weight"
MORE_TOKENS = SAMPLING | {"max_tokens": 100}


class TrainsDraft(Rank):
    """A rank that trains the layer of multi-token prediction."""

    overrides: ClassVar = {"trainer.policy.megatron_config.mtp.train": True}


class SharesAndTrainsDraft(TrainsDraft):
    """The same on the device of an engine's worker."""

    transport = "ipc"


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
def deepseek(tmp_path_factory, engines):
    model = Drafting(seeds(tmp_path_factory.mktemp("deepseek_v3"), "deepseek_v3"), engines, extra=DRAFTING)
    yield model
    model.close()


def check(model, ranks, world, layout, exports, reshard=False, exchange=False):
    """A → B → A: scores, samples, drafts, and what is drafted with, are those of an engine on what ranks export."""
    kind = SharesAndTrainsDraft if exchange else TrainsDraft
    with MegatronRanks(ranks, model.folders["A"], world, layout, BUCKET_BYTES, kind=kind) as trainer:
        synchronizer = model.synchronizer(trainer, reshard=reshard, exchange=exchange)
        for number, name in enumerate("ABA"):
            trainer.together("load", model.folders[name])
            report = model.loop(synchronizer.sync(f"{name}{number}"), 250)
            assert not report.failures and (synchronizer.plan is not None) == reshard
            assert report.logprob_diffs["engine 0"].largest <= 1e-4
            trainer.together("export", exports / f"{name}{number}")
            assert digest(exports / f"{name}{number}") == digest(model.folders[name])
            found = model.answers(model.pool)
            assert found == model.fresh_answers(exports / f"{name}{number}")
            assert found[-1][0][1] == [True, True]
    one, other = (fresh[-1][0][0] for fresh in model.fresh.values())
    alike = [name for name in one if one[name] == other[name]]
    assert alike == [], "A and B are to differ in all that is drafted with"


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "way",
    [{}, dict(reshard=True), dict(reshard=True, exchange=True)],
    ids=["in buckets for all", "by reshard plan", "exchanged"],
)
def test_what_is_drafted_with_is_that_of_a_fresh_engine(ranks, deepseek, tmp_path, way):
    check(deepseek, ranks, 2, dict(pp=2), tmp_path, **way)


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type, world, layout", [("glm4_moe", 2, dict(tp=2)), ("glm4_moe_lite", 2, dict(ep=2))])
def test_families(ranks, engines, tmp_path, model_type, world, layout):
    model = Drafting(seeds(tmp_path, model_type), engines, extra=DRAFTING)
    try:
        check(model, ranks, world, layout, tmp_path)
    finally:
        model.close()


@pytest.mark.full_matrix
@pytest.mark.parametrize("reshard", [False, True], ids=["in buckets for all", "by reshard plan"])
def test_what_is_not_trained_stays_and_shares_what_came(ranks, deepseek, reshard):
    """Ranks without the layer send none of it: the engine drafts with the one that it was started with, which reads
    the embedding and the output layer that came."""
    model = deepseek
    with MegatronRanks(ranks, model.folders["A"], 2, dict(tp=2), BUCKET_BYTES) as trainer:
        synchronizer = model.synchronizer(trainer, reshard=reshard, draft=False)
        for name in "AB":
            trainer.together("load", model.folders[name])
            model.loop(synchronizer.sync(f"{name} alone"), 250)
            scores, *_, ((weights, same),) = model.answers(model.pool)
            assert scores == model.fresh_answers(model.folders[name])[0] and same == [True, True]
            started_with = model.fresh_answers(model.folders["A"])[-1][0][0]
            differing = {key for key in weights if weights[key] != started_with[key]}
            assert differing == ({"model.embed_tokens.weight", HEAD} if name == "B" else set())


@pytest.mark.full_matrix
@pytest.mark.parametrize("reshard", [False, True], ids=["in buckets for all", "by reshard plan"])
def test_an_engine_that_does_not_draft_leaves_it(ranks, engines, deepseek, tmp_path, reshard):
    model = Model(deepseek.folders, engines)
    try:
        with MegatronRanks(ranks, model.folders["A"], 2, dict(pp=2), BUCKET_BYTES, kind=TrainsDraft) as trainer:
            synchronizer = model.synchronizer(trainer, reshard=reshard)
            synchronizer.draft = True
            trainer.together("load", model.folders["B"])
            model.loop(synchronizer.sync("B"), 250)
            assert (synchronizer.plan is not None) == reshard
            assert model.answers(model.pool) == model.fresh_answers(model.folders["B"])
    finally:
        model.close()


@pytest.mark.full_matrix
def test_drafted_tokens_are_sampled_as_others_are(loop, tmp_path):
    """Log-probs of accepted and of recovered tokens are transformers', at each request's temperature; and drafts are
    counted: every step brings a token, and one more if its draft is accepted. Of few tokens, so that some are."""
    from prometheus_client import REGISTRY

    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from tests.support.engines import tiny_settings

    folder = last_as_draft(write_tiny_model("deepseek_v3", tmp_path, num_hidden_layers=LAYERS + 1, vocab_size=32))
    prompt = [token % 29 + 3 for token in TOKENS[:20]]
    engine = VLLMEngine(tiny_settings(folder, extra=DRAFTING | {"disable_log_stats": False}))
    loop(engine.start(), 590)
    try:
        for temperature in (0.3, 1.0):
            sampling = SAMPLING | {"max_tokens": 200, "temperature": temperature}
            first, again = (loop(engine.generate(f"{n} {temperature}", prompt, sampling)) for n in "12")
            assert first.token_ids == again.token_ids
            expected = reference_logprobs(folder, prompt + first.token_ids, temperature)[19:]
            assert largest_gap(first.logprobs, expected) <= 1e-5
        found = {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples}
        steps, accepted = (found[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
        print(f"{accepted:g} of {steps:g} drafts accepted")
        assert accepted > 0 and 0 <= 4 * 200 - 4 - (steps + accepted) <= 4
    finally:
        loop(engine.shutdown())
