"""What shared prefixes save on paper: tokens by hand, passes and activations that shrink, and when nothing does."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.released_models import QWEN3_30B_A3B

RECIPE = Path(__file__).resolve().parents[2] / "launch" / "recipes" / "qwen3-30b-a3b.yaml"
LAYERS = "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl"
GROUPS = [
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.max_prompt_length=1024",
    "trainer.max_tokens_per_microbatch=8192",
    "generator.n_samples_per_prompt=4",
    "generator.sampling_params.max_generate_length=256",
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The estimate of a run on eight H100, 16 prompts of 512 tokens with 4 samples of 128 tokens on average."""
    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable
    from skyrl_megatron_observe.estimate.step_report import RunEstimate

    table = ParameterTable(Plan.of(QWEN3_30B_A3B))

    def make(*changes):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        given = dict(
            word.split("=", 1) for word in [*GROUPS, f"{LAYERS}=local", "trainer.share_prefixes=always", *changes]
        )
        argv = ["--config", str(RECIPE), f"trainer.policy.model.path={folder}"]
        cfg, problems = parse(SkyRLTrainConfig, argv + [f"{key}={value}" for key, value in given.items()])
        assert not problems
        hardware = Hardware(8, 1, gpu="H100", gpu_bytes=80 * 10**9, elsewhere=True)
        return RunEstimate.of(cfg, {"policy": table, "ref": table}, hardware)

    return make


def rows_of(estimate, prompts, lengths, micro=1):
    from skyrl_megatron_observe.estimate.shared_tokens import pass_rows
    from skyrl_megatron_observe.estimate.step_time import _Role

    model = estimate.models["policy"]
    return pass_rows(model, _Role(model, estimate.machine).flops, np.asarray(prompts), np.asarray(lengths), micro)


def test_a_prompt_counts_once_for_its_samples(planned):
    found = rows_of(planned(), [100] * 64, [160] * 64)
    assert found.before.tolist() == [0, 100, 100, 100] * 16
    assert found.saved == 4800 / (64 * 160) and found.tokens == 16 * (100 + 4 * 60)


@pytest.mark.parametrize(
    ("changes", "micro", "before"),
    [
        (["trainer.max_tokens_per_microbatch=280"], 1, [0, 100, 100, 0]),  # 100 + 3 · 60 tokens, and the fourth apart
        (["trainer.max_tokens_per_microbatch=-1", "trainer.micro_train_batch_size_per_gpu=2"], 2, [0, 100, 0, 100]),
    ],
)
def test_a_cut_between_micro_batches_computes_it_again(planned, changes, micro, before):
    assert rows_of(planned(*changes), [100] * 64, [160] * 64, micro).before.tolist() == before * 16


def test_replicas_cut_what_is_one_prompts(planned):
    """Two prompts for eight replicas: each of their rows is on a replica of its own."""
    found = rows_of(planned(), [100] * 8, [160] * 8)
    assert found.before.tolist() == [0] * 8


def test_queries_of_an_answer_see_all_keys_before_them(planned):
    """FLOPs of the tree, counted query by query."""
    from skyrl_megatron.runtime.flops import ModelFlops

    found = rows_of(planned(), [100] * 64, [160] * 64)
    once, answers = sum(range(1, 101)), 4 * sum(range(101, 161))
    assert found.flops(ModelFlops(3.0, 0.0, 0.0, 0)).sum() == 3 * found.tokens
    pairs = ModelFlops(0.0, 1.0, 0.0, 0)
    assert found.flops(pairs).sum() / pairs.forward(np.array([1])).sum() == 16 * (once + answers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["trainer.share_prefixes=never"], "trainer.share_prefixes=never"),
        (["trainer.share_prefixes=auto"], "not measured yet: set trainer.share_prefixes=always"),
        (["trainer.max_tokens_per_microbatch=-1"], "set trainer.max_tokens_per_microbatch"),
    ],
)
def test_why_each_row_is_computed_by_itself(planned, changes, words):
    estimate = planned(*changes)
    [line] = estimate.shared()
    assert line.startswith("shared prefixes: none") and words in line
    assert not rows_of(estimate, [100] * 64, [160] * 64).before.any()
    assert estimate.without_sharing().step == estimate.step.step


def test_too_little_is_not_shared(planned):
    """30 of 400 tokens in the mean, which is under a tenth, unless all is wanted."""
    from skyrl_megatron_observe.estimate.memory_activations import Kernels

    prompts, lengths = [40] * 64, [400] * 64
    assert rows_of(planned(), prompts, lengths).before.sum() == 48 * 40
    estimate = planned("trainer.share_prefixes=auto")
    estimate.models["policy"] = dataclasses.replace(estimate.models["policy"], kernels=Kernels(4, False, on_cpu=True))
    assert not rows_of(estimate, prompts, lengths).before.any()
    assert rows_of(estimate, [100] * 64, [160] * 64).before.any()


def test_one_sample_says_nothing(planned):
    assert not list(planned("generator.n_samples_per_prompt=1", "trainer.train_batch_size=64").shared())


def test_check_says_what_it_saves(planned):
    """Tokens by hand: 64 rows of 512 + 128 tokens, of which the prompt counts 16 times."""
    from skyrl_megatron_observe.estimate.step_time import SCORE, TRAIN

    estimate = planned()
    [line] = estimate.shared()
    share = 48 * 512 / (64 * 512 + estimate.lengths.responses.sum())
    assert f"{share:.0%} of the tokens of an update are computed once for several rows (always)" in line
    never, policy = estimate.without_sharing(), estimate.models["policy"]
    for phase in (SCORE, TRAIN):
        ratio = estimate.step.phase(phase).likely / never.phase(phase).likely
        assert 1 - share - 0.05 < ratio < 1, (phase, ratio)
    forward = [next(term for term in step.terms if term.name == "forward") for step in (estimate.step, never)]
    assert "tokens are shared" in forward[0].note and not forward[1].note
    assert policy.training(0, 4 * 640) > policy.training(0, 512 + 4 * 128)
