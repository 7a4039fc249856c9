"""A trajectory is one sample, whatever its rows: random ones say the same in one row, step-wise, and merged."""

import random

import numpy as np
import pytest

FORMS = {"one row": {}, "step-wise": {"step_wise_trajectories": True}}
FORMS["merged"] = FORMS["step-wise"] | {"merge_stepwise_output": True}


def random_turns(draw):
    """(sampled tokens, observation tokens after them, reward) of each turn, the end of the last, and an error."""
    turns = [(draw.randint(1, 5), draw.randint(1, 3), draw.choice([-1.0, 0.0, 0.0, 0.5, 1.0])) for _ in range(3)]
    end, error = draw.choice(["stop", "stop", "length"]), draw.choice([None] * 5 + ["TimeoutError"])
    return turns[: draw.randint(1, 3)], end, error, {"right": draw.choice([0.0, 1.0]), "short": draw.random()}


def rows_of(form, turns, end, error, metrics):
    from skyrl_megatron.rollout.conversation import TrajectoryOutput

    if error:  # an episode whose environment fails leaves one masked token
        masked = np.zeros(1, np.uint8)
        return [TrajectoryOutput(np.array([1]), np.array([2]), masked, [0.0], "error", np.zeros(1), error=error)]
    context, rows = [7, 7], []
    for number, (sampled, observed, reward) in enumerate(turns):
        said = list(range(10, 10 + sampled))
        ones, rewards = np.ones(sampled, np.uint8), [*[0.0] * (sampled - 1), reward]
        reason = end if number == len(turns) - 1 else "stop"
        rows.append(TrajectoryOutput(np.array(context), np.array(said), ones, rewards, reason, -np.ones(sampled)))
        context = [*context, *said, *[50] * observed]
    if form == "one row":
        gaps = [[50] * observed for _, observed, _ in turns[:-1]] + [[]]
        parts = list(zip(rows, gaps, strict=True))
        rows = [
            TrajectoryOutput(
                rows[0].prompt_ids,
                np.concatenate([[*row.response_ids, *gap] for row, gap in parts]),
                np.concatenate([[*row.loss_mask, *[0] * len(gap)] for row, gap in parts]).astype(np.uint8),
                [reward for row, gap in parts for reward in [*row.reward, *[0.0] * len(gap)]],
                end,
                np.concatenate([[*row.rollout_logprobs, *[0.0] * len(gap)] for row, gap in parts]),
            )
        ]
    rows[-1].env_metrics = metrics
    return rows


def sampled(form, trajectories, **generator):
    """The output of two samples of each prompt, and the uid of each row."""
    from skyrl_megatron.config import GeneratorConfig
    from skyrl_megatron.rollout.episode import Trajectory
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron.rollout.outputs import make_generator_output, row_uids

    made = [Trajectory(rows_of(form, *one), turns=len(one[0])) for one in trajectories]
    ids = [TrajectoryID(f"p{number // 4}", number % 4) for number in range(len(made))]
    config = GeneratorConfig(**{"max_turns": 3} | FORMS[form] | generator)
    output = make_generator_output(made, ["gsm8k"] * len(made), ids, config)
    return output, row_uids(output, [each.instance_id for each in ids])


def as_batch(output, uids):
    from skyrl_megatron.rollout.outputs import reward_parts, to_training_batch
    from skyrl_megatron.trainer.step_batch import with_token_rewards

    batch = to_training_batch(with_token_rewards(output), uids)
    batch.reward_parts = reward_parts(output, ["right", "short"])
    return batch


def by_trajectory(batch, values):
    """The mean of ``values`` [R] over the trained tokens of each trajectory."""
    rows = batch.responses
    ends = [True] * len(batch) if batch.is_last_step is None else batch.is_last_step.tolist()
    sums, found = np.zeros(2), []
    for row, last in enumerate(ends):
        mask = batch.loss_mask[rows.of(row)]
        sums += float((values[rows.of(row)] * mask).sum()), float(mask.sum())
        if last:
            found.append(sums[0] / sums[1] if sums[1] else 0.0)
            sums = np.zeros(2)
    return found


