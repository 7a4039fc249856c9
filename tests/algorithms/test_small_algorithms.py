"""GDPO, RAE, length penalties and MLPerf's sequence masks against recorded numbers of plain Python; and the estimators
on negative, zero and constant rewards."""

import json

import numpy as np
import pytest

from skyrl_megatron.errors import AlgorithmError, ConfigError
from tests.algorithms import plain_forms
from tests.algorithms.vectors import algorithm_config, tensor

CASES = json.loads(plain_forms.PATH.read_text())


def numbers(value):
    """All numbers of nested lists and mappings, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    return [number for each in value for number in numbers(each)] if isinstance(value, list) else [float(value)]


def test_the_file_is_what_the_plain_forms_make():
    for recorded, made in zip(CASES, plain_forms.cases(), strict=True):
        for name, expected in recorded["expected"].items():
            assert numbers(made["expected"][name]) == pytest.approx(numbers(expected), rel=1e-12, abs=1e-12)


@pytest.fixture(params=CASES, ids=[case["kind"] for case in CASES])
def case(request):
    return request.param


def token_rewards(case):
    """Rewards [B, T] whose sums are the scores, with a mask of the right-aligned responses."""
    import torch

    mask = tensor(case["mask"]).flip(1)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = tensor(case["scores"])
    return rewards, mask


def advantages(case, name, **more):
    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    rewards, mask = token_rewards(case)
    names = dict(zip(("right", "short"), case["weights"], strict=True))
    config = algorithm_config(advantage_estimator=name, gdpo_weights=names, rae_decay=0.95)
    found, _ = compute_advantages_and_returns(rewards, mask, case["uids"], name, config, loss_mask=mask, **more)
    assert (found[mask == 0] == 0).all()
    return found[:, -1]


def test_gdpo(case):
    found = advantages(case, "gdpo", reward_parts=tensor(case["parts"]))
    assert found.tolist() == pytest.approx(case["expected"]["gdpo"], rel=1e-9, abs=1e-9)


def test_gdpo_tells_combinations_apart_that_grpo_does_not():
    """Its paper's example: (0, 1) and (1, 0) have the same sum, but the second reward is rarer."""
    case = {
        "uids": ["a"] * 4,
        "parts": [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
        "scores": [1.0, 1.0, 1.0, 0.0],
        "mask": [[1]] * 4,
        "weights": [1.0, 1.0],
    }
    by_sum, each = advantages(case, "grpo"), advantages(case, "gdpo", reward_parts=tensor(case["parts"]))
    assert by_sum[0] == by_sum[1] and each[0] > each[1] + 0.1 > each[3]


def test_gdpo_leaves_out_rows_that_are_not_trained():
    import torch

    from skyrl_megatron.algorithms.gdpo import gdpo_scores

    parts, trained = tensor([[0.0], [1.0], [0.5], [99.0]]), torch.tensor([True, True, True, False])
    found = gdpo_scores(parts, tensor([1.0]), ["a", "a", "a", "failed"], trained)
    alone = gdpo_scores(parts[:3], tensor([1.0]), ["a", "a", "a"])
    assert found.tolist() == [*alone.tolist(), 0.0]


def test_gdpo_refuses_rewards_that_do_not_match():
    case = CASES[0]
    for parts in (None, tensor(case["parts"])[:, :1]):
        with pytest.raises(AlgorithmError, match="gdpo needs reward_parts"):
            advantages(case, "gdpo", reward_parts=parts)


def test_gdpo_names_the_metric_that_an_environment_lacks():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.outputs import reward_parts

    output = {"response_ids": [[1], [2]], "env_metrics": [{"right": 1.0}, {}], "errors": [None, "failed"]}
    assert reward_parts(output, ["right"]).tolist() == [[1.0], [0.0]]
    with pytest.raises(DataError, match=r"short=None, not a finite number.*which has right"):
        reward_parts(output, ["right", "short"])


def test_rae(case):
    means = {"first": 0.25}
    found = advantages(case, "rae", roles=case["roles"], baselines=means)
    assert found.tolist() == pytest.approx(case["expected"]["rae"], rel=1e-12, abs=1e-12)
    assert means == pytest.approx(case["expected"]["rae_means"], rel=1e-12)


def test_rae_in_two_batches_is_rae_in_one():
    from skyrl_megatron.algorithms.role_baselines import rae_scores

    scores, roles, whole, cut = tensor([1.0, -1.0, 0.5, 0.0]), ["x", "y", "x", "y"], {}, {}
    together = rae_scores(scores, roles, whole, 0.9)
    parts = [rae_scores(scores[at], roles[at], cut, 0.9) for at in (slice(0, 1), slice(1, 4))]
    assert together.tolist() == [value for part in parts for value in part.tolist()] and whole == cut
    with pytest.raises(AlgorithmError, match="rae needs roles"):
        advantages(CASES[0], "rae")


def test_length_penalties(case):
    from skyrl_megatron.algorithms.length_penalty import LengthPenalty

    given = tensor(case["lengths"]), tensor(case["scores"]), case["uids"]
    overlong = LengthPenalty.of({"type": "overlong", "max_length": 10, "buffer": 4, "coef": 2.0})
    assert (overlong.penalties(*given) / 2).tolist() == pytest.approx(case["expected"]["overlong"], abs=1e-12)
    relative = LengthPenalty.of({"type": "relative", "coef": 0.5})
    assert (-2 * relative.penalties(*given)).tolist() == pytest.approx(case["expected"]["relative"], abs=1e-12)


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        ({"type": "overlong", "buffer": 4}, "max_length", "overlong needs it"),
        ({"type": "overlong", "buffer": 12, "max_length": 10}, "buffer", "must be at most max_length=10"),
        ({"type": "relative", "buffer": 4}, "buffer", "only overlong has it"),
        ({"type": "short"}, "type", "one of overlong, relative"),
        ({"type": "relative", "coef": -1}, "coef", "above 0"),
    ],
)
def test_penalties_that_cannot_be(given, key, says):
    from skyrl_megatron.algorithms.length_penalty import LengthPenalty

    with pytest.raises(ConfigError, match=rf"length_penalty\.{key}=.*{says}"):
        LengthPenalty.of(given)
    assert LengthPenalty.of({}) is None


