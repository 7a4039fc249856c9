"""Whole runs that start more prompts than a step trains, with real engines: what is cut continues, and so does a run
that is killed."""

import json
import signal

import pytest

from tests.job import runs
from tests.job.runs import AGREE

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

OVER = {
    "trainer__oversampling__ratio": 1.0,
    "trainer__oversampling__max_staleness_steps": 2,
    "trainer__algorithm__off_policy_correction__tis_ratio_type": "token",
    "generator__sampling_params__max_generate_length": 64,
    "generator__sampling_params__stop": "['1','3','7','9']",
    "generator__n_samples_per_prompt": 2,
}
ROUTED = {
    "trainer__policy__megatron_config__moe_enable_routing_replay": "true",
    "trainer__policy__megatron_config__moe_routing_replay_missing": "error",
    "generator__inference_engine__enable_return_routed_experts": "true",
    "generator__sampling_params__top_p": 0.9,
}
TURNS = {"generator__max_turns": 3, "generator__max_input_length": 160}
LONGER = {"generator__inference_engine__engine_init_kwargs": "{max_model_len: 384, kv_cache_memory_bytes: 33554432}"}
FREE = {"trainer__deterministic": "false"}
BODY = """
import hashlib, json, os, signal
from pathlib import Path
sampled = {}
def convert_to_training_input(self, generator_output, uids):
    batch = RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
    digest = hashlib.sha256(batch.tokens.numpy().tobytes() + batch.lengths.tobytes())
    for tensor in (batch.rollout_logprobs, batch.loss_mask, batch.rewards):
        digest.update(tensor.numpy().tobytes())
    digest.update(repr(generator_output["rollout_versions"]).encode())
    sampled[self.global_step] = digest.hexdigest()
    if self.global_step == int(os.environ.get("KILL_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    return batch
def finish(self):
    state = self.policy.state_hashes()
    (Path(self.cfg.trainer.ckpt_path) / "hashes.json").write_text(json.dumps([state, sampled]))
    RayPPOTrainer.finish(self)
Trainer.convert_to_training_input = convert_to_training_input
Trainer.finish = finish
"""


def hashes(folder):
    state, sampled = json.loads((folder / "ckpts/hashes.json").read_text())
    return state, {int(step): digest for step, digest in sampled.items()}


def open_groups(folder, step):
    from skyrl_megatron.sources.records import CODEC

    return dict(CODEC.decode((folder / f"ckpts/global_step_{step}/rollouts.bin").read_bytes()))


@pytest.mark.parametrize("turns", [{}, TURNS | LONGER], ids=["one turn", "turns"])
def test_a_killed_run_resumes_as_the_uninterrupted_one(tmp_path, turns):
    """SHA-256 over weights, moments, random states, and the ids, log-probs and versions of all later batches."""
    keys = OVER | turns | {"trainer__max_training_steps": 4, "trainer__ckpt_interval": 2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        runs.prepare(folder)
    lines = runs.run(whole, BODY, **keys).check().lines
    first = runs.finish(runs.start(killed, BODY, variables={"KILL_AT": "2"}, **keys), killed)
    assert first.returncode == -signal.SIGKILL
    kept = [sample for group in open_groups(killed, 2).values() for sample in group.samples.values()]
    assert sum(sample.begun is not None for sample in kept) >= 2, "turns that are cut"
    assert not turns or any(sample.turns for sample in kept)
    runs.run(killed, BODY, **keys).check()
    (state, sampled), (resumed, later) = hashes(whole), hashes(killed)
    assert resumed == state and later == {step: sampled[step] for step in (2, 3)}
    again = runs.Run(0, "", "", killed).lines
    for line, expected in zip(again[2:], lines[2:], strict=True):
        same = {name for name in expected if name.startswith(("oversampling/", "reward/", "loss/", "policy/grad"))}
        assert {name: line[name] for name in same} == {name: expected[name] for name in same}
    assert lines[3]["oversampling/mixed_rows"] > 0


@pytest.mark.parametrize(("turns", "routed"), [({}, {}), (TURNS, ROUTED)], ids=["one turn", "turns and routes"])
def test_requests_are_aborted_and_continued(tmp_path, turns, routed):
    """Without lockstep: engines abort what is left, and every token keeps log-prob, support, experts and version.

    New tokens agree with the trainer, which computes those before them with the new weights as the engine does. If it
    replays the experts of old tokens it does not quite.
    """
    folder = runs.prepare(tmp_path)
    keys = OVER | routed | FREE | LONGER | turns | {"generator__sampling_params__max_generate_length": 96}
    lines = runs.run(folder, BODY, **keys, trainer__max_training_steps=5, trainer__ckpt_interval=5).check().lines
    assert sum(line["oversampling/resumed_trajectories"] for line in lines) >= 4
    assert sum(line["oversampling/mixed_rows"] for line in lines) > 0
    for line in lines:
        assert line["oversampling/open_groups"] == 4 and line["oversampling/staleness_max"] <= 2
        assert routed or line.get("oversampling/logprob_diff_lag_0", 0.0) <= AGREE
        assert not routed or line["policy/moe_routing_replayed"] > 0.5
    parts = [one.begun for group in open_groups(folder, 5).values() for one in group.samples.values() if one.begun]
    for part in [each.generation for each in parts]:
        assert len(part.logprobs) == len(part.token_ids) == part.versions[-1][2]
        assert not routed or (part.routed_experts is not None and len(part.support) == len(part.token_ids))
    assert parts


def test_dropped_groups_leave_a_run_on_policy(tmp_path):
    folder = runs.prepare(tmp_path)
    drop = {"trainer__oversampling__unfinished": "drop", "trainer__algorithm__dynamic_sampling__type": "filter"}
    keys = {name: value for name, value in OVER.items() if "staleness" not in name and "tis" not in name}
    lines = runs.run(folder, **keys | drop | FREE, trainer__max_training_steps=3).check().lines
    for line in lines:
        batches = line["generate/sampled_batches"]
        assert line["oversampling/dropped_groups"] == 4 * batches and line["oversampling/open_groups"] == 0
        assert line[runs.GAP] <= AGREE and line["oversampling/token_lag_mean"] == 0
