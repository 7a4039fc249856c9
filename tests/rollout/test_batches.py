"""From generator output to the batch that trains: dynamic sampling, scores, metrics, tensors."""

import numpy as np
import pytest

from skyrl_megatron.errors import DataError


def output_of(rewards, uids, **more):
    """Rows with two response tokens each; the token ids say which row they are."""
    from skyrl_megatron.rollout.interface import TrajectoryID

    rows = range(len(uids))
    return {
        "prompt_token_ids": [np.asarray([100 + i]) for i in rows],
        "response_ids": [np.asarray([i, i]) for i in rows],
        "rewards": list(rewards),
        "loss_masks": [np.ones(2, np.uint8) for _ in rows],
        "stop_reasons": ["stop"] * len(uids),
        "rollout_metrics": {"generate/num_failed": 1.0, "environment/accuracy_mean": rewards and 0.5},
        "rollout_logprobs": None,
        "trajectory_ids": [TrajectoryID(uid, i) for i, uid in enumerate(uids)],
        "is_last_step": None,
        "errors": [None] * len(uids),
        **more,
    }


def taken(batch):
    output, uids = batch
    return [int(ids[0]) for ids in output["response_ids"]], uids


def sampler(kind, prompts=2, limit=30, ratio=0.3):
    from skyrl_megatron.config import DynamicSamplingConfig
    from skyrl_megatron.rollout.dynamic_sampling import DynamicSampler

    config = DynamicSamplingConfig(type=kind, max_sample_batches=limit, min_replace_ratio=ratio)
    return DynamicSampler(config, prompts, seed=3)


def test_filter_collects_useful_prompts_over_batches():
    """DAPO: prompts with one reward throughout are left out, and the batch is filled from the next ones."""
    uids = ["a", "a", "b", "b"]
    collecting = sampler("filter")
    assert collecting.add(output_of([1.0, 1.0, 0.0, 1.0], uids), uids) is None
    assert collecting.add(output_of([0.0, 0.0, 0.0, 0.0], uids), uids) is None
    made = collecting.add(output_of([0.0, 1.0, 1.0, 0.0], uids), uids)
    rows, names = taken(made)
    assert rows == [2, 3, 0, 1] and names == ["b", "b", "a", "a"]
    assert made[0]["rollout_metrics"]["generate/num_failed"] == 2.0, "counts add up over the batches that were used"
    assert collecting.sampled_batches == 0, "the next step starts anew"
    # A prompt that comes again is a group of its own; what is over the batch's size is dropped.
    assert collecting.add(output_of([1.0, 1.0, 0.0, 1.0], uids), uids) is None
    assert taken(collecting.add(output_of([0.0, 1.0, 1.0, 0.0], ["b", "b", "c", "c"]), ["b", "b", "c", "c"])) == (
        [2, 3, 0, 1],
        ["b", "b", "b#1", "b#1"],
    )


def test_filter_gives_up_after_its_limit():
    collecting = sampler("filter", limit=2)
    uids = ["a", "a"]
    assert collecting.add(output_of([1.0, 1.0], uids), uids) is None
    with pytest.raises(DataError, match="max_sample_batches=2: too few prompts in 2 batches"):
        collecting.add(output_of([1.0, 1.0], uids), uids)


def test_replace_puts_useful_prompts_in_the_place_of_others():
    """POLARIS; below ``min_replace_ratio`` another batch is sampled."""
    uids = [uid for uid in "abcd" for _ in range(2)]
    rewards = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    rows, names = taken(sampler("replace", 4).add(output_of(rewards, uids), uids))
    assert rows[:2] == [0, 1] and rows[6:] == [6, 7]
    assert {tuple(rows[2:4]), tuple(rows[4:6])} == {(0, 1), (6, 7)}, "as long as there are enough, each once"
    assert len(set(names)) == 4 and all(names[i] == names[i + 1] for i in range(0, 8, 2))
    assert sampler("replace", 4, ratio=0.6).add(output_of(rewards, uids), uids) is None
    one = [1.0, 0.0, *[1.0] * 6]
    rows, names = taken(sampler("replace", 4, ratio=0.25).add(output_of(one, uids), uids))
    assert rows == [0, 1] * 4 and len(set(names)) == 4