def test_a_penalty_changes_rewards_before_advantages():
    from skyrl_megatron.algorithms.length_penalty import LengthPenalty
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.trainer.step_batch import with_length_penalty

    batch = collate(
        [[1]] * 3,
        [[5, 6, 7, 8], [5, 6], [5]],
        uids=["a"] * 3,
        rewards=[1.0, 1.0, 0.0],
        loss_masks=[[1] * 4, [1] * 2, [0]],
    )
    metrics = with_length_penalty(batch, LengthPenalty.of({"type": "relative"}))
    assert batch.padded().rewards.sum(1).tolist() == [0.5, 1.5, 0.0]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 1.5, 0.0], "on the last token of each"
    assert metrics == {"loss/avg_length_penalty": 0.0}


def test_sequence_masks_of_mlperf(case):
    """Geometric mean of r within 0.999 … 1.002, each token weighted by r; sequences of a large mean error dropped."""
    from skyrl_megatron.algorithms.off_policy import correct

    old, rollout, mask = tensor(case["old"]), tensor(case["rollout"]), tensor(case["mask"])
    correction = {
        "off_policy_correction__sequence_mask_metric": "geometric",
        "off_policy_correction__geo_mask_low": 0.999,
        "off_policy_correction__geo_mask_high": 1.002,
        "off_policy_correction__tis_ratio_type": "token",
        "off_policy_correction__token_tis_ratio_clip_high": 1e6,
    }
    found = correct(old, rollout, mask, algorithm_config(**correction).off_policy_correction)
    assert (found.mask.sum(1) > 0).tolist() == case["expected"]["seq_mask_kept"]
    expected = tensor(case["expected"]["seq_mask_weights"])
    assert ((found.weight - expected) * mask).abs().max() <= 1e-12 * expected.max()
    dropped = correct(
        old, rollout, mask, algorithm_config(off_policy_correction__sequence_error_high=1.5).off_policy_correction
    )
    assert (dropped.mask.sum(1) > 0).tolist() == case["expected"]["error_kept"]
    share = dropped.metrics["sequence_error_masked_ratio"]
    left_out = 1 - sum(case["expected"]["error_kept"]) / len(case["uids"])
    assert float(share.sum / share.weight) == pytest.approx(left_out)


