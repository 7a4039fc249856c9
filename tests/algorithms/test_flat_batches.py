"""Flat batches: what is computed of them is what padded tensors give, for random rows."""

import numpy as np
import pytest

LENGTHS = {
    "varied": [5, 1, 9, 3, 7, 7, 2, 12],
    "with empty answers": [0, 4, 0, 1, 6, 2, 0, 3],
    "of equal length": [4] * 8,
    "one long row": [3, 900, 1, 2, 5, 1, 40, 6],
}


def made(lengths, seed=0, groups=4, steps=False):
    """A batch of 8 rows with all columns, of which some tokens are not trained and a row failed."""

    import torch

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.types import TokenSupport

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 99, rng.integers(1, 6)) for _ in lengths]
    responses = [rng.integers(0, 99, n) for n in lengths]
    masks = [(rng.random(n) < 0.7).astype(int) for n in lengths]
    batch = collate(
        prompts,
        responses,
        uids=[f"p{row * groups // len(lengths)}" for row in range(len(lengths))],
        rewards=[rng.normal(size=n).tolist() for n in lengths],
        loss_masks=masks,
        rollout_logprobs=[-rng.random(n) for n in lengths],
        is_last_step=[row % 2 == 1 for row in range(len(lengths))] if steps else None,
        rollout_support=[TokenSupport.none(n) for n in lengths],
        rollout_routes=[None if row == 3 else rng.integers(0, 8, (n + 1, 2, 2)) for row, n in enumerate(lengths)],
    )
    values = torch.Generator().manual_seed(seed)
    for name in ("old_logprobs", "ref_logprobs", "values"):
        setattr(batch, name, torch.randn(len(batch.loss_mask), generator=values))
    batch.truncated = torch.tensor([row % 3 == 0 for row in range(len(lengths))])
    failed = batch.responses.of(1)
    batch.response_mask[failed] = batch.loss_mask[failed] = False
    return batch


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_padded_and_back(lengths):
    import torch

    from skyrl_megatron.types import OF_RESPONSES

    batch = made(lengths)
    back = batch.padded().flat()
    for name in ("tokens", *OF_RESPONSES):
        one, other = getattr(batch, name), getattr(back, name)
        assert (one is None) == (other is None), name
        assert one is None or (torch.equal(one, other) and one.dtype == other.dtype), name
    assert batch.lengths.tolist() == back.lengths.tolist()
    assert batch.response_lengths.tolist() == back.response_lengths.tolist() == lengths


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rows_are_picked_and_joined(lengths):
    """Any rows, in any order, also twice: those of the padded tensors."""

    import torch

    from skyrl_megatron.types import OF_RESPONSES

    batch, rows = made(lengths), [6, 2, 2, 0, 7]
    picked, padded = batch.select(rows), batch.padded()
    again = picked.padded()
    for name in OF_RESPONSES:
        whole, part = getattr(padded, name), getattr(again, name)
        if whole is not None:
            width = part.shape[1]
            assert torch.equal(whole[rows][:, whole.shape[1] - width :], part), name
    assert picked.uids == [batch.uids[row] for row in rows]
    joined = type(batch).joined([batch.select([1, 2, 3]), batch.select([5]), batch.blank_row()])
    assert joined.lengths.tolist() == [*batch.lengths[[1, 2, 3, 5]], 0]
    assert torch.equal(joined.tokens, torch.cat([batch.tokens[batch.rows.of(row)] for row in (1, 2, 3, 5)]))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sums_of_rows(lengths):
    import torch

    batch = made(lengths)
    rows, values = batch.responses, batch.rewards
    padded = rows.padded(values.double())
    torch.testing.assert_close(rows.sum(values), padded.sum(1), rtol=1e-12, atol=1e-12)
    some = rows.lengths > 0
    assert rows.largest(values)[some].tolist() == [float(values[rows.of(row)].max()) for row in np.flatnonzero(some)]
    assert rows.any(batch.loss_mask).tolist() == rows.padded(batch.loss_mask).any(1).tolist()
    assert rows.numbers().tolist() == np.repeat(np.arange(len(rows)), rows.lengths).tolist()
    for position in range(rows.size):
        row, token = rows.row_of(position)
        assert rows.of(row).start + token == position and token < rows.lengths[row]
    parts = rows.of_similar_length(16)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    assert all(len(part) == 1 or len(part) * rows.lengths[part].max() <= 16 for part in parts)


