"""Adapters that travel alone from real Megatron ranks to real engines: what these serve, and what happens when an
update goes wrong."""

from __future__ import annotations

import os
import signal
import statistics
from itertools import pairwise

import pytest

from tests.lora.adapter_ranks import adapted, ranks_with_adapters, synchronizer
from tests.support.engines import largest_gap, reference_logprobs, tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
SAMPLING = {"max_tokens": 96, "temperature": 1.0, "ignore_eos": True}
EXACT = 1e-5
"""Nats: how far an engine with an adapter may be from the merged model."""
LAYOUT = dict(world=2, tp=2, ep=2)
SWAPS = 14
GROWTH = 256 << 10
"""Bytes that a worker may grow by with most swaps of the second half: one adapter is as large as the base, 2.6 MB.
Memory that a process takes once, for a batch of a new shape, comes in steps of 3 MB."""


@pytest.fixture(scope="module")
def pool(engines, folder):
    """Two engines: one worker, and two."""
    with engines.pool(adapted(folder), adapted(folder, tensor_parallel_size=2), wait_s=20) as pool:
        yield pool


@pytest.fixture
def trainer(ranks, folder):  # of each test: the pool of ranks ends one that lasts longer than it allows a body to
    with ranks_with_adapters(ranks, folder, LAYOUT, timeout_s=480.0) as trainer:  # all swaps, beside other work
        yield trainer


@pytest.fixture
def trained(trainer, pool, loop, folder):
    """``trained(seed, version)`` gives the engines the adapter of a seed."""
    trainer.sync = synchronizer(pool, trainer, folder)

    def give(seed, version):
        trainer.together("adapt", seed)
        return loop(trainer.sync.sync(version), 400)

    give.trainer = trainer
    return give


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """``merged(trainer, seed)`` → scores of the model with the adapter merged, by transformers."""
    root, known = tmp_path_factory.mktemp("merged"), {}

    def scores(trainer, seed):
        if seed not in known:
            trainer.together("adapt", seed)
            trainer.together("export", root / str(seed))
            known[seed] = reference_logprobs(root / str(seed), TOKENS)
        return known[seed]

    return scores


def scores(pool, loop):
    return [loop(slot.engine.score(TOKENS)) for slot in pool.alive()]


def plant(pool, loop, fault):
    for slot in pool.slots:
        loop(slot.engine._llm.collective_rpc("plant", None, (fault,)))


def test_engines_with_adapters_equal_the_merged_model(pool, loop, trained, merged, folder):
    base = reference_logprobs(folder, TOKENS)
    for seed in (3, 4, 3):
        expected = merged(trained.trainer, seed)
        report = trained(seed, f"of seed {seed}")
        assert not report.failures and set(report.logprob_diffs) == {"engine 0", "engine 1"}
        assert trained.trainer.sync.plan is not None, "the factors did not travel by routes"
        for found in scores(pool, loop):
            assert largest_gap(found, expected) <= EXACT
        assert largest_gap(base, expected) > 100 * EXACT
        for slot in pool.slots:
            sample = loop(slot.engine.generate("one", TOKENS[:20], SAMPLING))
            assert sample.versions == [(f"of seed {seed}", 0, 96)]


def test_an_engine_of_merged_weights_agrees(engines, trained, pool, loop, folder, tmp_path):
    trained(5, "merged too")
    trained.trainer.together("export", tmp_path / "merged")
    with engines.pool(tiny_settings(tmp_path / "merged")) as other:
        expected = loop(other.slots[0].engine.score(TOKENS))
    for found in scores(pool, loop):
        assert largest_gap(found, expected) <= EXACT