ESTIMATORS = ["grpo", "grpo:no_std", "rloo", "maxrl", "gdpo", "rae"]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_finite_and_ordered_as_rewards(case, name):
    """In each group (or role) a higher reward has the higher advantage; equal rewards have none."""
    import torch

    name, _, option = name.partition(":")
    given = {}
    if name == "gdpo":
        case = case | {"weights": [1.0]}
        case["parts"] = [[score] for score in case["scores"]]
        given = {"reward_parts": tensor(case["parts"])}
    if name == "rae":
        given = {"roles": case["roles"], "baselines": {"first": 0.0}}
    if option:
        given["grpo_norm_by_std"] = False
    if name == "gdpo":
        from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

        rewards, mask = token_rewards(case)
        config = algorithm_config(gdpo_weights={"right": 1.0})
        found = compute_advantages_and_returns(rewards, mask, case["uids"], name, config, loss_mask=mask, **given)
        found = found[0][:, -1]
    else:
        found = advantages(case, name, **given)
    assert torch.isfinite(found).all() and found.abs().max() <= 3e4
    for rows in plain_forms.members(case["uids"]).values():
        scores, own = [case["scores"][row] for row in rows], found[rows]
        if len(rows) == 1 or name == "rae":
            continue
        if max(scores) == min(scores) and name != "gdpo":
            assert own.abs().max() <= 1e-9, (name, scores, own)
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        assert own[best] >= own[worst] - 1e-12
        if max(scores) > min(scores):
            assert own[best] > own[worst]
            if name != "gdpo":  # whose batch mean is 0, not that of each group
                assert own[best] > 0 > own[worst]


def test_rae_has_the_sign_of_improvement():
    from skyrl_megatron.algorithms.role_baselines import rae_scores

    means = {"loser": -1.0, "winner": 1.0}
    found = rae_scores(tensor([-0.5, 0.5, -1.0]), ["loser", "winner", "loser"], means, 0.5)
    assert found[0] > 0 > found[1] and found[2] < 0  # both got half: better than usual for one, worse for the other


def objective_of(case, coef, observed=True, parts=1):
    """Loss and gradient of a step whose tokens are cut into micro-batches; what is not trained is an observation."""
    import torch

    from skyrl_megatron.algorithms.objective import PolicyObjective

    mask = tensor(case["mask"])
    config = algorithm_config(use_kl_loss=False, policy_loss_type="regular", observation_loss_coef=coef)
    objective = PolicyObjective(config)
    given = {"old_log_probs": tensor(case["old"]), "rollout_log_probs": tensor(case["rollout"])}
    seen = {"observation_mask": 1 - mask} if observed else {}
    totals = objective.totals(mask, uids=case["uids"], **given, **seen)
    log_probs = tensor(case["old"]).requires_grad_()
    loss, terms = 0.0, []
    for rows in torch.arange(len(mask)).chunk(parts):
        cut = {name: values[rows] for name, values in (given | seen).items()}
        part, metrics = objective(
            totals, log_probs[rows], mask[rows], mask[rows], uids=[case["uids"][row] for row in rows.tolist()], **cut
        )
        loss, terms = loss + part, [*terms, metrics.get("observation_loss")]
    loss.backward()
    return loss.item(), log_probs.grad, terms


