"""Whole runs whose rollouts run ahead: real Ray, Megatron ranks and vLLM engine."""

import json
import signal

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

AHEAD = {
    "trainer__fully_async__enabled": "true",
    "trainer__fully_async__max_staleness_steps": 1,
    "trainer__algorithm__off_policy_correction__tis_ratio_type": "token",
    "trainer__policy_mini_batch_size": 2,
    "trainer__max_training_steps": 5,
}
NOTES = """
import json
from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer
class Trainer(FullyAsyncRayPPOTrainer):
    def sample_batch(self):
        output, uids = super().sample_batch()
        groups = self.rollouts.taken[-self.cfg.trainer.train_batch_size:]
        versions = [span for row in output["rollout_versions"] for span in row]
        ids = [[int(token) for token in row] for row in output["response_ids"]]
        with open("notes.jsonl", "a") as file:
            note = {"step": self.global_step, "numbers": [g.number for g in groups], "versions": versions, "ids": ids}
            file.write(json.dumps(note) + chr(10))
        return output, uids
"""
"""Takes down which groups each step was given, their tokens, and which versions sampled them."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return runs.prepare(tmp_path)


def notes(folder):
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


FAILS_OFTEN = '''
import hashlib, time
from skyrl_megatron.envs import BaseTextEnv


class Moody(BaseTextEnv):
    """Every fourth prompt has an environment that breaks; every fifth takes its time."""

    def init(self, prompt):
        self.kind = int(prompt[-1]["content"].partition("+")[0])
        return super().init(prompt)

    def step(self, action):
        if self.kind % 4 == 0:
            raise RuntimeError("broken")
        time.sleep(3.0 if self.kind % 5 == 0 else 0.3)
        reward = sum(character.isdigit() for character in action) / 6
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
'''
MOODY = 'register("moody", "moody:Moody")\n'


def test_sampling_runs_ahead_within_the_bound(folder):
    """Several mini-batches a step; environments that break and dawdle cost their own groups; the second command goes
    on where the first was asked to end, and no group is trained twice."""
    (folder / "moody.py").write_text(FAILS_OFTEN)
    keys = AHEAD | {"environment__env_class": "moody", "trainer__ckpt_interval": 1}
    process = runs.start(folder, NOTES + MOODY, **keys | {"trainer__max_training_steps": 40})
    try:
        for line in process.stdout:
            if "step 3/40" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=runs.TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130, err[-4000:]
    saved = int((folder / "ckpts/latest_ckpt_global_step.txt").read_text())
    assert 3 <= saved <= 5 and f"stopped after step {saved}" in out
    first = [note for note in notes(folder) if note["step"] < saved]
    (folder / "notes.jsonl").unlink()
    done = runs.run(folder, NOTES + MOODY, **keys | {"trainer__max_training_steps": saved + 2}).check()
    assert f"(step {saved} of {saved + 2})" in done.out and "is skipped: DataError: 4 of 4 traj" in out + done.out
    taken = [*first, *notes(folder)]
    numbers = [number for note in taken for number in note["numbers"]]
    assert [note["step"] for note in taken] == list(range(saved + 2))
    assert len(numbers) == len(set(numbers)) == 4 * (saved + 2), "each group is trained once"
    for note in taken:
        oldest = min(int(version) for version, _, _ in note["versions"])
        assert note["step"] - 1 <= oldest <= note["step"]
    lines = done.lines
    assert max(line["async/staleness_max"] for line in lines) == 1.0
    assert sum(line["async/failed_groups"] for line in lines) >= 1
    assert all(line["async/pause_seconds"] > 0 for line in lines[:-1])
    assert all("policy/final_loss" in line for line in lines)


NAMES = """
import json
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
sample = SkyRLGymGenerator.generate
async def generate(self, batch, **options):
    step = batch["batch_metadata"].global_step
    with open("names.jsonl", "a") as file:
        file.writelines(json.dumps([step, id.to_string()]) + chr(10) for id in batch["trajectory_ids"])
    return await sample(self, batch, **options)