def test_what_counts_as_variety():
    from skyrl_megatron.rollout.dynamic_sampling import groups

    def useful(rewards, **more):
        return [good for _, good in groups(output_of(rewards, ["a"] * len(rewards), **more), ["a"] * len(rewards))]

    assert useful([1.0]) == [True], "one sample cannot differ from itself"
    assert useful([1.0, 1.0 + 1e-9]) == [False]
    assert useful([[0.5, 0.5], [0.0, 1.0]]) == [False], "per token: the sums count"
    assert useful([1.0, 0.0], errors=[None, "TimeoutError"]) == [False], "a failed environment says nothing"
    assert useful([0.0, 1.0, 1.0], is_last_step=[False, True, True]) == [False], "step-wise: the sums of rows count"
    assert useful([1.0, 0.0, 0.0], is_last_step=[False, True, True]) == [True]


def test_none_takes_every_batch():
    output = output_of([1.0, 1.0], ["a", "a"])
    assert sampler(None).add(output, ["a", "a"]) == (output, ["a", "a"])


def test_scores():
    from skyrl_megatron.rollout.interface import get_metrics_from_generator_output as scores

    uids = ["a", "a", "b", "b"]
    assert scores(output_of([1.0, 0.0, -1.0, 0.0], uids), uids) == {
        "avg_score": 0.0,
        "pass_at_n": 0.5,
        "mean_positive_reward": 0.25,
    }
    # One a token: a trajectory passes by its last turn; step-wise by its last row. Its reward is the sum of all.
    per_token = output_of([[1.0, 0.0], [0.0, 0.0], [-0.5, 1.0], [0.0, 0.0]], uids)
    assert scores(per_token, uids) == {"avg_score": 0.375, "pass_at_n": 0.5, "mean_positive_reward": 0.5}
    steps = output_of([1.0, 0.0, 0.0, 1.0], uids, is_last_step=[False, True, False, True])
    assert scores(steps, uids) == {"avg_score": 1.0, "pass_at_n": 0.5, "mean_positive_reward": 1.0}
    errors = [None, "TimeoutError", "TimeoutError", "TimeoutError"]
    some = output_of([1.0, 0.0, 0.0, 0.0], uids, errors=errors)
    assert scores(some, uids) == {"avg_score": 1.0, "pass_at_n": 1.0, "mean_positive_reward": 1.0}, "what was scored"
    none = output_of([0.0] * 4, uids, errors=errors[1:] + errors[1:2])
    assert scores(none, uids) == {"avg_score": None, "pass_at_n": None, "mean_positive_reward": None}


def test_rollout_metrics():
    from skyrl_megatron.rollout.outputs import get_rollout_metrics

    masks = [[1, 1, 0, 1], [1]]
    times, splits = [2.0, 4.0], {"llm": [1.0, 3.0], "env": [0.5, 0.5]}
    found = get_rollout_metrics([[1, 2, 3, 4], [5]], [1.0, 0.0], None, None, masks, times, splits)
    assert found["generate/avg_num_tokens"] == 2.5 and found["generate/max_num_tokens"] == 4
    assert found["generate/avg_tokens_non_zero_rewards"] == 4 and found["generate/avg_tokens_zero_rewards"] == 1
    assert found["generate/avg_assistant_tokens"] == 2.0
    assert found["generate/tokens_per_turn_max"] == 2 and found["generate/tokens_per_turn_mean"] == pytest.approx(
        4 / 3
    )
    assert found["generate/trajectory_time_completion_max"] == 4.0
    assert found["generate/trajectory_time_other_mean"] == 0.5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": [1.0]}, "1 rewards for 2 rows"),
        ({"loss_masks": [[1, 1]]}, "1 loss_masks for 2 rows"),
        ({"rewards": [1.0, [0.0, 1.0]]}, "the generator returned both"),
        ({"is_last_step": [True]}, "is_last_step for every row"),
        ({"is_last_step": [False, True]}, "row 0 of trajectory a_0: is_last_step=False does not match"),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(change, message):
    from skyrl_megatron.rollout.outputs import validate_generator_output

    with pytest.raises(DataError, match=message):
        validate_generator_output({**output_of([1.0, 0.0], ["a", "a"]), **change}, None)


def test_joining_outputs_needs_the_same_fields():
    from skyrl_megatron.rollout.outputs import concatenate_generator_outputs

    one = output_of([1.0], ["a"])
    with pytest.raises(DataError, match="only some of the generator outputs have rollout_logprobs"):
        concatenate_generator_outputs([one, {**one, "rollout_logprobs": [np.zeros(2)]}])


def test_joined_metrics_keep_their_meaning():
    """Shares of groups that are joined are their mean, as in an asynchronous run's steps; counts add up."""
    from skyrl_megatron.rollout.outputs import concatenate_generator_outputs

    shares = ("agents/token_in_rate", "agents/own_ms_median", "generate/truncated_ratio", "environment/solved")
    each = [{**dict.fromkeys(shares, share), "agents/calls": 3.0} for share in (1.0, 0.5)]
    joined = concatenate_generator_outputs([{**output_of([1.0], ["a"]), "rollout_metrics": some} for some in each])
    found = joined["rollout_metrics"]
    assert [found[name] for name in shares] == [0.75] * 4 and found["agents/calls"] == 6.0


