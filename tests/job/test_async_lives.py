"""Whole asynchronous runs that are killed (-9): trajectories under way go on, and groups are trained once."""

import json
import signal
import time
from collections import Counter

import pytest

from tests.job import runs
from tests.job.test_fully_async import AHEAD, NOTES, notes

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

TALKS = '''
import itertools, json, os, threading, time
from pathlib import Path
from skyrl_megatron.envs import BaseTextEnv

count, lock = itertools.count(), threading.Lock()


class Talks(BaseTextEnv):
    """Three turns; writes down every action. While the file `stuck` is there, nobody is answered in the third."""

    def init(self, prompt):
        self.number, self.said = f"{os.getpid()}-{next(count)}", []
        self.row = int(prompt[-1]["content"].partition("+")[0]) - 11
        return super().init(prompt)

    def step(self, action):
        self.said.append(action)
        with lock, open("said.jsonl", "a") as file:
            file.write(json.dumps({"env": self.number, "row": self.row, "said": self.said}) + chr(10))
        if len(self.said) == 3 and Path("stuck").exists():
            time.sleep(600)
        reward = sum(character.isdigit() for character in action) / 6
        done = len(self.said) == 3
        again = [] if done else [{"role": "user", "content": "more"}]
        return {"observations": again, "reward": reward, "done": done, "metadata": {}}
'''
THREE_TURNS = {
    "environment__env_class": "talks",
    "generator__max_turns": 3,
    "generator__max_input_length": 110,
    "generator__use_conversation_multi_turn": "true",
    "trainer__max_training_steps": 2,
    "trainer__ckpt_interval": 1,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return runs.prepare(tmp_path)


def conversations(folder):
    """Row of the data and actions of each environment, as far as it came."""
    last = {}
    for line in (folder / "said.jsonl").read_text().splitlines():
        each = json.loads(line)
        last[each["env"]] = (each["row"], tuple(each["said"]))
    return Counter(last.values())


def test_trajectories_under_way_go_on(folder):
    """The first life is killed while all of its trajectories wait in their third turn: the second steps new
    environments through the same two turns and samples the third, whose answer was not on the disk."""
    (folder / "talks.py").write_text(TALKS)
    (folder / "stuck").touch()
    body = NOTES + 'register("talks", "talks:Talks")\n'
    keys = AHEAD | THREE_TURNS
    process = runs.start(folder, body, **keys)
    try:
        deadline = time.monotonic() + runs.TIMEOUT_S
        waiting = 0
        while waiting < 16:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.5)
            if (folder / "said.jsonl").exists():
                waiting = sum(len(said) == 3 for _, said in conversations(folder))
        process.kill()
        process.communicate(timeout=120)
    finally:
        process.kill()
    before = Counter({(row, said[:2]): many for (row, said), many in conversations(folder).items() if len(said) == 3})
    for name in ("stuck", "said.jsonl"):
        (folder / name).unlink()

    done = runs.run(folder, body, **keys).check()
    after = Counter()
    for (row, said), many in conversations(folder).items():
        assert len(said) == 3
        after[row, said[:2]] += many
    assert not before - after, "the same actions, of the same prompts"
    assert sum(line["async/resumed_trajectories"] for line in done.lines) >= 16
    assert sum(line["async/restarted_trajectories"] for line in done.lines) == 0
    numbers = [number for note in notes(folder) for number in note["numbers"]]
    assert len(numbers) == len(set(numbers)) == 8


COUNTED = """
from digits import Digits


class Counted(Digits):
    def step(self, action):
        with open("sampled.txt", "a") as file:
            file.write(action.encode().hex() + chr(10))
        return super().step(action)
"""
KILLS = """
import os, signal
PLACE, STEP = os.environ.get("KILL_IN", ""), int(os.environ.get("KILL_AT", "-1"))

def dies(kind, name, when):
    method = getattr(kind, name)
    def call(self, *args, **kwargs):
        mine = PLACE == f"{when} {name}" and self.global_step == STEP
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(self, *args, **kwargs)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(kind, name, call)

for name in ("sample_batch", "train_critic_and_policy", "save_checkpoints", "sync_weights", "eval", "log_step"):
    for when in ("before", "after"):
        dies(Trainer, name, when)
"""
DEATHS = [
    ("after sample_batch", 0),
    ("after train_critic_and_policy", 0),
    ("after save_checkpoints", 1),
    ("before sync_weights", 2),
    ("after eval", 3),
    ("before save_checkpoints", 4),
]
"""Where each life ends, and at which step of the trainer."""


@pytest.mark.timeout(1500)
def test_a_run_that_dies_in_every_phase_trains_each_group_once(folder):
    """Six lives and a last one: what any of them finished is never sampled anew, and the schedule has each group once.

    Groups of step n may be trained twice only when step n itself was lost with its checkpoint: they are the same."""
    (folder / "counted.py").write_text(COUNTED)
    body = NOTES + KILLS + 'register("counted", "counted:Counted")\n'
    keys = AHEAD | {
        "environment__env_class": "counted",
        "trainer__ckpt_interval": 1,
        "trainer__eval_interval": 1,
        "trainer__max_training_steps": 6,
    }
    for place, step in DEATHS:
        process = runs.start(folder, body, variables={"KILL_IN": place, "KILL_AT": str(step)}, **keys)
        out, err = process.communicate(timeout=runs.TIMEOUT_S)
        assert process.returncode == -signal.SIGKILL, f"{place} of step {step}: {out[-3000:]}\n{err[-3000:]}"
    done = runs.run(folder, body, **keys).check()
    assert [line["step"] for line in done.lines] == [1, 2, 3, 4, 5, 6]
    assert all("eval/all/avg_score" in line for line in done.lines)
    by_step: dict = {}
    for note in notes(folder):
        same = by_step.setdefault(note["step"], note)
        assert same == note, f"step {note['step']} was repeated from the same groups"
        oldest = min(int(version) for version, _, _ in note["versions"])
        assert note["step"] - 1 <= oldest <= note["step"]
    numbers = [number for step in range(6) for number in by_step[step]["numbers"]]
    assert sorted(by_step) == list(range(6)) and len(set(numbers)) == len(numbers) == 24
    steps = runs.schedule_of(folder / "ckpts/rollouts/schedule")
    assert [[group.number for group in step.groups if group.trained] for step in steps] == [
        by_step[step]["numbers"] for step in range(6)
    ]
