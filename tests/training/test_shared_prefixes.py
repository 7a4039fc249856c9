"""Prefixes that rows share are computed once (``trainer.share_prefixes``), and everything is what separate rows give."""

import contextlib

import numpy as np
import pytest

from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

SHARED = {"trainer.share_prefixes": "always", "trainer.max_tokens_per_microbatch": 160}
LAYOUTS = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2": dict(world=2, pp=2),
    "ep2": dict(world=2, ep=2),
    "cp2": dict(world=2, cp=2),
    "dp2": dict(world=2),
}
MORE = {
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "pp2·cp2·ep2": dict(world=4, pp=2, cp=2, ep=2),
}
NOT_EVERY_TIME = ("pp2", "ep2", "dp2")


def branching_batch(vocab_size, seed=0):
    """Rows of a prompt, with branches inside answers, a row that begins another, a copy of a row, and one alone."""
    import torch

    from skyrl_megatron.types import RowSpans, TrainingBatch

    rng = np.random.default_rng(seed)

    def text(length):
        return rng.integers(0, vocab_size, length).tolist()

    prompt, first = text(11), text(9)
    rows = [
        (prompt, first),
        (prompt, first[:4] + text(5)),
        (prompt, first[:4] + text(3)),
        (prompt, first[:6]),  # begins the first row's answer
        (prompt, text(6)),
        (prompt, first),  # a copy
        (prompt + first[:5], text(4)),  # its context is what another row answered
        (text(5), text(8)),
    ]
    responses = RowSpans(np.array([len(answer) for _, answer in rows]))
    tokens = [token for question, answer in rows for token in question + answer]
    mask = torch.ones(responses.size, dtype=torch.bool)
    trained = mask.clone()
    trained[responses.of(0)][3:5] = False
    lengths = np.array([len(question) + len(answer) for question, answer in rows])
    batch = TrainingBatch(torch.tensor(tokens, dtype=torch.int32), lengths, responses.lengths, mask, trained)
    batch.uids = [f"prompt-{row // 2}" for row in range(len(rows))]
    batch.advantages = torch.from_numpy(rng.standard_normal(responses.size)).float()
    return batch


@contextlib.contextmanager
def sharing(short=1):
    """Share also short prefixes; the list of the trees that a pack was made of, which must not stay empty."""
    from unittest import mock

    from skyrl_megatron.data import prefixes

    made, of = [], prefixes.PrefixTree.of

    def seen(*arguments):
        made.append(of(*arguments))
        return made[-1]

    with mock.patch.object(prefixes, "SHORT", short), mock.patch.object(prefixes.PrefixTree, "of", seen):
        yield made
    assert any(not tree.is_flat for tree in made), "no prefix was shared"


def three_steps(*arguments):
    with sharing():
        return bodies.three_steps(*arguments)


@pytest.fixture(scope="module")
def branching(folder):
    batch = branching_batch(1003)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))


@pytest.fixture(scope="module")
def expected(folder, branching, tmp_path_factory):
    return reference.policy_gradient_step(folder, branching, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full_matrix] if name in MORE or name in NOT_EVERY_TIME else [])
        for name in LAYOUTS | MORE
    ],
)
def test_every_layout(ranks, folder, branching, expected, name):
    """Three steps are those of transformers, where each row runs alone."""
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], three_steps, folder, branching, expected, layout, NO_DISTRIBUTED | SHARED)
    bodies.check(outcomes, expected)