def test_failed_rows_enter_no_baseline_and_no_mean():
    from skyrl_megatron.rollout.outputs import to_training_batch

    batch = to_training_batch(output_of([1.0, 0.0, 0.0], ["a"] * 3, errors=[None, "TimeoutError", None]), ["a"] * 3)
    assert batch.uids[0] == batch.uids[2] == "a" and batch.uids[1] != "a"
    assert batch.response_lengths.tolist() == [2, 2, 2]
    padded = batch.padded()
    assert padded.loss_mask.sum(dim=1).tolist() == padded.response_mask.sum(dim=1).tolist() == [2, 0, 2]


@pytest.mark.parametrize("arrays", [True, False])
def test_rows_are_one_after_another_and_right_aligned_when_padded(arrays):
    """Against a loop over every element."""
    from skyrl_megatron.data.batch import collate

    rng = np.random.default_rng(0)
    sizes = [(int(p), int(r)) for p, r in zip(rng.integers(1, 9, 20), [0, *rng.integers(1, 7, 19)], strict=True)]
    kind = np.asarray if arrays else list
    prompts = [kind(rng.integers(0, 99, p)) for p, _ in sizes]
    responses = [kind(rng.integers(0, 99, r)) for _, r in sizes]
    masks = [kind(rng.integers(0, 2, r)) for _, r in sizes]
    logprobs = [kind(-rng.random(r)) for _, r in sizes]
    rewards = [kind(rng.random(r)) for _, r in sizes]
    routes = [rng.integers(0, 8, (p + r - i % 2, 2, 3)) if i % 3 else None for i, (p, r) in enumerate(sizes)]
    uids = [str(i) for i in range(20)]
    made = collate(
        prompts,
        responses,
        uids=uids,
        rewards=rewards,
        loss_masks=masks,
        rollout_logprobs=logprobs,
        rollout_routes=routes,
        is_last_step=[i % 2 == 0 for i in range(20)],
    )
    width, response_width = max(p + r for p, r in sizes), max(r for _, r in sizes)
    pairs = zip(prompts, responses, strict=True)
    assert made.tokens.tolist() == [int(x) for pair in pairs for part in pair for x in part]
    assert made.lengths.tolist() == [p + r for p, r in sizes]
    assert made.response_lengths.tolist() == [r for _, r in sizes]
    assert made.rewards.tolist() == pytest.approx([float(x) for row in rewards for x in row])
    assert made.loss_mask.tolist() == [bool(x) for row in masks for x in row]
    batch = made.padded()
    assert batch.sequences.shape == (20, width) and batch.rewards.shape == (20, response_width)
    for i, (p, r) in enumerate(sizes):
        for column in range(width):
            at = column - (width - p - r)
            token = 0 if at < 0 else int(prompts[i][at] if at < p else responses[i][at - p])
            assert batch.sequences[i, column] == token and bool(batch.attention_mask[i, column]) == (at >= 0)
        if routes[i] is None:
            assert batch.rollout_routes[i] is None
        else:
            assert batch.rollout_routes[i].dtype == np.uint8
            np.testing.assert_array_equal(batch.rollout_routes[i], routes[i])
        for column in range(response_width):
            at = column - (response_width - r)
            assert batch.response_mask[i, column] == (at >= 0)
            for tensor, values in (
                (batch.loss_mask, masks),
                (batch.rollout_logprobs, logprobs),
                (batch.rewards, rewards),
            ):
                assert float(tensor[i, column]) == pytest.approx(float(values[i][at]) if at >= 0 else 0.0)
    assert batch.is_last_step.tolist() == [i % 2 == 0 for i in range(20)]
    whole = collate([[1]] * 3, [[2, 3], [], [4]], uids=list("abc"), rewards=[0.5, 0.7, 1.0])
    assert whole.rewards.tolist() == [0, 0.5, 1.0]
    assert whole.padded().rewards.tolist() == [[0, 0.5], [0, 0.0], [0, 1.0]], (
        "on the last response token, if there is one"
    )
    with pytest.raises(ValueError, match=r"sample 1 \(uid b\): 1 rewards for 2 response tokens"):
        collate([[1]] * 2, [[2], [3, 4]], uids=["a", "b"], rewards=[[1.0], [1.0]])