SkyRLGymGenerator.generate = generate
"""


def test_a_prompt_that_is_in_flight_twice_has_two_names(folder):
    """The gateway of agents, seeds and partial trajectories go by a trajectory's name and step."""
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:4]))
    done = runs.run(folder, NOTES + NAMES, **AHEAD | {"trainer__max_training_steps": 3}).check()
    assert [line["step"] for line in done.lines] == [1, 2, 3]
    names = [tuple(json.loads(line)) for line in (folder / "names.jsonl").read_text().splitlines()]
    assert len(names) == 3 * 4 * 4 == len(set(names))
    prompts = {(step, name.partition("#")[0].partition("_")[0]) for step, name in names}
    assert len(prompts) < 3 * 4, "no prompt was in flight twice"
    assert {name.partition("#")[0].partition("_")[0] for _, name in names} == {"0", "1", "2", "3"}


@pytest.mark.full_matrix
def test_a_metric_ends_the_run(folder):
    """While engines sample for later steps; with checkpoint and export. The same command has nothing left to do, and
    without the condition the run continues, with what was sampled for it."""
    held_out = {"data__eval_sets": f"{{sums: {{data: ['{folder}/prompts.jsonl'], n: 2, temperature: 1.0}}}}"}
    keys = AHEAD | held_out | {"data__val_data": "[]", "trainer__eval_interval": 1, "trainer__hf_save_interval": 4}
    ends = keys | {"trainer__stop_when": "eval/sums/pass_at_2 >= 0"}
    done = runs.run(folder, NOTES, **ends).check()
    assert "ended after step 1 of 5: trainer.stop_when='eval/sums/pass_at_2 >= 0' (eval/sums/pass_at_2 is " in done.out
    assert [line["step"] for line in done.lines] == [1] and done.lines[0]["eval/sums/pass_at_2"] > 0
    assert (folder / "ckpts/global_step_1").is_dir() and (folder / "exports/global_step_1/policy").is_dir()
    again = runs.run(folder, NOTES, **ends).check()
    assert "nothing left to do: the checkpoint of step 1 of 5 exists" in again.out and "engines: " not in again.out
    runs.run(folder, NOTES, **keys | {"trainer__max_training_steps": 3}).check()
    taken = notes(folder)
    numbers = [number for note in taken for number in note["numbers"]]
    assert [note["step"] for note in taken] == [0, 1, 2]
    assert len(numbers) == len(set(numbers)) == 12, "each group is trained once"


