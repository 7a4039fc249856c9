"""What the dashboard gets of trajectories, against their graphs and rows."""

from __future__ import annotations

import json

import pytest

from tests.agents.graphs import random_graph


class Numbers:
    """A tokenizer whose tokens are words."""

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("rule", ["all", "final", "calls"])
@pytest.mark.parametrize("seed", range(5))
def test_a_record_is_what_the_graph_and_the_rows_are(tmp_path, seed, rule):
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind, rows_of
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

    graph = random_graph(seed, 12)
    records = TrajectoryRecords(tmp_path / "kept", Numbers(), 4, 1)
    outcomes = Outcome(OutcomeKind.FAILED, -1.0), Outcome(OutcomeKind.INFRASTRUCTURE, why="lost")
    for outcome in outcomes:
        records.write(3, TrajectoryID("a", 1), graph, outcome, rule, "")
    sample, none = map(json.loads, (tmp_path / "kept/step_3.jsonl").read_text().splitlines())
    rows = rows_of(graph, rule)
    assert (sample["reward"], sample["forks"], sample["rows"]) == (-1.0, graph.forks(), len(rows))
    for call, written in zip(graph.calls, sample["calls"], strict=True):
        assert written["parent"] == (call.parent.number if call.parent else None)
        path = [call.number]
        while sample["calls"][path[-1]]["parent"] is not None:
            path.append(sample["calls"][path[-1]]["parent"])
        said = " ".join(f"{sample['calls'][n]['prompt']} {sample['calls'][n]['answer']}" for n in path[::-1])
        assert [int(token) for token in said.split()] == call.ids
    for number, row in enumerate(rows):
        targets = sum(call["sampled"] for call in sample["calls"] if call["row"] == number)
        assert targets == row.loss_mask.sum() > 0
    assert (none["outcome"], none["why"], none["reward"], none["rows"]) == ("infrastructure", "lost", None, 0)
    assert {call["row"] for call in none["calls"]} == {None}


def test_some_trajectories_of_some_steps_are_chosen(tmp_path):
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

    ids = [TrajectoryID(uid, number) for uid in "abc" for number in range(3)]
    records = TrajectoryRecords(tmp_path, Numbers(), 4, 5)
    assert records.chosen(2, ids) == []
    assert records.chosen(6, ids) == [*ids[:2], *ids[3:5]]
    assert records.chosen(6, ids) == [] and len(records.chosen(1, ids[6:])) == 2
    assert TrajectoryRecords(tmp_path, Numbers(), 0, 0).chosen(1, ids) == []


def test_long_texts_lose_their_middle(tmp_path):
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

    text = TrajectoryRecords(tmp_path, Numbers(), 4, 1)._text(list(range(5000)))
    assert text.startswith("0 1 ") and text.endswith(" 4999") and "4000 tokens" in text and " 2500 " not in text


class Recording:
    """A generator of trajectories that agents make."""

    records = None


def test_a_run_sets_where_its_generator_writes(tmp_path):
    """In the steps of the samples. A resumed run drops those of later steps, a new one all."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.recorders import RecordedRun
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecorder

    keys = {"trainer.log_path": str(tmp_path), "trainer.samples_per_step": 4, "trainer.samples_per_run": 8}
    cfg = SkyRLTrainConfig.from_cli_overrides(keys)
    generator, folder = Recording(), tmp_path / "skyrl/test_run/trajectories"
    recorder = TrajectoryRecorder(RecordedRun(cfg, Numbers(), 10, generator, None, dict))
    records = generator.records
    assert (records.folder, records.most, records.interval) == (folder, 4, 5)
    folder.mkdir(parents=True)
    for step in (1, 6):
        (folder / f"step_{step}.jsonl").touch()
    recorder.on_load(3)
    assert [path.name for path in folder.iterdir()] == ["step_1.jsonl"]
    recorder.on_load(None)
    assert not folder.exists()
    TrajectoryRecorder(RecordedRun(cfg, Numbers(), 10, object(), None, dict))  # a generator without agents