@pytest.mark.around
def test_what_tokens_were_sampled_from_goes_with_their_rows(tmp_path):
    from safetensors.torch import load_file

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.types import TokenSupport
    from skyrl_megatron_observe.dump import dump_batch, read_dump

    supports = [TokenSupport.of([[2, 7], []]), None, TokenSupport.of([[4, 70000], [9], [1, 5, 6]])]
    given = dict(uids=list("abc"), rewards=[0.0] * 3)
    batch = collate([[1]] * 3, [[7, 3], [8], [4, 9, 1]], **given, rollout_support=supports)
    assert [support.counts.tolist() for support in batch.rollout_support] == [[2, 0], [0], [2, 1, 3]]
    picked = batch.select([2, 0])
    assert picked.rollout_support[0].ids.tolist() == [4, 70000, 9, 1, 5, 6]
    assert [each.ids.dtype for each in picked.rollout_support] == ["int32", "uint16"]
    assert collate([[1]], [[2]], uids=["a"], rewards=[0.0], rollout_support=[None]).rollout_support == []
    path, versions = tmp_path / "dumped" / "step.safetensors", [[["4", 0, 2]], [], [["4", 0, 1], ["5", 1, 3]]]
    dump_batch(batch, path, versions)
    dumped = load_file(path)
    assert dumped["rollout_support_counts"].tolist() == [2, 0, 0, 2, 1, 3]
    assert dumped["rollout_support_ids"].tolist() == [2, 7, 4, 70000, 9, 1, 5, 6]
    again, sampled_by = read_dump(path)
    assert again.uids == batch.uids and sampled_by == versions and (again.tokens == batch.tokens).all()
    assert (again.lengths == batch.lengths).all() and (again.response_lengths == batch.response_lengths).all()
    for one, other in zip(again.rollout_support, batch.rollout_support, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.counts.tolist() == other.counts.tolist()


@pytest.mark.around
def test_a_failed_row_of_an_older_file_has_its_response(tmp_path):
    """Files of padded batches do not say how long responses are, and the masks of rows that failed are 0."""
    import json

    from safetensors.torch import save_file

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron_observe.dump import read_dump

    logprobs = [[-0.5, -0.2], [0.0, -0.3, -0.1], [0.0, 0.0]]
    given = dict(uids=list("abc"), rewards=[0.0] * 3, rollout_logprobs=logprobs)
    batch = collate([[1, 2]] * 3, [[7, 3], [8, 9, 4], [5, 6]], **given)
    for mask in (batch.response_mask, batch.loss_mask):
        mask[batch.responses.of(1)] = mask[batch.responses.of(2)] = False
    padded, versions = batch.padded(), [[], [["1", 1, 3]], [["1", 0, 2]]]
    names = ("sequences", "attention_mask", "response_mask", "loss_mask", "rewards", "rollout_logprobs")
    metadata = {"uids": batch.uids, "adapters": [], "versions": versions}
    path = tmp_path / "step.safetensors"
    save_file(
        {name: getattr(padded, name) for name in names},
        path,
        {key: json.dumps(value) for key, value in metadata.items()},
    )
    again, _ = read_dump(path)
    assert again.response_lengths.tolist() == [2, 3, 2] and again.lengths.tolist() == [4, 5, 4]
    assert (again.rollout_logprobs == batch.rollout_logprobs).all() and (again.loss_mask == batch.loss_mask).all()


def test_a_token_outside_its_support_is_named():
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.types import TokenSupport

    supports = [TokenSupport.of([[2]]), TokenSupport.of([[3], [5, 6], [7]])]
    with pytest.raises(DataError, match=r"uid b: token 4 at position 1 of the response .* \(2 tokens\)"):
        collate([[1]] * 2, [[2], [3, 4, 7]], uids=["a", "b"], rewards=[0.0] * 2, rollout_support=supports)
    with pytest.raises(ValueError, match=r"sample 0 \(uid a\): 1 rollout_support for 2 response tokens"):
        collate([[1]], [[2, 3]], uids=["a"], rewards=[0.0], rollout_support=supports[:1])


def test_mini_batches_are_prompts_not_rows():
    from skyrl_megatron.data.batch import collate, failed_uid
    from skyrl_megatron.data.splitting import PROMPT_UIDS, mini_batches

    uids = ["a", "a", "b", failed_uid("b", 3), "b", "c", "d", "d"]
    batch = collate([[row] for row in range(8)], [[9]] * 8, uids=uids, rewards=[0.0] * 8)
    batch.metadata[PROMPT_UIDS] = list("aabbbcdd")

    def rows(prompts):
        return [batch.select(part).padded().sequences[:, 0].tolist() for part in mini_batches(batch, prompts)]

    assert rows(2) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert rows(3) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert [part.tolist() for part in mini_batches(batch, 4)] == [list(range(8))]
