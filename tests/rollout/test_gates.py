"""Gates: what each refuses, that batches fill up without it, and that it is no observation that it was not."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.errors import ConfigError, DataError
from tests.rollout.test_batches import output_of, sampler, taken
from tests.stream.clock import simulate


def refusal(gates, rewards, version=0, **more):
    from skyrl_megatron.rollout.gates import Gates

    return Gates(gates).refusal(output_of(rewards, ["a"] * len(rewards), **more), version)


def test_rewards():
    gate = {"reward": {"low": 0.25, "high": 0.75}}
    assert refusal(gate, [0.0, 0.5]) is None and refusal(gate, [0.5, 1.0]) is None  # both ends are within
    assert refusal(gate, [0.0, 0.25]) == "reward" and refusal(gate, [1.0, 1.0]) == "reward"
    assert refusal(gate, [-1.0, 2.0]) is None and refusal({"reward": {"high": 0.75}}, [-9.0]) is None
    assert refusal(gate, [0.5, 9.0], errors=[None, "failed"]) is None
    assert refusal(gate, [0.5], errors=["failed"]) == "reward" and refusal(gate, [float("nan")]) == "reward"
    assert refusal(gate, [0.5, [0.0, 0.25]], is_last_step=[False, True]) is None
    assert refusal(gate, [9.0, [0.25, 0.25]], is_last_step=[False, True]) == "reward", "the sum of all rows counts"


def test_lengths_and_numbers():
    assert refusal({"length": {"high": 2}}, [0.0]) is None and refusal({"length": {"low": 2}}, [0.0]) is None
    assert refusal({"length": {"high": 1}}, [0.0]) == "length" and refusal({"length": {"low": 3}}, [0.0]) == "length"
    rows = [np.asarray([1, 2]), np.asarray([1, 2, 3])]
    assert refusal({"length": {"high": 2}}, [0.0, 0.0], response_ids=rows) == "length"  # one is too many
    assert refusal({"nonfinite": {}}, [0.0]) is None
    assert refusal({"nonfinite": None}, [0.0, [0.0, float("inf")]]) == "nonfinite"
    assert refusal({"nonfinite": {}}, [0.0], rollout_logprobs=[[-1.0, float("nan")]]) == "nonfinite"


def test_staleness_counts_trained_tokens():
    spans, gate = [[("3", 0, 1), ("5", 1, 2)]], {"staleness": {"high": 2}}
    assert refusal(gate, [0.0], 5, rollout_versions=spans) is None
    assert refusal(gate, [0.0], 6, rollout_versions=spans) == "staleness"
    assert refusal(gate, [0.0], 6, rollout_versions=spans, loss_masks=[[0, 1]]) is None
    assert refusal(gate, [0.0], 6, rollout_versions=[[("base", 0, 2)]]) is None and refusal(gate, [0.0], 9) is None


def test_wrong_gates_are_errors_together():
    from skyrl_megatron.rollout.gates import Gates

    wrong = {"rewards": {}, "reward": {}, "length": {"high": 0}, "staleness": {"low": 1}, "nonfinite": 3}
    with pytest.raises(ConfigError) as error:
        Gates(wrong)
    names = [problem.key.rpartition("gates.")[2] for problem in error.value.problems]
    assert names == ["rewards", "reward.low", "length.high", "staleness.low", "nonfinite"]
    with pytest.raises(ConfigError, match=r"low=0.5: must be at most trainer\.algorithm\.dynamic_sampling\.gates"):
        Gates({"reward": {"low": 0.5, "high": 0.25}})


def test_a_gate_of_a_plugin(monkeypatch):
    from skyrl_megatron.plugins import GATES, register_gate
    from skyrl_megatron.rollout.gates import Gate, Gates

    monkeypatch.setattr(GATES, "_classes", {})

    @register_gate("odd")
    class Odd(Gate):
        Options = type("Options", (BaseConfig,), {})

        def admits(self, group, version):
            return group["metadata"] if version == 9 else version % 2 == 1

    gates = Gates({"odd": {}})
    group = output_of([0.0], ["a"])
    assert gates.refusal(group, 1) is None and gates.refusal(group, 2) == "odd" and not gates.observed("odd")
    with pytest.raises(DataError, match=r"gates.odd failed \(KeyError: 'metadata'"):
        gates.refusal(group, 9)


# ------------------------------------------------------------------ batches
def test_a_batch_fills_up_without_refused_prompts():
    uids = ["a", "a", "b", "b"]
    for kind in (None, "filter"):
        collecting = sampler(kind)
        collecting.refused = {"a"}
        assert collecting.add(output_of([1.0, 0.0, 0.0, 1.0], uids), uids) is None
        made = collecting.add(output_of([0.0, 1.0, 1.0, 0.0], ["c", "c", "d", "d"]), ["c", "c", "d", "d"])
        assert taken(made) == ([2, 3, 0, 1], ["b", "b", "c", "c"]) and not collecting.refused
        assert collecting.sampled_batches == 0
    plain = sampler(None)
    assert taken(plain.add(output_of([1.0, 1.0, 0.0, 0.0], uids), uids)) == ([0, 1, 2, 3], uids)  # no filter
    replacing = sampler("replace")
    replacing.refused = {"a"}
    assert taken(replacing.add(output_of([1.0, 0.0, 0.0, 1.0], uids), uids)) == (
        [2, 3, 2, 3],
        ["b", "b", "b#1", "b#1"],
    )
    limited = sampler(None, limit=1)
    limited.refused = {"a"}
    with pytest.raises(DataError, match=r"max_sample_batches=1: too few prompts .* passed the gates"):
        limited.add(output_of([1.0, 0.0, 0.0, 1.0], uids), uids)


def test_what_a_synchronous_run_counts_and_observes():
    """The parts of a step around the source are as small as can be; source, sampler, loader and gates are real."""
    from skyrl_megatron.rollout.gates import Gates
    from skyrl_megatron.sources.run_state import RunState
    from skyrl_megatron.sources.source import PromptRollouts
    from tests.prompts.test_samplers import loader_of, sampled

    loader = loader_of("pools", sampled([80]), 2)
    gates = {"reward": {"high": 0.9}, "length": {"high": 4}}
    seen = []

    def sample_batch():
        batch = next(source.prompts)
        uids = [entry["uid"] for entry in batch for _ in range(2)]
        seen.append([entry["uid"] for entry in batch])
        turn = len(seen)
        rewards = {1: [1.0, 1.0, 0.0, 1.0], 2: [0.0, 1.0, 0.0, 1.0], 3: [0.0, 1.0, 1.0, 0.0]}[turn]
        more = {"response_ids": [np.arange(9)] * 2 + [np.arange(2)] * 2} if turn == 2 else {}
        return output_of(rewards, uids, **more), uids

    parts = SimpleNamespace(
        train_dataloader=loader,
        gates=Gates(gates),
        sampler=sampler(None),
        sample_batch=sample_batch,
        postprocess_generator_output=lambda output, uids: output,
        note_rows=lambda output: None,
        convert_to_training_input=lambda output, uids: uids,
    )
    parts.handle_dynamic_sampling = parts.sampler.add
    run = RunState(total_steps=1, position={}, phases=lambda name: nullcontext(), say=print)
    source = PromptRollouts(run, parts)
    trained = source.next_batch()
    assert run.metrics == {"generate/refused_by_reward": 1.0, "generate/refused_by_length": 1.0}
    assert trained == [seen[0][1]] * 2 + [seen[1][1]] * 2
    next(source.prompts)  # draws after all observations
    latest = {str(row): value for row, value in enumerate(loader.sampler.latest) if not np.isnan(value)}
    assert latest == {seen[0][0]: 1.0, seen[0][1]: 0.5, seen[1][1]: 0.5}  # too easy is known; too long is not


def test_what_a_stream_refuses():
    """Simulated time: refused groups are replaced, counted by gate, and observed as the gate says."""
    from skyrl_megatron.sources.rollout_stream import RolloutStream, StreamLimits

    observed, ages, taken_numbers = {}, [], []

    async def run():
        published = 0

        async def sample(group):
            await asyncio.sleep(30.0 if group.number % 7 == 3 else 1.0)
            return {"number": group.number, "loss_masks": [[1]], "rollout_versions": [[(str(group.started), 0, 1)]]}

        stream = RolloutStream(
            sample,
            lambda number: {"uid": str(number)},
            StreamLimits(batch=2, steps=12, bound=3, workers=64, timeout_s=500.0, oldest=1),
            refusal=lambda output, version: {0: "seen", 1: "unseen"}.get(output["number"] % 5),
            refused_is_observed=lambda gate: gate == "seen",
            observe=lambda number, output: observed.setdefault(number, output is not None),
        )
        stream.start(0)
        counts = {}
        for version in range(12):
            groups = await stream.take()
            ages.extend(stream.staleness(groups))
            taken_numbers.extend(group.number for group in groups)
            await asyncio.sleep(3.0)
            for name, value in stream.metrics().items():
                counts[name] = counts.get(name, 0) + value
            stream.trained(groups)
            published = version + 1
            stream.advance(published)
        await stream.close()
        return counts

    counts, _ = simulate(run())
    assert len(taken_numbers) == 24 and not {number % 5 for number in taken_numbers} & {0, 1}
    assert max(ages) == 1 and counts["generate/refused_by_staleness"] > 0
    for gate, rest in (("seen", 0), ("unseen", 1)):
        found = [number for number in observed if number % 5 == rest]
        assert counts[f"generate/refused_by_{gate}"] == len(found) > 2
        assert all(observed[number] == (gate == "seen") for number in found)
    assert all(observed[number] for number in taken_numbers)
