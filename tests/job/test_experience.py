"""What the trainer makes of a batch, without ranks or engines."""


def test_prompts_with_one_reward_throughout_leave_the_loss():
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.trainer.step_batch import mask_zero_variance_groups

    def batch(rewards):
        return collate([[1]] * 4, [[2, 3], [2], [2, 3], [2]], uids=["a", "a", "b", "b"], rewards=rewards)

    mixed = batch([1.0, 0.0, 1.0, 1.0])
    assert mask_zero_variance_groups(mixed) == 2.0
    assert mixed.padded().loss_mask.sum(dim=1).tolist() == [2.0, 1.0, 0.0, 0.0]
    alike = batch([1.0, 1.0, 0.0, 0.0])
    assert mask_zero_variance_groups(alike) == 4.0
    assert alike.loss_mask.sum().item() == 6.0, "a step needs at least one token to train on"


def test_rows_without_a_token_to_train_on_are_left_out():
    import numpy as np

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.data.splitting import rows_with_trained_tokens, trained_rows

    def left():
        rows = rows_with_trained_tokens(np.arange(3), trained_rows(batch))
        return batch.select(rows).uids

    batch = collate([[1]] * 3, [[2, 3], [2], [4]], uids=["a", "b", "c"], rewards=[1.0, 0.0, 1.0])
    assert left() == ["a", "b", "c"]
    batch.loss_mask[batch.responses.of(1)] = False
    assert left() == ["a", "c"]
    batch.loss_mask[:] = False
    assert left() == ["a", "b", "c"], "an optimizer step takes at least one row"


def test_mini_batches_without_a_token_to_train_on_are_left_out():
    """As late in a run, when nearly every prompt is solved in all of its samples or in none."""
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.data.splitting import mini_batches, parts_with_trained_tokens, trained_rows
    from skyrl_megatron.trainer.step_batch import mask_zero_variance_groups

    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    batch = collate([[1]] * 8, [[2, 3]] * 8, uids=list("aabbccdd"), rewards=rewards)
    mask_zero_variance_groups(batch)

    def left():
        parts = parts_with_trained_tokens(mini_batches(batch, 2), trained_rows(batch))
        return [batch.select(part).uids for part in parts]

    assert left() == [["c", "c", "d", "d"]]
    batch.loss_mask[:] = False
    assert len(left()) == 2, "then the ranks say what is wrong"


def test_a_step_that_taught_nothing_says_why():
    """Each reason once; where one token has an advantage, nothing is said."""
    import pytest

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.trainer.step_batch import LearningSignal, missing_signal

    def batch(rewards, advantage=0.0):
        made = collate([[1]] * 4, [[2, 3]] * 4, uids=["a", "a", "b", "b"], rewards=rewards)
        made.advantages = advantage * made.response_mask
        return made

    varied = [1.0, 0.0, 1.0, 1.0]
    assert missing_signal(batch(varied, 0.5)) is None
    masked = batch(varied, 0.5)
    masked.loss_mask[:] = 0
    lessons = LearningSignal()
    for step, (made, why) in enumerate(
        [
            (batch([0.5] * 4), "all 4 samples got reward 0.5"),
            (batch([1.0, 1.0, 0.0, 0.0]), "the samples of each prompt got the same reward"),
            (masked, "all of its tokens are masked"),
            (batch(varied), "every advantage is 0 although rewards differ"),
        ],
        start=1,
    ):
        with pytest.warns(SkyRLMegatronWarning, match=f"^step {step} learns nothing from its rewards: {why}"):
            lessons.look(step, made)
        lessons.look(step + 1, made)  # warnings are errors here


def test_a_step_that_needs_many_batches_of_prompts_says_so():
    """Once in a run, at the third batch that does not fill the step."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import pytest

    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.rollout.gates import Gates
    from skyrl_megatron.sources.run_state import RunState
    from skyrl_megatron.sources.source import PromptRollouts

    def select(output, uids):
        sampler.sampled_batches += 1
        return (output, uids) if sampler.sampled_batches == enough else None

    sampler = SimpleNamespace(sampled_batches=0)
    output = {"response_ids": [], "rewards": []}
    parts = SimpleNamespace(
        train_dataloader=SimpleNamespace(observe_batch=lambda rewards: None),
        gates=Gates({}),
        sampler=sampler,
        sample_batch=lambda: (output, []),
        postprocess_generator_output=lambda output, uids: output,
        handle_dynamic_sampling=select,
        note_rows=lambda output: None,
        convert_to_training_input=lambda output, uids: uids,
    )
    run = RunState(total_steps=20, position={}, phases=lambda name: nullcontext(), say=print, step=8)
    source = PromptRollouts(run, parts)
    enough = 3
    source.next_batch()  # warnings are errors here
    sampler.sampled_batches, enough = 0, 5
    with pytest.warns(SkyRLMegatronWarning, match="^step 9: 3 batches of prompts did not fill one step") as said:
        source.next_batch()
    assert len(said) == 1
