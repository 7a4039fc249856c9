"""``trainer.exact_rollouts``: engine and trainer compute each token's log-prob with the same bits."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import LoopThread, tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.process]
SHARED = [(11 * i + 5 * i * i) % 400 + 5 for i in range(150)]
PROMPTS = [[*SHARED[: 5 + 17 * i % 140], 20 + i] for i in range(24)]
TEMPERATURE = 0.7


def sampling(i):
    return {"max_tokens": 20 + i, "temperature": TEMPERATURE, "seed": i, "ignore_eos": True}


@contextlib.contextmanager
def engine_of(folder, **changes):
    """A function that samples requests (id, prompt, sampling) at once, by an engine with small chunks of prompts."""
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    loop = LoopThread()
    engine = VLLMEngine(tiny_settings(folder, **{"max_num_batched_tokens": 96, "max_num_seqs": 32} | changes))

    async def ask(requests):
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    try:
        loop(engine.start(), 590)
        yield lambda requests: loop(ask(requests))
    finally:
        loop(engine.shutdown())
        loop.close()


def sampled(folder, **changes):
    """Samples of all prompts at once, and of a few alone. Prompts are cut into chunks and share cached prefixes."""
    with engine_of(folder, **changes) as ask:
        together = ask([(f"r{i}", prompt, sampling(i)) for i, prompt in enumerate(PROMPTS)])
        return together, {i: ask([(f"alone {i}", PROMPTS[i], sampling(i))])[0] for i in (0, 7, 23)}


def rows_to_score(rows, counts):
    """A batch whose responses are the last ``counts`` tokens of each row."""
    import numpy as np
    import torch

    from skyrl_megatron.types import TrainingBatch

    tokens, ones = torch.tensor([token for row in rows for token in row]), torch.ones(sum(counts), dtype=torch.bool)
    return TrainingBatch(tokens.int(), np.array([len(row) for row in rows]), np.array(counts), ones, ones)


def scored(folder, rows, counts, overrides, **layout):
    """The trainer's log-probs of the last ``counts`` tokens of each row."""
    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.training.bodies import config

    try:
        trainer = MegatronEngine(config(folder, overrides=overrides, **layout))
        found = trainer.compute_logprobs(rows_to_score(rows, counts), temperature=TEMPERATURE)
        return [row.tolist() for row in found.split(counts)]
    finally:
        exact_ops.use(False)


PACKED = {"trainer.max_tokens_per_microbatch": 700}


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "qwen3_moe", "glm4_moe"),
        *(pytest.param(each, marks=pytest.mark.full_matrix) for each in ("llama", "qwen2", "mixtral", "hy_v3")),
    ],
)
def test_log_probs_have_the_same_bits(ranks, tmp_path, family):
    """In any batch of the engine and in any packs of the trainer; without the setting they differ."""
    folder = write_tiny_model(family, tmp_path)
    together, alone = sampled(folder, exact=True)
    for i, sample in alone.items():
        assert (sample.token_ids, sample.logprobs) == (together[i].token_ids, together[i].logprobs)
    rows = [prompt + list(sample.token_ids) for prompt, sample in zip(PROMPTS, together, strict=True)]
    counts = [len(sample.token_ids) for sample in together]
    engine = [list(sample.logprobs) for sample in together]
    exact = {"trainer.exact_rollouts": True}
    for overrides in (exact, exact | PACKED):
        assert ranks(1, scored, folder, rows, counts, overrides)[0] == engine
    assert ranks(1, scored, folder, rows, counts, {})[0] != engine


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    ("family", "engine"),
    [("qwen3", 1), ("qwen3", 2), ("qwen2", 1), ("qwen3_moe", 1), ("glm4_moe", 1)],
)
def test_two_ranks_share_each_tensor(ranks, tmp_path, family, engine):
    """Tensor parallelism of the trainer, and of both sides. A trainer of one rank differs."""
    folder = write_tiny_model(family, tmp_path)
    overrides = {"trainer.exact_rollouts": True} | PACKED
    samples, _ = sampled(folder, exact=True, exact_parts=2 // engine, tensor_parallel_size=engine)
    rows = [prompt + list(sample.token_ids) for prompt, sample in zip(PROMPTS, samples, strict=True)]
    counts = [len(sample.token_ids) for sample in samples]
    same = [list(sample.logprobs) for sample in samples]
    assert ranks(2, split, folder, rows, counts, overrides) == [same] * 2
    assert ranks(1, scored, folder, rows, counts, overrides)[0] != same


def split(*arguments):
    return scored(*arguments, world=2, tp=2)


def scored_in_any_packs(folder, samples):
    """Compare the trainer's log-probs of any of ``samples``, (prompt, tokens, log-probs) each, in any packs."""
    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.training.bodies import config

    trainer = MegatronEngine(config(folder, overrides={"trainer.exact_rollouts": True}))

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(
        st.lists(st.sampled_from(samples), min_size=1, max_size=12, unique_by=str),
        st.sampled_from([-1, 200, 333, 1000, 4000]),
    )
    def equal(chosen, most):
        trainer.cfg.trainer.max_tokens_per_microbatch = most
        rows, counts = [prompt + tokens for prompt, tokens, _ in chosen], [len(tokens) for _, tokens, _ in chosen]
        found = trainer.compute_logprobs(rows_to_score(rows, counts), temperature=TEMPERATURE)
        assert [row.tolist() for row in found.split(counts)] == [one[2] for one in chosen]

    try:
        equal()
    finally:
        exact_ops.use(False)


REQUESTS = st.tuples(st.sampled_from([1, 20, 47, 90, 149]), st.integers(20, 22), st.integers(0, 1))
"""The tokens of the shared prefix, a token of its own, the seed."""


@pytest.mark.full_matrix
@pytest.mark.parametrize(("chunk", "cached"), [(48, True), (200, False)])
@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_any_mix_of_requests_and_any_packs(ranks, tmp_path, family, chunk, cached):
    """A request samples the same beside any others, and the trainer computes the same log-probs in any packs."""
    folder, known, mixes = write_tiny_model(family, tmp_path), {}, []
    with engine_of(folder, exact=True, max_num_batched_tokens=chunk, enable_prefix_caching=cached) as ask:

        @settings(max_examples=15, deadline=None, database=None, derandomize=True)
        @given(st.lists(REQUESTS, min_size=1, max_size=16, unique=True))
        def equal(mix):
            mixes.append(mix)
            wanted = [
                (f"{len(mixes)} {each}", [*SHARED[: each[0]], each[1]], sampling(3) | {"seed": each[2]})
                for each in mix
            ]
            for each, sample in zip(mix, ask(wanted), strict=True):
                found = [*SHARED[: each[0]], each[1]], list(sample.token_ids), list(sample.logprobs)
                assert known.setdefault(each, found) == found

        equal()
    assert sum(map(len, mixes)) > len(known) > 20
    ranks(1, scored_in_any_packs, folder, list(known.values()))