ESTIMATORS = {
    "grpo": {},
    "rloo": {},
    "maxrl": {},
    "gae": {"gamma": 0.99, "lambd": 0.9},
    "gae of all tokens": {"skip_untrained_tokens": False},
    "gae by length": {"gae": {"length_adaptive_alpha": 0.05, "critic_lambd": 1.0, "bootstrap_truncated": True}},
    "reinforce++": {"gamma": 0.97},
    "reinforce++ of all tokens": {"skip_untrained_tokens": False},
    "distillation": {},
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", ESTIMATORS)
def test_estimators(case, lengths):
    """Built-in estimators of a flat batch against the same of padded tensors, which are held against formulas."""

    import torch

    from skyrl_megatron.algorithms.advantages import batch_advantages, compute_advantages_and_returns
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig

    batch, name = made(lengths), case.split()[0]
    given = ESTIMATORS[case]
    settings = {key: value for key, value in given.items() if key not in ("gamma", "lambd")}
    config = AlgorithmConfig.from_dict_config({"advantage_estimator": name, **settings})
    options = {key: given[key] for key in ("gamma", "lambd") if key in given}
    padded = batch.padded()
    expected = compute_advantages_and_returns(
        padded.rewards,
        padded.response_mask,
        padded.uids,
        name,
        config,
        values=padded.values,
        loss_mask=padded.loss_mask,
        truncated=padded.truncated,
        **options,
    )
    got = batch_advantages(batch, name, config, **options)
    valid = padded.loss_mask > 0 if config.skip_untrained_tokens else padded.response_mask > 0
    for one, other in zip(got, expected, strict=True):
        one = batch.responses.padded(one)
        torch.testing.assert_close(one[valid], other[valid], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_estimators_of_trajectories(name):
    import torch

    from skyrl_megatron.algorithms.advantages import batch_advantages, compute_advantages_and_returns
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig

    batch, config = made(LENGTHS["varied"], steps=True), AlgorithmConfig(advantage_estimator=name)
    padded = batch.padded()
    expected = compute_advantages_and_returns(
        padded.rewards,
        padded.response_mask,
        padded.uids,
        name,
        config,
        loss_mask=padded.loss_mask,
        is_last_step=padded.is_last_step,
    )
    for one, other in zip(batch_advantages(batch, name, config), expected, strict=True):
        torch.testing.assert_close(batch.responses.padded(one), other, rtol=1e-5, atol=1e-6)


def test_a_custom_estimator_sees_padded_rows_of_the_batch_or_of_a_group():
    import torch

    from skyrl_megatron.algorithms.advantages import (
        AdvantageEstimatorRegistry,
        batch_advantages,
        register_advantage_estimator,
    )
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.config.table import ESTIMATORS as TABLE

    shapes = []

    def centred(token_level_rewards, response_mask, index, **_):
        shapes.append(tuple(token_level_rewards.shape))
        scores = token_level_rewards.sum(1, keepdim=True)
        return (scores - scores.mean()) * response_mask, token_level_rewards * response_mask

    batch = made([5, 1, 9, 3, 7, 7, 2, 12], groups=2)
    order = [4, 0, 1, 5, 6, 2, 3, 7]  # the rows of a group need not be neighbours
    batch = batch.select(order)
    try:
        register_advantage_estimator("centred")(centred)
        register_advantage_estimator("centred_group", per_group=True)(centred)
        whole, _ = batch_advantages(batch, "centred", AlgorithmConfig())
        groups, returns = batch_advantages(batch, "centred_group", AlgorithmConfig())
    finally:
        for name in ("centred", "centred_group"):
            AdvantageEstimatorRegistry.unregister(name)
            TABLE.rows.pop(name, None)
    assert shapes == [(8, 12), (4, 12), (4, 9)]
    scores = batch.responses.sum(batch.rewards)
    ids = torch.tensor([uid == "p1" for uid in batch.uids]).long()
    mean = torch.stack([scores[ids == group].mean() for group in (0, 1)])
    expected = batch.responses.spread(scores - mean[ids]).float() * batch.response_mask
    torch.testing.assert_close(groups, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, batch.rewards * batch.response_mask)
    torch.testing.assert_close(
        whole, batch.responses.spread(scores - scores.mean()).float() * batch.response_mask, rtol=1e-5, atol=1e-5
    )


def test_an_estimator_of_groups_sees_whole_trajectories_also_failed_ones():
    """The rows of a trajectory that failed have a uid each."""
    import torch

    from skyrl_megatron.algorithms.advantages import (
        AdvantageEstimatorRegistry,
        batch_advantages,
        register_advantage_estimator,
    )
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.config.table import ESTIMATORS as TABLE

    def totals(token_level_rewards, response_mask, index, **_):
        scores = token_level_rewards.sum(1, keepdim=True) * response_mask
        return scores, scores

    batch = made(LENGTHS["varied"], groups=2, steps=True)
    batch.uids = [f"{uid}/failed-{row}" if row in (2, 3) else uid for row, uid in enumerate(batch.uids)]
    try:
        register_advantage_estimator("totals", per_group=True)(totals)
        advantages, _ = batch_advantages(batch, "totals", AlgorithmConfig())
    finally:
        AdvantageEstimatorRegistry.unregister("totals")
        TABLE.rows.pop("totals", None)
    of_trajectories = batch.responses.sum(batch.rewards).view(-1, 2).sum(1).repeat_interleave(2)
    expected = batch.responses.spread(of_trajectories).float() * batch.response_mask
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)


def test_copies_and_files_of_a_batch_have_nothing_in_the_object_store():
    """A copy changes on its own, and its tensors count their changes anew."""
    import copy
    import pickle

    from skyrl_megatron.workers.dispatch import Carried

    batch = made(LENGTHS["varied"])
    batch.carried = Carried(len(batch))
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.select([0, 1])):
        assert other.carried is None
    assert batch.carried is not None


