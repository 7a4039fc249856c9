"""What an engine on CPU says that tokens were sampled from, against the definitions of top-p, top-k and min-p."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.inference.test_routes import RECORDS
from tests.support.engines import VOCABULARY, largest_gap, tiny_settings

PROMPT = [(11 * i + i * i) % 380 + 5 for i in range(9)]
TEMPERATURE = 0.7
SAMPLING = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 12},
    "min-p": {"min_p": 0.2},
    "all three": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
}


pytestmark = pytest.mark.engines("records")


@pytest.fixture(scope="module")
def model(tiny_moe):
    return tiny_moe["A"]


@pytest.fixture(scope="module")
def engine(engines, model):
    with engines.pool(tiny_settings(model, **RECORDS)) as pool:
        yield lambda work: engines.loop(work(pool.slots[0].engine))


@pytest.fixture(scope="module")
def logits_of(model):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")

    def logits(token_ids):
        with torch.no_grad():
            return reference(torch.tensor([token_ids])).logits[0].double()

    return logits


def left(logits, *, top_p=1.0, top_k=0, min_p=0.0):
    """(certain [V], possible [V]) bool: what a rule leaves of one distribution, but for rounding of 1e-5."""
    import torch

    p = (logits / TEMPERATURE).softmax(-1)
    kept = [torch.zeros_like(p, dtype=torch.bool)] * 2
    for which, slack in enumerate((-1e-5, 1e-5)):
        marked = p >= (min_p - slack) * p.max()
        if top_k:
            marked &= p >= p.topk(top_k).values[-1] * (1 - slack)
        rest = torch.where(marked, p, 0.0) / p[marked].sum()
        larger = (rest[None, :] * (rest[None, :] > rest[:, None])).sum(-1)  # mass of the likelier ones
        kept[which] = marked & (larger < top_p + slack)
    return kept


@pytest.mark.vllm
@pytest.mark.parametrize("rule", SAMPLING)
def test_tokens_come_with_what_they_were_sampled_from(engine, logits_of, rule):
    """Each support is the rule's, its token is in it, and the log-prob is that of the softmax over it."""
    import torch

    sampling = {"max_tokens": 24, "temperature": TEMPERATURE, "seed": 3, "ignore_eos": True} | SAMPLING[rule]
    sample = engine(lambda e: e.generate(rule, PROMPT, sampling))
    assert len(sample.support) == len(sample.token_ids) == 24
    assert sample.support.without(sample.token_ids) is None
    every = logits_of([*PROMPT, *sample.token_ids])[len(PROMPT) - 1 : -1]
    start, expected = 0, []
    for token, (logits, count) in enumerate(zip(every, sample.support.counts.tolist(), strict=True)):
        assert 0 < count < VOCABULARY
        found = torch.zeros(len(logits), dtype=torch.bool)
        found[sample.support.ids[start : start + count].astype("int64")] = True
        start += count
        certain, possible = left(logits, **SAMPLING[rule])
        assert not (certain & ~found).any() and not (found & ~possible).any(), (token, count)
        over = (logits / TEMPERATURE).masked_fill(~found, -torch.inf).log_softmax(-1)
        expected.append(over[sample.token_ids[token]].item())
    assert largest_gap(sample.logprobs, expected) <= 1e-5


LISTED = sorted({(7 * i + 3) % 380 + 5 for i in range(60)})
MASKS = {
    "allowed tokens": {"allowed_token_ids": LISTED},
    "allowed tokens and top-p": {"allowed_token_ids": LISTED, "top_p": 0.8},
    "no end token yet": {"min_tokens": 24, "stop_token_ids": [7, 9], "ignore_eos": False},
    "a grammar": {"structured_outputs": {"regex": "[0-9]{40}"}},
}