def learned(form, trajectories, estimator, **generator):
    """All that is said of the trajectories in a form: before the batch, after each setting, and at the end."""
    from skyrl_megatron.algorithms.advantages import batch_advantages
    from skyrl_megatron.algorithms.kl import penalize_rewards
    from skyrl_megatron.algorithms.length_penalty import LengthPenalty
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.rollout.dynamic_sampling import groups, measured_rewards
    from skyrl_megatron.rollout.gates import Gates
    from skyrl_megatron.rollout.outputs import select_rows
    from skyrl_megatron.trainer import step_batch
    from skyrl_megatron_observe.samples import reward_groups
    from tests.algorithms.vectors import algorithm_config

    output, uids = sampled(form, trajectories, **generator)
    told = dict(step_batch.reward_metrics({**output, "rollout_metrics": {}}, uids, 4))
    told["measured"], told["useful"] = measured_rewards(output, uids), [good for _, good in groups(output, uids)]
    gates = Gates({"reward": {"low": 0.1, "high": 0.9}})
    told["refused"] = [gates.refusal(select_rows(output, rows), 0) for rows, _ in groups(output, uids)]
    batch = as_batch(output, uids)
    told |= step_batch.with_length_penalty(batch, LengthPenalty(type="overlong", max_length=9, buffer=6))
    told |= {f"relative {k}": v for k, v in step_batch.with_length_penalty(batch, LengthPenalty("relative")).items()}
    batch.old_logprobs, batch.ref_logprobs = batch.rollout_logprobs, 1.25 * batch.rollout_logprobs
    whole = step_batch.trajectories_of(batch)
    batch.rewards, kl = penalize_rewards(
        batch.rewards,
        batch.old_logprobs,
        batch.ref_logprobs,
        batch.loss_mask,
        0.1,
        "k1",
        whole,
        rows=batch.responses,
    )
    told |= metric_values(kl) | {
        "samples": len(whole),
        "report": [group[1:] for group in reward_groups(batch)["groups"]],
    }
    weights = algorithm_config(gdpo_weights={"right": 1.0, "short": 0.5})
    batch.advantages, _ = batch_advantages(batch, estimator, weights)
    told |= step_batch.advantage_metrics(batch) | {"advantages": by_trajectory(batch, batch.advantages)}
    told["shown"] = [float(step_batch.trajectory_rewards(batch)[row]) for row in whole.last.tolist()]
    return told


