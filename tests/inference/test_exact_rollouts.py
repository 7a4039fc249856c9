"""``trainer.exact_rollouts``: engine and trainer compute each token's log-prob with the same bits."""

import asyncio

import pytest

from tests.support.engines import LoopThread, tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.process]
SHARED = [(11 * i + 5 * i * i) % 400 + 5 for i in range(150)]
PROMPTS = [[*SHARED[: 5 + 17 * i % 140], 20 + i] for i in range(24)]
TEMPERATURE = 0.7


def sampling(i):
    return {"max_tokens": 20 + i, "temperature": TEMPERATURE, "seed": i, "ignore_eos": True}


def sampled(folder, **settings):
    """Samples of all prompts at once, and of a few alone. Prompts are cut into chunks and share cached prefixes."""
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    loop = LoopThread()
    engine = VLLMEngine(tiny_settings(folder, max_num_batched_tokens=96, max_num_seqs=32, **settings))
    try:
        loop(engine.start(), 590)

        async def ask():
            every = [engine.generate(f"r{i}", prompt, sampling(i)) for i, prompt in enumerate(PROMPTS)]
            return await asyncio.gather(*every)

        together = loop(ask())
        return together, {i: loop(engine.generate(f"alone {i}", PROMPTS[i], sampling(i))) for i in (0, 7, 23)}
    finally:
        loop(engine.shutdown())
        loop.close()


def scored(folder, rows, counts, overrides):
    """The trainer's log-probs of the last ``counts`` tokens of each row, and the gradient of their sum."""
    import torch

    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch
    from tests.training.bodies import config

    longest, most = max(map(len, rows)), max(counts)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask, response = torch.zeros(len(rows), longest, dtype=torch.bool), torch.zeros(len(rows), most)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tokens[i, -len(row) :], mask[i, -len(row) :], response[i, -count:] = torch.tensor(row), True, 1.0
    try:
        trainer = MegatronEngine(config(folder, overrides=overrides))
        found = trainer.compute_logprobs(TrainingBatch(tokens, mask, response, response), temperature=TEMPERATURE)
        return [found[i, -count:].tolist() for i, count in enumerate(counts)]
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