def test_tensors_that_count_no_changes_are_put_again():
    """Those that a scorer made in inference mode."""
    import torch

    from skyrl_megatron.workers.dispatch import _is_same, _state

    with torch.inference_mode():
        values = torch.zeros(3)
    assert not _is_same(_state(values), values)
    values = values.clone()
    state = _state(values)
    assert _is_same(state, values)
    values += 1.0
    assert not _is_same(state, values)


def test_a_skipped_row_gets_nothing_and_gives_nothing():
    import torch

    from skyrl_megatron.algorithms.advantages import batch_advantages
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig

    batch, config = made(LENGTHS["varied"]), AlgorithmConfig(nonfinite="skip")
    batch.rewards[batch.responses.of(2).start] = float("nan")
    for name, rest in (("grpo", {}), ("gae", {})):
        advantages, _ = batch_advantages(batch, name, config, **rest)
        assert not advantages[batch.responses.of(2)].any() and advantages.isfinite().all()
        others = [row for row in range(8) if row != 2]
        alone, _ = batch_advantages(batch.select(others), name, config, **rest)
        torch.testing.assert_close(batch.responses.select(advantages, np.asarray(others)), alone)
    from skyrl_megatron.errors import AlgorithmError

    with pytest.raises(AlgorithmError, match=r"token_level_rewards of row 2 \(uid 'p1'\) is nan at token 0"):
        batch_advantages(batch, "grpo", AlgorithmConfig())


def test_a_mask_with_another_value_is_refused():
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.errors import AlgorithmError

    with pytest.raises(AlgorithmError, match=r"loss_mask must hold 0 and 1 only, found 0.5 in row 1, token 2"):
        collate([[1], [2]], [[3], [4, 5, 6]], uids="ab", rewards=[0.0, 1.0], loss_masks=[[1], [1, 0, 0.5]])


def test_a_row_of_a_million_tokens_takes_the_memory_of_its_tokens():
    import tracemalloc

    from skyrl_megatron.algorithms.advantages import batch_advantages
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.types import OF_RESPONSES

    long = np.arange(1_000_000, dtype=np.int32) % 1000
    prompts, responses = [long[:5]] * 9, [long, *[long[:100]] * 8]
    logprobs = [np.zeros(len(row), np.float32) for row in responses]
    tracemalloc.start()
    batch = collate(prompts, responses, uids=list("aaabbbccc"), rewards=[1.0, *[0.0] * 8], rollout_logprobs=logprobs)
    batch.advantages, _ = batch_advantages(batch, "grpo", AlgorithmConfig())
    assert len(batch.tokens) == 1_000_845
    # [9, 1,000,000] of any dtype would take more than the 17 bytes of each token here
    flat = [value for name in ("tokens", *OF_RESPONSES) if (value := getattr(batch, name)) is not None]
    assert sum(value.nbytes for value in flat) < 20 * 1_000_845
    tracemalloc.stop()
    assert batch.advantages[0] > 0 and not batch.advantages[batch.responses.of(4)].any()


def test_padded_form_of_rows_without_tokens():
    import torch

    from skyrl_megatron.types import PaddedBatch, RowSpans

    rows = RowSpans(np.array([0, 0]))
    assert rows.padded(torch.zeros(0)).shape == (2, 1)
    empty = PaddedBatch(
        torch.zeros(1, 3).long(), torch.zeros(1, 3).bool(), torch.zeros(1, 2), torch.zeros(1, 2)
    ).flat()
    assert empty.lengths.tolist() == empty.response_lengths.tolist() == [0]
