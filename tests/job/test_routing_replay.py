"""Whole runs in which the trainer takes the experts that the engine chose; the plain one is in ``test_run.py``."""

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP

pytestmark = pytest.mark.vllm

REPLAY = {
    "trainer__policy__megatron_config__moe_enable_routing_replay": "true",
    "trainer__policy__megatron_config__moe_routing_replay_missing": "error",
    "trainer__ref__megatron_config__moe_enable_routing_replay": "true",
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__gradient_checkpointing": "true",
    "generator__inference_engine__enable_return_routed_experts": "true",
    "generator__sampling_params__top_p": 0.9,
}
OTHER_EXPERTS = """
def convert_to_training_input(self, generator_output, uids):
    batch = RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
    batch.rollout_routes = [(routes + 1) % 8 for routes in batch.rollout_routes]
    return batch
Trainer.convert_to_training_input = convert_to_training_input
"""


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


@pytest.mark.full_matrix
def test_turns_and_two_engines(folder):
    """Every trained token has its experts, whichever engine computed it and in whichever turn."""
    turns = {
        "generator__max_turns": 2,
        "generator__max_input_length": 96,
        "generator__use_conversation_multi_turn": "true",
        "generator__inference_engine__num_engines": 2,
    }
    for line in runs.run(folder, **REPLAY | turns).check().lines:
        assert line["generate/avg_turns"] == 2.0 and line[GAP] <= AGREE
        assert 0.5 < line["policy/moe_routing_replayed"] < 1.0 and line["policy/moe_routing_mismatch"] < 0.05


@pytest.mark.full_matrix
def test_other_experts_show_in_the_gap(folder):
    """The gap of the run above is that of its routes: others are taken, too."""
    line = runs.run(folder, OTHER_EXPERTS, **REPLAY, trainer__max_training_steps=1).check().lines[0]
    assert line[GAP] > 100 * AGREE and line["policy/moe_routing_mismatch"] > 0.3


@pytest.mark.full_matrix
def test_the_trainers_own_experts_are_those_of_all_steps_on_a_batch(folder):
    """The engine says nothing of experts; four optimizer steps, so small that the model would hardly choose others."""
    own = {
        "trainer__policy__megatron_config__moe_enable_routing_replay": "true",
        "trainer__policy__megatron_config__moe_routing_replay_source": "trainer",
        "trainer__policy_mini_batch_size": 2,
        "trainer__update_epochs_per_batch": 2,
        "trainer__policy__optimizer_config__lr": 1e-6,
    }
    for line in runs.run(folder, **own).check().lines:
        assert line["policy/moe_routing_replayed"] == 1.0
        assert line["policy/moe_routing_mismatch"] < 0.01
