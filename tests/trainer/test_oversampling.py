"""Which groups a step with oversampling starts, trains, keeps and drops, on a clock of tokens."""

import asyncio

import numpy as np
import pytest


def sampled(length):
    """A finished trajectory of so many tokens."""
    from skyrl_megatron.rollout.conversation import TrajectoryOutput
    from skyrl_megatron.rollout.episode import Trajectory

    row = TrajectoryOutput(
        np.zeros(2, np.int32), np.zeros(length, np.int32), np.ones(length, np.uint8), [0.0] * length, "stop"
    )
    return Trajectory([row])


def begun(length):
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.rollout.continuation import BegunTurn

    return BegunTurn(np.zeros(2, np.int32), Generation([7] * length, [-1.0] * length, "abort", [("0", 0, length)]))


class Run:
    """Steps whose engines sample one token of every open sample in each tick. ``lengths`` [prompts, samples]."""

    def __init__(self, lengths, batch, ratio, bound, **changes):
        from skyrl_megatron.sources.oversampled import OversampledGroups

        self.lengths, self.version = np.asarray(lengths), 0
        prompts, samples = self.lengths.shape
        self.groups = OversampledGroups(
            batch, ratio, samples, bound, lambda number: {"uid": str(number % prompts)}, **changes
        )
        self.trained, self.dropped, self.ticks, self.asked, self.ages = [], [], [], [], []

    def step(self):
        from skyrl_megatron.rollout.interface import TrajectoryID

        groups, log = self.groups, None
        self.asked.append([entry["uid"] for entry in groups.begin(self.version)])
        log = groups.log(self.version)
        numbers = {group.uid: number for number, group in groups.open.items()}
        left = {}
        for uid in log.groups:
            for sample in range(groups.samples):
                known = log.stored(TrajectoryID(uid, sample))
                if known.trajectory is None:
                    done = 0 if known.begun is None else len(known.begun.generation.token_ids)
                    left[uid, sample] = done
        length = {key: int(self.lengths[numbers[key[0]] % len(self.lengths), key[1]]) for key in left}
        tick = 0
        log.look()
        while not log.ended.is_set():
            tick = min(length[key] - left[key] for key in left)
            for key in [key for key in left if length[key] - left[key] == tick]:
                del left[key]
                asyncio.run(log.finished(TrajectoryID(*key), sampled(length[key])))
        for (uid, sample), done in left.items():
            if done + tick:
                log.keep(TrajectoryID(uid, sample), begun(done + tick))
        started = {number: group.started for number, group in groups.open.items()}
        taken, dropped = groups.end(log, self.version)
        self.trained.append(list(taken))
        self.ages += [self.version - started[number] for number in taken]
        self.dropped += dropped
        self.ticks.append(tick)
        self.version += 1
        groups.complete_step()
        return groups.metrics()


def heavy_tail(prompts, samples, seed=0):
    drawn = np.random.default_rng(seed).lognormal(4.0, 0.9, (prompts, samples))
    return np.clip(drawn, 4, 2000).astype(int)


@pytest.mark.parametrize(("ratio", "bound"), [(0.5, 4), (1.0, 1), (2.0, 2), (0.25, 1)])
def test_kept_groups_are_trained_within_the_bound(ratio, bound):
    """Also where every age comes together: no group is lost, and none is trained later than allowed."""
    run = Run(heavy_tail(600, 2), 8, ratio, bound)
    for _ in range(60):
        metrics = run.step()
    assert all(len(numbers) == 8 for numbers in run.trained) and not run.dropped
    assert max(run.ages) <= bound and metrics["oversampling/open_groups"] == run.groups.most - 8
    trained = [number for numbers in run.trained for number in numbers]
    assert len(set(trained)) == len(trained)
    assert set(trained) | set(run.groups.open) == set(range(run.groups.next))


def test_engines_are_asked_for_the_oldest_first():
    run = Run(heavy_tail(600, 2), 4, 1.0, 3)
    for _ in range(12):
        before = {group.uid: group.started for group in run.groups.open.values()}
        run.step()
        ages = [before.get(uid, run.version) for uid in run.asked[-1]]
        assert ages == sorted(ages)


def test_steps_take_less_time_than_those_that_wait():
    lengths = heavy_tail(600, 2)
    kept = Run(lengths, 16, 1.0, 6)
    for _ in range(30):
        kept.step()
    waits = [lengths[first : first + 16].max() for first in range(0, 480, 16)]
    assert sum(kept.ticks) < 0.67 * sum(waits)


def test_dropped_groups_are_not_continued():
    run = Run(heavy_tail(600, 2), 8, 0.5, None)
    for _ in range(10):
        metrics = run.step()
        assert metrics["oversampling/dropped_groups"] == 4 and metrics["oversampling/open_groups"] == 0
    assert sorted([number for numbers in run.trained for number in numbers] + run.dropped) == list(range(120))
    assert max(run.ages) == 0 and metrics["oversampling/length_bias"] < -0.2


@pytest.mark.parametrize("steps", [10, 40])
def test_the_length_bias_is_reported(steps):
    """Against the lengths that are known here, of which the run sees only those that are finished."""
    lengths = heavy_tail(2000, 4)
    run = Run(lengths, 32, 1.0, 6)
    for _ in range(steps):
        metrics = run.step()
    trained = lengths[[number for numbers in run.trained for number in numbers]].mean()
    started = lengths[: run.groups.next].mean()
    assert metrics["oversampling/trained_mean_tokens"] == pytest.approx(trained)
    assert abs(metrics["oversampling/started_mean_tokens"] / started - 1) < 0.02
    assert abs((1 + metrics["oversampling/length_bias"]) / (trained / started) - 1) < 0.02
    assert trained / started < (0.96 if steps == 10 else 1.0)