def weights(folder, step):
    from safetensors.numpy import load_file

    files = sorted((folder / f"exports/global_step_{step}/policy").glob("*.safetensors"))
    return {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


@pytest.mark.full_matrix
def test_bound_0_is_the_synchronous_run(folder, tmp_path):
    """Numbers of every step and exported weights, bit for bit."""
    other = tmp_path / "other"
    other.mkdir()
    runs.prepare(other)
    keys = {"trainer__hf_save_interval": 2, "trainer__policy_mini_batch_size": 2}
    plain = runs.run(folder, **keys).check()
    bound = {"trainer__fully_async__enabled": "true", "trainer__fully_async__max_staleness_steps": 0}
    body = "from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer as Trainer\n"
    ahead = runs.run(other, body, **keys | bound).check()
    lasting = ("policy/", "reward/", "loss/", "generate/avg_num")
    for one, two in zip(plain.lines, ahead.lines, strict=True):
        kept = [name for name in one if name.startswith(lasting) and "_per_" not in name and "memory" not in name]
        assert len(kept) > 18 and {name: two[name] for name in kept} == {name: one[name] for name in kept}
    assert weights(folder, 2) == weights(other, 2) != {}


KILLS_THE_ENGINE = """
import psutil
def begin_training(self):
    FullyAsyncRayPPOTrainer.begin_training(self)
    if self.global_step == 1:
        slot, = self.inference_engine_client.pool.slots
        assert slot.in_flight
        for pid in self.loop.run(slot.engine.process_ids())[1:]:
            psutil.Process(pid).kill()
Trainer.begin_training = begin_training
"""


@pytest.mark.full_matrix
def test_an_engine_that_dies_mid_stream_is_replaced(folder):
    """While the ranks train, with requests in flight: they are sampled again once the next version is there."""
    long = {"generator__sampling_params__max_generate_length": 90}
    done = runs.run(folder, NOTES + KILLS_THE_ENGINE, **AHEAD, **long).check()
    assert [line["step"] for line in done.lines] == [1, 2, 3, 4, 5]
    numbers = [number for note in notes(folder) for number in note["numbers"]]
    assert sorted(numbers) == list(range(20))
    assert max(line["async/staleness_max"] for line in done.lines) <= 1.0
    assert all(line["async/failed_groups"] == 0 for line in done.lines)


KILLS_A_RANK = """
from tests.faults import injection
injection.arm("policy 1", "SIGKILL", "policy_train", 2)
injection.arm("policy 0", "SIGKILL", "sync_weights", 3)
"""


@pytest.mark.full_matrix
def test_ranks_that_die_mid_stream_are_replaced(folder):
    """Sampling goes on meanwhile; each group is trained once, and none is too old."""
    done = runs.run(folder, NOTES + KILLS_A_RANK, **AHEAD, trainer__healing__enabled="true").check()
    assert [line["step"] for line in done.lines] == [1, 2, 3, 4, 5]
    assert sum(line["trainer/healings"] for line in done.lines) == 2
    assert sorted(number for note in notes(folder) for number in note["numbers"]) == list(range(20))
    assert max(line["async/staleness_max"] for line in done.lines) <= 1.0


COUNTED = """
from digits import Digits


class Counted(Digits):
    def init(self, prompt):
        with open("sampled.txt", "a") as file:
            file.write(str(int(prompt[-1]["content"].partition("+")[0]) - 11) + chr(10))
        return super().init(prompt)
"""
"""Takes down which row of the data each of its trajectories is of."""


@pytest.mark.full_matrix
def test_what_was_sampled_outlives_a_killed_run(folder):
    """Killed behind the checkpoint of step 2, when step 3 is over: the same command takes step 3 from the disk, bit
    for bit, samples nothing anew that was finished, and trains each group once."""
    from skyrl_megatron.data.journal import Journal
    from skyrl_megatron.sources.records import CODEC, FinishedGroup

    (folder / "counted.py").write_text(COUNTED)
    body = NOTES + 'register("counted", "counted:Counted")\n'
    keys = AHEAD | {"environment__env_class": "counted", "trainer__ckpt_interval": 2}
    process = runs.start(folder, body, **keys)
    try:
        for line in process.stdout:
            if "step 3/5" in line:
                break
        process.kill()
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL, err[-4000:]
    first = notes(folder)
    journal = Journal(folder / "ckpts/rollouts/groups")
    records = [CODEC.decode(payload) for _, payload in journal.records()]
    journal.close()
    finished = {record.number: record.uid for record in records if isinstance(record, FinishedGroup)}
    assert set(first[2]["numbers"]) <= set(finished), "on the disk before they were trained on"
    for name in ("sampled.txt", "notes.jsonl"):
        (folder / name).unlink()

    done = runs.run(folder, body, **keys).check()
    assert "(step 2 of 5)" in done.out and "rollouts: " in done.out
    second = notes(folder)
    assert second[0] == first[2], "the step that was lost is taken again as it was"
    again = set((folder / "sampled.txt").read_text().split())
    assert again and again.isdisjoint(finished.values()), "nothing that was finished is sampled again"
    for note in second:
        oldest = min(int(version) for version, _, _ in note["versions"])
        assert note["step"] - 1 <= oldest <= note["step"]
    steps = runs.schedule_of(folder / "ckpts/rollouts/schedule")
    taken = [[group.number for group in step.groups if group.trained] for step in steps]
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert taken == [note["numbers"] for note in [*first[:2], *second]]
    numbers = [number for batch in taken for number in batch]
    assert len(numbers) == len(set(numbers)) == 20, "each group is trained once"
