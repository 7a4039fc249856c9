"""A run that samples from a part of the vocabulary: trainer and engine agree on the probabilities over it."""

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
GAP = "policy/rollout_train_logprobs_abs_diff_max"


@pytest.mark.parametrize("loss", ["regular", "importance_sampling"])
def test_trainer_and_engine_agree_over_what_was_sampled_from(tmp_path, loss):
    """Also where the loss reads no log-probs of the trainer from before the update: the training pass says it."""
    from safetensors.torch import load_file

    folder = runs.prepare(tmp_path)
    done = runs.run(
        folder,
        trainer__algorithm__policy_loss_type=loss,
        trainer__policy__megatron_config__tensor_model_parallel_size=2,
        trainer__policy__megatron_config__expert_model_parallel_size=1,
        generator__sampling_params__temperature=0.9,
        generator__sampling_params__top_p=0.7,
        trainer__dump_data_batch="true",
    ).check()
    assert [line["step"] for line in done.lines] == [1, 2]
    assert all(0 < line[GAP] <= 1e-4 for line in done.lines), [line[GAP] for line in done.lines]
    dumped = load_file(folder / "exports/dumped_data/global_step_1.safetensors")
    counts = dumped["rollout_support_counts"]
    assert counts.sum() == len(dumped["rollout_support_ids"]) and (counts > 0).sum() >= dumped["loss_mask"].sum() > 0
