"""The objective of a step, and what the trainer makes of rewards."""

import warnings


def _tokens(seed, scale=1.0, rows=4, columns=6):
    import torch

    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def loss(cfg):
    """Loss and gradient of four sequences."""
    import torch

    from skyrl_megatron.algorithms.losses import seed_random_picks
    from skyrl_megatron.algorithms.objective import PolicyObjective

    logprobs = (-_tokens(0).abs() - 0.1).requires_grad_()
    old, reference = logprobs.detach() + _tokens(1, 0.5), logprobs.detach() + _tokens(2, 0.5)
    rollout = old + _tokens(3, 0.6)
    mask = torch.ones(4, 6)
    mask[0, 4:] = mask[2, 2:] = 0
    inputs = {"old_log_probs": old, "rollout_log_probs": rollout, "uids": ["a", "a", "b", "b"]}
    inputs["observation_mask"] = 1 - mask
    seed_random_picks(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = PolicyObjective(cfg.trainer.algorithm)
        totals = objective.totals(mask, **inputs)
        value, _ = objective(
            totals,
            logprobs,
            _tokens(4),
            mask,
            ref_log_probs=reference,
            entropy=logprobs.exp(),
            **inputs,
        )
    value.backward()
    return value.item(), logprobs.grad.tolist()


def _batch(values=False):
    import torch

    from skyrl_megatron.data.batch import collate

    responses = [[5, 6, 7], [5, 6], [7, 8, 9], [4, 3, 2], [1, 1], [1, 2]]
    batch = collate(
        [[1, 2]] * 6,
        responses,
        uids=["a", "a", "a", "b", "b", "b"],
        rewards=[1.0, 0.2, 0.5, 1.0, 1.0, 1.0],
        loss_masks=[[1, 1, 1], [1, 1], [1, 0, 1], [1, 1, 1], [1, 1], [1, 1]],
    )
    batch.truncated = torch.tensor([False, True, False, False, False, False])
    responses = batch.responses
    batch.old_logprobs, batch.ref_logprobs, drawn = (
        responses.flat(_tokens(seed, 1.0, len(batch), responses.width)) for seed in (5, 6, 7)
    )
    batch.values = drawn if values else None
    batch.metadata["prompt_uids"] = [str(row) for row in range(6)]
    return batch


def advantages(cfg):
    """Advantages and loss mask of two prompts, one of which has the same reward throughout."""
    from tests.config.settings.loop import trainer_of

    trainer, batch = trainer_of(cfg), _batch(cfg.trainer.algorithm.advantage_estimator == "gae")
    if weights := cfg.trainer.algorithm.gdpo_weights:
        batch.reward_parts = _tokens(8, 1.0, 6, len(weights))
    trainer.apply_length_penalty(batch)
    batch = trainer.compute_advantages_and_returns(batch)
    return batch.advantages.tolist(), batch.loss_mask.tolist()


def returns(cfg):
    """What a critic learns of two prompts."""
    from tests.config.settings.loop import trainer_of

    return trainer_of(cfg).compute_advantages_and_returns(_batch(values=True)).returns.tolist()


def penalty(cfg):
    """Rewards after the KL penalty, and its coefficient afterwards."""
    from tests.config.settings.loop import trainer_of

    trainer = trainer_of(cfg)
    if trainer.kl_controller is None:
        return None
    batch = trainer.apply_reward_kl_penalty(_batch())
    return batch.rewards.tolist(), trainer.kl_controller.value


def sampler(cfg):
    """What dynamic sampling does with batches of which one prompt in four is useful."""
    from skyrl_megatron.errors import DataError
    from tests.config.settings.loop import output_of, trainer_of

    uids = [uid for uid in "abcd" for _ in range(2)]
    output = output_of([1.0, 0.0, *[1.0] * 6])
    trainer, offered = trainer_of(cfg), []
    for _ in range(6):
        try:
            chosen = trainer.handle_dynamic_sampling(output, uids)
        except DataError as error:
            return [*offered, str(error)]
        offered.append(None if chosen is None else chosen[1])
        if chosen is not None:
            break
    return offered


def nonfinite(cfg):
    """What becomes of a reward that is not a number."""
    from skyrl_megatron.errors import SkyRLMegatronError
    from tests.config.settings.loop import output_of, trainer_of

    output = output_of([[0.0, float("nan")], *[[0.0, 1.0]] * 7])
    try:
        batch = trainer_of(cfg).convert_to_training_input(output, [uid for uid in "abcd" for _ in range(2)])
    except SkyRLMegatronError as error:
        return str(error)
    return batch.loss_mask.tolist()