def test_swaps_under_load_leave_nothing_stale(pool, loop, trained, merged):
    expected = {seed: merged(trained.trainer, seed) for seed in (3, 4)}
    trained.trainer.sync.probe_interval = 0
    grown = []
    for number in range(SWAPS):
        seed = 3 + number % 2
        running = [
            loop.start(slot.engine.generate(f"{number}.{each}", TOKENS[: 8 + each], SAMPLING | {"seed": each}))
            for slot in pool.slots
            for each in range(8)
        ]
        trained(seed, f"swap {number}")
        samples = [each.result(120) for each in running]
        for sample in samples:  # each is of one version from its first token to its last
            [(version, start, stop)] = sample.versions
            assert (start, stop) == (0, len(sample.token_ids)) == (0, 96)
            assert version in pool.published_before
        for found in scores(pool, loop):
            assert largest_gap(found, expected[seed]) <= EXACT, f"swap {number} is stale"
        for slot in pool.slots:
            held = loop(slot.engine._keep_adapters())
            assert all(len(numbers) <= slot.engine.settings.adapters.slots for numbers in held)
        memory = [size for slot in pool.slots for size in loop(slot.engine._llm.collective_rpc("memory"))]
        grown.append(memory)
    for sizes in zip(*grown, strict=True):
        by_swap = [after - before for before, after in pairwise(sizes)]
        assert statistics.median(by_swap[SWAPS // 2 :]) <= GROWTH, by_swap


def test_a_cached_prefix_belongs_to_its_version(pool, loop, trained):
    """The same prompt before and after a swap and a swap back."""
    greedy = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    answers = []
    for number, seed in enumerate((3, 4, 3)):
        trained(seed, f"prefix {number}")
        for _ in range(2):
            sample = loop(pool.slots[0].engine.generate("prefix", TOKENS, greedy))
            answers.append((sample.token_ids, sample.logprobs))
    assert answers[0][0] == answers[1][0] == answers[4][0] == answers[5][0]
    assert largest_gap(answers[0][1], answers[5][1]) <= EXACT
    assert answers[2] != answers[0] and answers[2][0] == answers[3][0]


def test_adapters_of_a_model_of_text_and_images(ranks, engines, loop, tmp_path):
    """They are for the language model, which vLLM names as a part of the whole."""
    base = write_tiny_model("qwen3_5_moe", tmp_path / "base")
    with engines.pool(adapted(base), wait_s=20) as pool, ranks_with_adapters(ranks, base, LAYOUT) as trainer:
        trainer.together("adapt", 3)
        trainer.together("export", tmp_path / "merged")
        report = loop(synchronizer(pool, trainer, base).sync("adapted"), 400)
        assert not report.failures
        (found,) = scores(pool, loop)
    expected, plain = (reference_logprobs(each, TOKENS) for each in (tmp_path / "merged", base))
    exact = reference_logprobs(tmp_path / "merged", TOKENS, dtype="float64")
    rounding = largest_gap(expected, exact)  # of delta nets in fp32, by transformers
    assert rounding < 100 * EXACT < largest_gap(found, plain)
    assert largest_gap(found, exact) <= EXACT + rounding


@pytest.mark.parametrize(
    "mistake, sent, worker, message",
    [
        ("a factor is missing", None, None, "1 factors are missing: model.layers.2.mlp.experts.down_proj.lora_B"),
        ("gate and up are swapped", None, None, "differ from the trainer's"),
        (None, "a byte flips on the way", None, "(checksums differ|differs from the sent one)"),
        (None, None, "fails to activate", "finish: .*out of slots, says the test"),
        (None, None, "activates nothing", "differ from the trainer's"),
        (None, None, "ignores experts", "differ from the trainer's"),
    ],
)
def test_after_a_failed_update_the_old_adapter_serves(pool, loop, trained, mistake, sent, worker, message):
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.inference.client import InferenceClient

    trained(3, "good")
    old = scores(pool, loop)
    trainer = trained.trainer
    trainer.sync = synchronizer(pool, trainer, trainer.folder, phase_s=8.0 if sent else 60.0)
    trainer.together("make", mistake)
    if sent is not None:
        trainer.together("weight_metadata")
        trainer.sync._connected = []
        original = trainer.handles[0].send_weights

        async def planted():
            await trainer.handles[0]("plant", sent)
            return await original()

        trainer.handles[0].send_weights = planted
    plant(pool, loop, worker)
    with pytest.raises(WeightSyncError, match=message) as caught:
        trained(6, "bad")  # never given before: a slot that is not filled still holds an older adapter
    assert "version bad is not published" in str(caught.value) or mistake == "a factor is missing"
    plant(pool, loop, None)
    assert pool.published == "good" and all(slot.state.value == "serving" for slot in pool.slots)
    assert all(largest_gap(*both) <= EXACT for both in zip(scores(pool, loop), old, strict=True))
    sample = loop(InferenceClient(pool).sample(TOKENS[:20], SAMPLING))
    assert sample.versions == [("good", 0, 96)]
    trainer.together("make", None)
    trainer.handles[0].__dict__.pop("send_weights", None)
    trainer.sync = synchronizer(pool, trainer, trainer.folder)
    assert not trained(4, "good again").failures


def test_a_killed_engine_gets_base_and_adapter_again(pool, loop, trained, merged):
    expected = merged(trained.trainer, 4)
    trained(3, "before")
    os.kill(pool.slots[1].engine.process_ids()[-1], signal.SIGKILL)
    report = trained(4, "after")
    assert report.failures and "engine 1" in report.failures[0]
    for found in scores(pool, loop):
        assert largest_gap(found, expected) <= EXACT
