"""Runs with more roles than the policy: PPO with a critic, a reference that follows the policy."""

import json

import pytest

from tests.job import runs
from tests.job.test_run import AGREE, GAP

pytestmark = pytest.mark.vllm


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


def critic(folder, **more):
    """PPO with a critic on one rank, beside a policy whose experts lie on two; both λ differ."""
    keys = {
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__algorithm__lambd": 0.9,
        "trainer__algorithm__gae__critic_lambd": 1.0,
        "trainer__critic__model__path": folder / "model",
        "trainer__critic_mini_batch_size": 2,
        "trainer__placement__critic_num_gpus_per_node": 1,
        "trainer__critic__megatron_config__expert_model_parallel_size": 1,
        "trainer__critic__optimizer_config__lr": 1e-3,
    }
    return keys | more


TURNS = ("generate", "fwd_logprobs_values_reward", "critic_train", "policy_train")
TAKE_TURNS = """
def train_steps(self):
    self.cfg.trainer.placement.colocate_all = True  # from here on they take turns, as if they shared GPUs
    RayPPOTrainer.train_steps(self)
Trainer.train_steps = train_steps
def begin_training(self):
    for role in self.roles.values():
        role.offload()
    RayPPOTrainer.begin_training(self)
Trainer.begin_training = begin_training
"""


def test_ppo_with_a_critic(folder):
    """A step in which the critic learns alone, and one of both; the two take turns, and are saved and exported."""
    done = runs.run(
        folder, TAKE_TURNS, **critic(folder, trainer__critic_warmup_steps=1, trainer__hf_save_interval=2)
    ).check()
    one, two = done.lines
    for line in (one, two):
        assert line[GAP] <= AGREE and line["critic/critic_loss"] > 0 and line["critic/grad_norm"] > 0
        assert {
            "critic/values_mean",
            "critic/values_clipfrac",
            "critic/returns_mean",
            "critic/explained_variance",
            "critic/critic_lr",
            "timing/critic_train",
        } <= line.keys()
    assert "policy/grad_norm" not in one and two["policy/grad_norm"] > 0
    held = {role: [two[f"memory/{phase}_{role}_gb"] for phase in TURNS] for role in ("policy", "critic")}
    assert [size > 0 for size in held["critic"]] == [False, True, True, False], "it leaves before the policy trains"
    assert held["policy"][1:3] == [0, 0] and held["policy"][3] > 0, "it leaves before the critic scores and trains"
    assert {path.name for path in (folder / "ckpts/global_step_2").iterdir()} >= {"policy", "critic"}
    exported = json.loads((folder / "exports/global_step_2/critic/config.json").read_text())
    assert exported["architectures"] == ["Qwen3MoeForTokenClassification"]
