"""Layouts, engines, estimators, exact resumption: many whole runs, on request (``--layouts=all``)."""

import json

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

MEGATRON = "trainer__policy__megatron_config__"
LAYOUTS = {
    "dp2": {"expert_model_parallel_size": 1},
    "ep2": {},
    "tp2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
    "pp2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1},
    "cp2": {"context_parallel_size": 2, "expert_model_parallel_size": 1},
}


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


def first_step(folder, layout):
    runs.prepare(folder)
    keys = {MEGATRON + key: value for key, value in LAYOUTS[layout].items()}
    (line,) = runs.run(folder, trainer__max_training_steps=1, **keys).check().lines
    return line


@pytest.fixture(scope="module")
def ep2(tmp_path_factory):
    return first_step(tmp_path_factory.mktemp("ep2"), "ep2")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep2"])
def test_first_step_is_the_same_at_every_layout(tmp_path, ep2, layout):
    """The same seeds sample the same responses; the gradient norm agrees to 1e-4."""
    line = first_step(tmp_path, layout)
    assert line["reward/avg_raw_reward"] == ep2["reward/avg_raw_reward"]
    assert max(line[GAP], ep2[GAP]) <= AGREE
    assert abs(line["policy/grad_norm"] - ep2["policy/grad_norm"]) <= 1e-4 * ep2["policy/grad_norm"]


@pytest.mark.parametrize("estimator", ["rloo", "maxrl"])
def test_estimators(folder, estimator):
    lines = runs.run(folder, trainer__algorithm__advantage_estimator=estimator).check().lines
    assert all(line["policy/grad_norm"] > 0 and line[GAP] <= AGREE for line in lines)


TWO_REWARDS = """
import json
from digits import Digits
class Both(Digits):
    def get_metrics(self):
        said = "".join(message["content"] for message in self.said)
        return {"figures": sum(c.isdigit() for c in said) / 6, "letters": float(sum(c.isalpha() for c in said))}
    def step(self, action):
        self.said = [{"content": action}]
        return super().step(action)
register("both", Both)
def compute_advantages_and_returns(self, batch):
    parts, uids = batch.reward_parts.tolist(), list(batch.uids)
    batch = RayPPOTrainer.compute_advantages_and_returns(self, batch)
    padded = batch.padded()
    found = (padded.advantages * padded.response_mask).sum(1) / padded.response_mask.sum(1)
    with open(self.cfg.trainer.log_path + "/parts.jsonl", "a") as file:
        file.write(json.dumps({"parts": parts, "uids": uids, "found": found.tolist()}) + chr(10))
    return batch
Trainer.compute_advantages_and_returns = compute_advantages_and_returns
"""


def gdpo(parts, uids):
    """GDPO's advantages by its definition, with numpy: each reward over its group, then their sum over the batch."""
    import numpy as np

    parts, uids = np.array(parts), np.array(uids)
    total = np.zeros(len(parts))
    for uid in set(uids.tolist()):
        rows = np.flatnonzero(uids == uid)
        for reward, weight in zip(parts[rows].T, (1.0, 0.25), strict=True):
            total[rows] += weight * (reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


def test_several_rewards(folder):
    """The advantages of a run with two rewards are those of the definition."""
    keys = {
        "trainer__algorithm__advantage_estimator": "gdpo",
        "trainer__algorithm__gdpo_weights": "{figures: 1.0, letters: 0.25}",
        "environment__env_class": "both",
    }
    lines = runs.run(folder, TWO_REWARDS, **keys).check().lines
    assert len(lines) == 2 and all(line["policy/grad_norm"] > 0 and line[GAP] <= AGREE for line in lines)
    notes = [json.loads(line) for line in (folder / "logs/parts.jsonl").read_text().splitlines()]
    assert len(notes) == 2
    for note in notes:
        assert note["found"] == pytest.approx(gdpo(note["parts"], note["uids"]).tolist(), abs=1e-5)
        assert max(map(abs, note["found"])) > 0.1


def test_two_engines(folder):
    lines = runs.run(folder, generator__inference_engine__num_engines=2).check().lines
    assert all(line[GAP] <= AGREE for line in lines)


def test_the_fsdp_key_runs_data_parallel(folder):
    keys = {MEGATRON + "expert_model_parallel_size": 1}
    lines = runs.run(folder, trainer__strategy="fsdp2", **keys).check().lines
    assert all(line["policy/grad_norm"] > 0 for line in lines)


FORGETS_THE_SUPPORT = """
def convert_to_training_input(self, generator_output, uids):
    batch = RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
    print("tokens sampled from a part:", sum(int((each.counts > 0).sum()) for each in batch.rollout_support))
    if self.global_step == 2:
        batch.rollout_support = []
    return batch
Trainer.convert_to_training_input = convert_to_training_input
"""


def test_samples_of_a_part_of_the_vocabulary(folder):
    """With top-p and top-k trainer and engine agree, as both take the softmax over what was sampled from. In the last
    step the trainer takes it over the whole vocabulary: log S apart."""
    part = {"generator__sampling_params__top_p": 0.9, "generator__sampling_params__top_k": 40}
    done = runs.run(folder, FORGETS_THE_SUPPORT, **part, trainer__max_training_steps=3).check()
    one, two, three = done.lines
    assert "tokens sampled from a part: 0" not in done.out
    for line in (one, two):
        assert line[GAP] <= AGREE and line["policy/grad_norm"] > 0
    assert three[GAP] > 0.1


HASHES = """
import json, hashlib
from pathlib import Path
sampled = hashlib.sha256()
def convert_to_training_input(self, generator_output, uids):
    batch = RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
    if self.global_step >= 2:
        sampled.update(batch.tokens.numpy().tobytes() + batch.lengths.tobytes())
    return batch
def finish(self):
    state = self.policy.state_hashes()
    Path(self.cfg.trainer.export_path).mkdir(exist_ok=True)
    (Path(self.cfg.trainer.export_path) / "hashes.json").write_text(json.dumps([state, sampled.hexdigest()]))
    RayPPOTrainer.finish(self)
Trainer.convert_to_training_input = convert_to_training_input
Trainer.finish = finish
"""


@pytest.mark.parametrize("sampler", ["shuffle", "pools"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, sampler):
    """SHA-256 over weights, moments, random states and all ids sampled after the checkpoint."""
    found = []
    for name, stops in {"whole": [4], "resumed": [2, 4]}.items():
        folder = tmp_path / name
        folder.mkdir()
        runs.prepare(folder)
        for stop in stops:
            keys = {"trainer__max_training_steps": stop, "trainer__ckpt_interval": 2, "data__sampler": sampler}
            runs.run(folder, HASHES, **keys).check()
        found.append((folder / "exports/hashes.json").read_text())
    assert found[0] == found[1]