def test_the_loss_of_observations(case):
    """Its value, its gradient (which leaves the policy's alone), and its independence of micro-batches."""
    expected, gradient = plain_forms.observation_loss(
        case["old"], [[1 - each for each in row] for row in case["mask"]]
    )
    assert expected == pytest.approx(case["expected"]["observation_loss"], rel=1e-12)
    plain, without, _ = objective_of(case, 0.0)
    value, found, terms = objective_of(case, 0.25)
    assert value - plain == pytest.approx(0.25 * expected, rel=1e-9)
    assert (found - without - 0.25 * tensor(gradient)).abs().max() <= 1e-12
    assert float(terms[0].sum / terms[0].weight) == pytest.approx(expected, rel=1e-9)
    cut, in_parts, _ = objective_of(case, 0.25, parts=3)
    assert cut == pytest.approx(value, rel=1e-9) and (in_parts - found).abs().max() <= 1e-12
    nothing, unchanged, _ = objective_of(case, 0.25, observed=False)
    assert nothing == plain and (unchanged == without).all()


def test_observations_are_what_was_not_sampled():
    """By the sampled spans, also where a filter has masked the whole response; rows that failed have none."""
    from skyrl_megatron.data.splitting import parts_with_trained_tokens, rows_with_trained_tokens, trained_rows
    from skyrl_megatron.rollout.outputs import observation_mask, to_training_batch

    output = {
        "prompt_token_ids": [[1]] * 3,
        "response_ids": [[5, 6, 7, 8], [5, 6], [9]],
        "rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.0]],
        "loss_masks": [[1, 0, 0, 1], [0, 0], [0]],
        "stop_reasons": ["stop", "length", "error"],
        "rollout_logprobs": None,
        "rollout_versions": [[("0", 0, 1), ("0", 3, 4)], [("0", 0, 1)], []],
        "errors": [None, None, "failed"],
        "rollout_metrics": None,
    }
    batch = to_training_batch(output, ["a", "a", "b"])
    batch.observation_mask = observation_mask(output, batch)
    assert batch.padded().observation_mask.tolist() == [[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    trained, rows = trained_rows(batch), np.arange(3)
    # the second teaches by its observation alone
    assert rows_with_trained_tokens(rows, trained).tolist() == [0, 1]
    parts = parts_with_trained_tokens([rows[:1], rows[1:2], rows[2:]], trained)
    assert [part.tolist() for part in parts] == [[0], [1]]
    del output["rollout_versions"]
    assert observation_mask(output, batch).tolist()[:4] == [False, True, True, False]


def test_a_hint_is_before_the_prompt_and_nothing_else_moves():
    import torch

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.trainer.teachers import with_hints

    batch = collate([[1, 2], [3]], [[4, 5, 6], [7]], uids=["a", "b"], rewards=[0.0, 1.0])
    hinted = with_hints(batch, [[90], [91, 92, 93, 94]])
    assert hinted.padded().sequences.tolist() == [[90, 1, 2, 4, 5, 6], [91, 92, 93, 94, 3, 7]]
    assert hinted.padded().attention_mask.all() and torch.equal(hinted.response_mask, batch.response_mask)
    assert hinted.response_lengths.tolist() == [3, 1]
    short = with_hints(batch, [[], [91]]).padded()
    assert short.sequences.tolist() == [[1, 2, 4, 5, 6], [0, 0, 91, 3, 7]]
    assert short.attention_mask.tolist() == [[True] * 5, [False, False, True, True, True]]


def test_hints_of_rows(tmp_path):
    from transformers import AutoTokenizer

    from skyrl_megatron.data.prompts import PromptDataset
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.tiny_model import write_embedded_model

    tokenizer = AutoTokenizer.from_pretrained(write_embedded_model(tmp_path / "model"))
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "hint": hint} for hint in ("it is 3", None)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = PromptDataset(str(tmp_path / "rows.jsonl"), tokenizer, max_prompt_length=32)
    assert prompts.hints_of(["0", "0"], "hint") == ["it is 3"] * 2 and prompts.roles_of(["0", "1"]) == ["", ""]
    assert tokenizer.decode(prompts.hint_tokens("it is 3")) == "<|system|>it is 3<|end|>"
    for uid, column in (("1", "hint"), ("0", "proof")):
        with pytest.raises(DataError, match=rf"needs text in the column '{column}', the row has None"):
            prompts.hints_of([uid], column)