def flat(value):
    """The numbers and texts of a nested value, in order."""
    if isinstance(value, dict):
        return [part for key in value for part in flat(value[key])]
    return [part for each in value for part in flat(each)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl", "gdpo"])
@pytest.mark.parametrize("generator", [{}, {"zero_reward_on_non_stop": True}, {"apply_overlong_filtering": True}])
@pytest.mark.filterwarnings("ignore:.*trajectories. environment:UserWarning")
def test_one_row_and_several_rows_say_the_same(estimator, generator):
    for seed in range(12):
        draw = random.Random(seed)
        trajectories = [random_turns(draw) for _ in range(12)]
        whole = learned("one row", trajectories, estimator, **generator)
        for form in ("step-wise", "merged"):
            told = learned(form, trajectories, estimator, **generator)
            assert list(told) == list(whole)
            for name in whole:
                for one, other in zip(flat(whole[name]), flat(told[name]), strict=True):
                    same = one == other if isinstance(one, str | None) else one == pytest.approx(other, abs=1e-5)
                    assert same, (seed, form, name, whole[name], told[name])
    assert any(whole["advantages"])


def test_a_step_has_the_uid_of_every_row():
    """The source of a synchronous run gives the trainer rows, not trajectories."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from skyrl_megatron.sources.run_state import RunState
    from skyrl_megatron.sources.source import PromptRollouts

    trajectories = [([(2, 1, 0.5), (2, 1, 0.5)], "stop", None, {}) for _ in range(8)]
    output, uids = sampled("step-wise", trajectories)
    prompts = [f"p{number // 4}" for number in range(8)]
    run = RunState(total_steps=1, position={}, phases=lambda name: nullcontext(), say=print)
    parts = SimpleNamespace(
        train_dataloader=[["prompts"]],
        prepare_generator_input=lambda prompts_of_step, phase: ({}, prompts),
        generate=lambda generator_input: output,
    )
    assert PromptRollouts(run, parts).sample() == (output, uids) and len(uids) == 16


def test_the_reward_is_the_sum_of_all_turns():
    """Two samples: 1 in the first turn and 0 in the last, and nothing. The numbers are worked out by hand."""
    turns = [(2, 1, 1.0), (3, 1, 0.0)]
    nothing = [(2, 1, 0.0), (3, 1, 0.0)]
    trajectories = [(each, "stop", None, {"right": 0.0, "short": 0.0}) for each in (turns, nothing)]
    told = learned("step-wise", trajectories, "grpo")
    assert told["reward/avg_raw_reward"] == 0.5 and told["reward/zero_variance_groups"] == 0.0
    assert told["reward/avg_pass_at_4"] == 0.0 and told["reward/mean_positive_reward"] == 0.5
    assert told["measured"] == {"p0": [1.0, 0.0]} and told["useful"] == [True] and told["refused"] == [None]
    assert told["advantages"][0] == pytest.approx(0.5**0.5, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*trajectories. environment:UserWarning")
def test_the_filter_of_groups_with_equal_rewards_masks_all_rows():
    from skyrl_megatron.trainer.step_batch import mask_zero_variance_groups

    metrics = {"right": 0.0, "short": 0.0}
    equal = [([(2, 1, 0.5), (2, 1, 0.5)], "stop", None, metrics), ([(2, 1, 1.0)], "stop", None, metrics)] * 2
    varied = [([(2, 1, reward), (2, 1, 0.0)], "stop", None, metrics) for reward in (0.0, 1.0, 0.0, 1.0)]
    for form, rows in (("one row", 4), ("step-wise", 6), ("merged", 4)):
        batch = as_batch(*sampled(form, equal + varied))
        assert mask_zero_variance_groups(batch) == rows
        mask = batch.padded().loss_mask
        assert [bool(row.any()) for row in mask][:rows] == [False] * rows
        assert mask[rows:].any(dim=1).all()


@pytest.mark.filterwarnings("ignore:.*trajectories. environment:UserWarning")
def test_a_sample_is_left_out_as_a_whole(tmp_path):
    """An error, or no score of a reward model, concerns all rows of the trajectory. The reward model is a stand-in: a
    real one gives no NaN when it is asked to."""
    import torch

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.teachers import Teachers

    metrics = {"right": 0.0, "short": 0.0}
    trajectories = [([(2, 1, 1.0), (2, 1, 0.0)], "stop", None, metrics) for _ in range(4)]
    output, uids = sampled("step-wise", trajectories)
    output["errors"][3] = "the environment could not be closed"  # of the second trajectory's last row only
    batch = as_batch(output, uids)
    assert [bool(row.any()) for row in batch.padded().loss_mask] == [True, True, False, False, True, True, True, True]
    batch = as_batch(*sampled("step-wise", trajectories))

    (tmp_path / "config.json").write_text("{}")

    class Role:
        def start_values(self, rows):
            assert rows.response_lengths.tolist() == [1, 1, 1, 1]
            return lambda: torch.tensor([1.0, float("nan"), 3.0, 4.0])

    teachers = Teachers.__new__(Teachers)
    teachers.cfg = SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.algorithm.distillation.reward_coef=0.5",
            "trainer.placement.colocate_all=false",
            f"trainer.teacher.model.path={tmp_path}",
        ]
    )
    teachers.roles, teachers.names = {"teacher": Role()}, ("",)
    told = teachers.add_rewards(batch)
    assert told["reward/unscored_samples"] == 1.0
    assert [bool(row.any()) for row in batch.padded().loss_mask] == [True, True, False, False, True, True, True, True]
    assert len(set(batch.uids)) == 3 and batch.uids[0] == batch.uids[1] == batch.uids[7]
    rewards = batch.padded().rewards
    assert rewards[[1, 5, 7], -1].tolist() == [0.5, 1.5, 2.0] and rewards[[3], -1].tolist() == [0.0]