def test_the_mean_of_lengths_that_are_only_exceeded():
    """By hand: of 4 samples one ends at 2, one is cut at 3, and two end at 5 and 9: S is 1, 3/4, 3/8, 0."""
    from collections import Counter

    from skyrl_megatron.sources.oversampled import _mean

    assert _mean(Counter([2, 5, 9]), Counter([3])) == pytest.approx(2 + 3 * 0.75 + 4 * 0.375)
    assert _mean(Counter([2, 5, 9]), Counter()) == pytest.approx(16 / 3)
    assert _mean(Counter(), Counter()) == 0 and _mean(Counter(), Counter([4])) == 4


def test_a_resumed_run_continues_the_open_groups():
    import json

    from skyrl_megatron.rollout.interface import TrajectoryID

    lengths = heavy_tail(50, 2)
    whole, first = Run(lengths, 8, 1.0, 4), Run(lengths, 8, 1.0, 4)
    for _ in range(6):
        whole.step()
        first.step()
    resumed = Run(lengths, 8, 1.0, 4)
    resumed.version = 6
    first.groups.begin(6)
    log = first.groups.log(6)
    uid = next(uid for uid in log.groups if uid not in log.complete)
    for sample in range(2):  # the run ends in the middle of the next step
        asyncio.run(log.finished(TrajectoryID(uid, sample), sampled(9)))
    first.groups.end(log, 6)
    resumed.groups.load_state(json.loads(json.dumps(first.groups.state())))
    resumed.groups.decode(first.groups.encode())
    for _ in range(12):
        assert resumed.step() == whole.step()
    assert resumed.trained == whole.trained[6:] and resumed.ticks == whole.ticks[6:]
    assert resumed.groups.encode() == whole.groups.encode()


def test_uids_of_open_groups_differ():
    run = Run(heavy_tail(3, 2), 4, 1.0, 3)
    for _ in range(5):
        run.step()
        assert len(set(run.asked[-1])) == 8
        assert {uid.partition("#")[0] for uid in run.asked[-1]} == {"0", "1", "2"}


@pytest.mark.parametrize(("unfinished", "ratio"), [("keep", 0.5), ("keep", 2.0), ("drop", 1.5)])
def test_adaptive_samplers_draw_the_same_whenever_groups_finish(unfinished, ratio):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.loader import _oversampling_lag
    from tests.prompts.test_samplers import loader_of, sampled

    keys = [f"trainer.oversampling.ratio={ratio}", f"trainer.oversampling.unfinished={unfinished}"]
    cfg = SkyRLTrainConfig.from_cli_overrides([*keys, "trainer.oversampling.max_staleness_steps=2"])

    def draws(seed):
        loader = loader_of("pools", sampled([50]), 4, lag=_oversampling_lag(cfg))
        bound = None if unfinished == "drop" else 2
        run = Run(heavy_tail(5000, 2, seed), 4, ratio, bound, ready=loader.ready)
        run.groups.prompt = loader.prompt
        for _ in range(10):
            run.step()
            assert len(run.asked[-1]) == run.groups.most  # no prompt waited for an observation
            for number in run.trained[-1]:
                loader.observe(number, [float(int(loader.prompt(number)["uid"].partition("#")[0]) % 3 == 0)])
            for number in run.dropped:
                loader.observe(number, None)
        return [loader.prompt(number)["uid"] for number in range(40)]

    first, second = draws(0), draws(1)
    assert unfinished == "drop" or first == second


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, ["trainer.algorithm.policy_loss_type"]),
        ({"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}, []),
        ({"trainer.algorithm.policy_loss_type": "rollout_is"}, []),
        ({"trainer.oversampling.unfinished": "drop"}, []),
        ({"trainer.oversampling.ratio": 0}, []),
        (
            {"trainer.algorithm.policy_loss_type": "dppo", "trainer.oversampling.ratio": 5},
            ["trainer.oversampling.ratio"],
        ),
        (
            {"trainer.algorithm.policy_loss_type": "dppo", "generator.sampling_params.logprobs": "null"},
            ["generator.sampling_params.logprobs"],
        ),
        ({"trainer.fully_async.enabled": "true", "trainer.oversampling.ratio": 9}, []),
    ],
)
def test_what_contradicts_kept_prompts(keys, named):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.rules.training_rules import oversampling_problems

    keys = {"trainer.oversampling.ratio": 0.5} | keys
    cfg = SkyRLTrainConfig.from_cli_overrides([f"{key}={value}" for key, value in keys.items()])
    assert [problem.key for problem in oversampling_problems(cfg)] == named


def test_generators_that_finish_everything_are_named():
    from types import SimpleNamespace

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.sources.oversampled import OversampledRollouts

    class Own:
        pass

    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.oversampling.ratio=0.5"])
    loader = SimpleNamespace(prompt=None, ready=None)
    with pytest.warns(SkyRLMegatronWarning, match="Own finishes all trajectories that it starts"):
        OversampledRollouts(None, SimpleNamespace(cfg=cfg, train_dataloader=loader, generator=Own()))
