"""Whole runs whose experts change ranks after every step: engines get each expert from the rank that has it."""

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP

pytestmark = pytest.mark.vllm

SHUFFLED = {"trainer__policy__megatron_config__moe_expert_moves": "shuffle", "trainer__max_training_steps": 3}
CONNECTED_ONCE = """
from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

async def never(self):
    return False
WeightSynchronizer._weights_moved = never
"""


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


LORA = {
    "trainer__policy__model__lora__rank": 8,
    "trainer__policy__model__lora__alpha": 16,
}


@pytest.mark.parametrize("routes", ["true", pytest.param("false", marks=pytest.mark.full_matrix)])
def test_engines_have_the_experts(folder, routes):
    """Slices of workers, or whole tensors: the engine's log-probs of what it sampled are the trainer's."""
    ran = runs.run(folder, **SHUFFLED, generator__inference_engine__weight_sync_routes=routes).check()
    for line in ran.lines:
        assert line["policy/moe_moved_experts"] > 0 and line[GAP] <= AGREE
        assert line["policy/moe_rank_imbalance"] >= 1.0 and line["policy/moe_move_s"] > 0


@pytest.mark.full_matrix
@pytest.mark.parametrize("routes", ["true", "false"])
@pytest.mark.parametrize("mode", ["memory", "merged"])
def test_engines_have_the_adapters_of_experts(folder, mode, routes):
    ran = runs.run(
        folder,
        **SHUFFLED,
        **LORA,
        trainer__policy__model__lora__sync_mode=mode,
        generator__inference_engine__weight_sync_routes=routes,
    ).check()
    for line in ran.lines:
        assert line["policy/moe_moved_experts"] > 0 and line[GAP] <= AGREE


@pytest.mark.full_matrix
def test_weights_of_other_experts_are_not_sent(folder):
    """If nobody connects again after a move, the rank refuses to send."""
    ran = runs.run(folder, CONNECTED_ONCE, **SHUFFLED)
    assert ran.returncode != 0 and "experts moved after the engines were connected" in ran.out + ran.err