@pytest.mark.vllm
@pytest.mark.parametrize("mask", MASKS)
def test_whatever_excludes_tokens_is_in_the_support(engine, logits_of, mask):
    """Masks of other parameters than top-p, top-k, min-p: the log-prob is of the softmax over what they leave."""
    import torch

    sampling = {"max_tokens": 24, "temperature": TEMPERATURE, "seed": 3, "ignore_eos": True} | MASKS[mask]
    sample = engine(lambda e: e.generate(mask, PROMPT, sampling))
    assert len(sample.support) == len(sample.token_ids) == 24
    every = logits_of([*PROMPT, *sample.token_ids])[len(PROMPT) - 1 : -1]
    start, expected = 0, []
    for token, (logits, count) in enumerate(zip(every, sample.support.counts.tolist(), strict=True)):
        ids = sample.support.ids[start : start + count].astype("int64")
        start += count
        left_out = torch.ones(len(logits), dtype=torch.bool)
        left_out[ids] = False
        if "allowed" in mask:
            assert set(ids.tolist()) <= set(LISTED)
        if mask == "allowed tokens":
            assert ids.tolist() == LISTED
        if mask == "no end token yet":
            assert {7, 9} <= set(left_out.nonzero()[:, 0].tolist()) and count >= VOCABULARY - 4
        if mask == "a grammar":
            assert 0 < count < 100
        over = (logits / TEMPERATURE).masked_fill(left_out, -torch.inf).log_softmax(-1)
        expected.append(over[sample.token_ids[token]].item())
    assert largest_gap(sample.logprobs, expected) <= 1e-5


def trainer_logprobs(folder, batch):
    """Log-probs of this rank's Megatron, tp2."""
    from tests.training.bodies import config

    layout = {"world": 2, "tp": 2, "overrides": {"trainer.algorithm.temperature": TEMPERATURE}}
    from skyrl_megatron.runtime.engine import MegatronEngine

    return MegatronEngine(config(folder, **layout)).compute_logprobs(batch)


@pytest.mark.vllm
def test_the_trainer_agrees_over_it(engine, ranks, model):
    """Sampled by vLLM, scored by Megatron over two ranks: equal over the support, log S apart without it."""
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.inference.protocol import SampleRequest

    sampling = {"max_tokens": 16, "temperature": TEMPERATURE, "top_p": 0.7, "ignore_eos": True}
    requests = [SampleRequest(f"agree {i}", [*PROMPT, 7 + i], sampling | {"seed": i}) for i in range(6)]
    samples = engine(lambda e: e.generate_batch(requests))
    batch = collate(
        [request.prompt_token_ids for request in requests],
        [sample.token_ids for sample in samples],
        uids=[request.request_id for request in requests],
        rewards=[0.0] * 6,
        rollout_logprobs=[sample.logprobs for sample in samples],
        rollout_support=[sample.support for sample in samples],
    )
    for logprobs in ranks(2, trainer_logprobs, model, batch):
        assert (logprobs - batch.rollout_logprobs).abs().max() <= 1e-4
    batch.rollout_support = []
    for logprobs in ranks(2, trainer_logprobs, model, batch):
        assert (batch.rollout_logprobs - logprobs).max() > 0.2


@pytest.mark.vllm
def test_requests_that_leave_nothing_out(engine, logits_of):
    """A greedy request is served, though vLLM refuses them; one without a rule has no support."""
    greedy = engine(lambda e: e.generate("greedy", PROMPT, {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}))
    every = logits_of([*PROMPT, *greedy.token_ids])[len(PROMPT) - 1 : -1]
    assert greedy.token_ids == every.argmax(-1).tolist() and greedy.support.counts.tolist() == [1] * 6
    free = engine(lambda e: e.generate("free", PROMPT, {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}))
    assert free.support.counts.tolist() == [0] * 6
    over = logits_of([*PROMPT, *free.token_ids])[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert largest_gap(free.logprobs, [over[i, t].item() for i, t in enumerate(free.token_ids)]) <= 1e-5
    scores = engine(lambda e: e.score(PROMPT))
    over = logits_of(PROMPT).log_softmax(-1)
    assert largest_gap(scores, [over[i, t].item() for i, t in enumerate(PROMPT[1:])]) <= 1e-5


@pytest.mark.process
@pytest.mark.vllm
def test_model_runner_v2_says_the_same(model):
    """On the same logits, its own mask (kernels interpreted) holds what is found here in processed log-probs."""
    command = [sys.executable, "-m", "tests.inference.v2_sampler", str(model), "support"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["theirs"] == found["ours"]
    sizes = [len(each) for each in found["ours"]]
    assert sizes[1] == 3 and all(0 < size < 400 for size in sizes[:3]), sizes
