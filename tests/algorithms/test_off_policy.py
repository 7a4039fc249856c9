"""Masks and weights of the off-policy correction by hand; what the reference gives is in test_losses."""

import pytest

from tests.algorithms.vectors import algorithm_config, tensor

# Ratios old/rollout of three sequences; the last row is a dummy. Exact in float64 but for exp(log(r)).
RATIOS = [[1.0, 1.5, 0.5, 2.0], [1.0, 1.0, 1.1, 0.9], [7.0, 4.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]]
MASK = [[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def corrected(**settings):
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.algorithms.off_policy import correct

    cfg = algorithm_config(**{f"off_policy_correction__{key}": value for key, value in settings.items()})
    rollout = tensor([[-1.0] * 4] * 4)
    old = rollout + tensor(RATIOS).log()
    correction = correct(old, rollout, tensor(MASK), cfg.off_policy_correction)
    return correction.mask.tolist(), correction.weight, metric_values(correction.metrics)


def test_statistics_run_over_valid_tokens():
    import statistics

    _, _, metrics = corrected(tis_ratio_type="token")
    valid = [1.5, 0.5, 2.0, 1.0, 1.0, 1.1, 0.9, 4.0, 0.25, 1.0]
    assert metrics["is_ratio_mean"] == pytest.approx(statistics.mean(valid))
    assert metrics["is_ratio_std"] == pytest.approx(statistics.stdev(valid))
    assert (metrics["is_ratio_min"], metrics["is_ratio_max"]) == (pytest.approx(0.25), pytest.approx(4.0))


@pytest.mark.parametrize("low,high,kept", [(None, 3.0, [1, 1, 0]), (0.4, None, [1, 1, 0]), (0.6, 1.9, [0, 1, 0])])
def test_outlier_masks_take_one_threshold_or_two(low, high, kept):
    mask, weight, metrics = corrected(outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high)
    assert mask == [[m * keep for m in row] for row, keep in zip(MASK, [*kept, 0], strict=True)]
    assert weight is None
    assert metrics["outlier_seq_masked_ratio"] == pytest.approx(1 - sum(kept) / 3), "the dummy row does not count"


@pytest.mark.parametrize("low,high,dropped", [(None, 1.7, [(0, 3), (2, 1)]), (0.4, None, [(2, 2)])])
def test_token_masks_take_one_threshold_or_two(low, high, dropped):
    mask, _, metrics = corrected(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high)
    expected = [list(row) for row in MASK]
    for row, token in dropped:
        expected[row][token] = 0.0
    assert mask == expected
    assert metrics["token_mask_ratio"] == pytest.approx(len(dropped) / 10)


def test_sequence_masks_and_weights_see_what_is_left():
    # The outlier mask drops row 2, the token mask the 2.0 of row 0; products left: 0.75 and 0.99.
    settings = {"outlier_token_is_threshold_high": 3.0, "token_mask_is_threshold_high": 1.9}
    mask, weight, metrics = corrected(
        **settings,
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high=0.8,
        sequence_mask_metric="product",
        product_mask_low=0.8,
    )
    assert weight.flatten().tolist() == pytest.approx([0.75, 0.8, 0.8, 0.8])
    assert mask == [[0.0] * 4, [1.0] * 4, [0.0] * 4, [0.0] * 4]
    assert metrics["tis_seq_clip_high_ratio"] == pytest.approx(1 / 2)
    assert metrics["product_sequence_mask_under_low_ratio"] == pytest.approx(1 / 2)
    mask, weight, metrics = corrected(
        **settings, tis_ratio_type="token", token_tis_ratio_clip_high=1.2, sequence_mask_metric="geometric"
    )
    assert weight[0].tolist() == pytest.approx([1.0, 1.2, 0.5, 1.2])
    assert mask == [[0.0] * 4, [1.0] * 4, [0.0] * 4, [0.0] * 4], "0.75 ** (1/2) is below 0.99, 0.99 ** (1/4) is not"
    assert metrics["tis_token_clip_high_ratio"] == pytest.approx(1 / 6)


def test_masked_tokens_carry_exactly_zero():
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    config = algorithm_config(
        off_policy_correction__outlier_token_is_threshold_high=3.0,
        off_policy_correction__token_mask_is_threshold_high=1.7,
        off_policy_correction__tis_ratio_type="sequence",
    )
    rollout, mask = tensor([[-1.0] * 4] * 4), tensor(MASK)
    old = rollout + tensor(RATIOS).log()
    left = [[0, 1, 1, 0], [1, 1, 1, 1], [0] * 4, [0] * 4]
    for name in ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo"):
        log_probs = (old + 0.01).requires_grad_()
        loss, _ = PolicyLossRegistry.get(name)(log_probs, old, torch.ones_like(old), config, mask, rollout)
        loss.sum().backward()
        dropped = tensor(left) == 0
        assert (loss[dropped] == 0).all() and (log_probs.grad[dropped] == 0).all(), name
        assert (loss[1] != 0).all() and (log_probs.grad[1] != 0).all(), name


def test_the_mask_is_known_before_the_step():
    from skyrl_megatron.algorithms.objective import PolicyObjective

    rollout, mask = tensor([[-1.0] * 4] * 4), tensor(MASK)
    old = rollout + tensor(RATIOS).log()
    changes = {"off_policy_correction__token_mask_is_threshold_high": 1.7}
    shard = {"old_log_probs": old, "rollout_log_probs": rollout}
    totals = PolicyObjective(algorithm_config(**changes)).totals(mask, **shard)
    assert (totals.tokens, totals.rows) == (8, 3)
    uncorrected = PolicyObjective(algorithm_config(policy_loss_type="importance_sampling", **changes))
    assert uncorrected.totals(mask, **shard).tokens == 10, "a loss that does not apply the masks counts every token"


def test_use_tis_of_older_scripts_is_the_token_correction():
    from skyrl_megatron.algorithms.off_policy import correct
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema.algorithm import correction_enabled

    overrides = ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=1.6"]
    with pytest.warns(DeprecationWarning, match="off_policy_correction") as warned:
        cfg = SkyRLTrainConfig.from_cli_overrides(overrides).trainer.algorithm.off_policy_correction
    assert len([w for w in warned if issubclass(w.category, DeprecationWarning)]) == 1
    assert correction_enabled(cfg)
    old, rollout, mask = tensor([[-1.0, -1.0]]), tensor([[-1.1, -2.0]]), tensor([[1.0, 1.0]])
    assert correct(old, rollout, mask, cfg).weight.tolist()[0] == pytest.approx([1.1051709180756477, 1.6])


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"tis_ratio_type": "word"}, "tis_ratio_type='word': choose token or sequence"),
        ({"sequence_mask_metric": "mean"}, "sequence_mask_metric='mean': choose product or geometric"),
    ],
)
def test_unknown_types(settings, message):
    with pytest.raises(ValueError, match=message):
        corrected(**settings)


def test_missing_log_probs():
    from skyrl_megatron.algorithms.off_policy import correct, effective_mask

    cfg = algorithm_config(off_policy_correction__sequence_mask_metric="product").off_policy_correction
    x = tensor([[0.0]])
    with pytest.raises(ValueError, match="needs the engine's log-probs"):
        correct(x, None, x, cfg)
    with pytest.raises(ValueError, match="need old_log_probs"):
        effective_mask(None, x, x, cfg)


def test_sequence_masked_importance_sampling():
    """The rule of MLPerf's llm_post_training in plain Python: sequences whose geometric mean of r is outside 0.999 …
    1.002 are dropped, tokens of the others have their whole ratio as weight."""
    import math
    import random

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    config = algorithm_config(
        off_policy_correction__tis_ratio_type="token",
        off_policy_correction__token_tis_ratio_clip_high=1e9,
        off_policy_correction__sequence_mask_metric="geometric",
        off_policy_correction__geo_mask_low=0.999,
        off_policy_correction__geo_mask_high=1.002,
    )
    rng = random.Random(0)
    log_r = [[rng.gauss(mean, 0.3) for _ in range(40)] for mean in [0.0] * 3]
    for row, mean in zip(log_r, (0.0015, -0.0005, 0.003), strict=True):  # within, within, above
        shift = mean - sum(row) / len(row)
        row[:] = [each + shift for each in row]
    log_r.append([-0.002] * 40)  # below
    old, delta = [[-2.0] * 40] * 4, 0.05
    loss, _ = PolicyLossRegistry.get("regular")(
        tensor(old) + delta,
        tensor(old),
        tensor([[1.0] * 40] * 4),
        config,
        tensor([[1.0] * 40] * 4),
        tensor(old) - tensor(log_r),
    )
    for row, ratios in zip(loss.tolist(), log_r, strict=True):
        kept = 0.999 <= math.exp(sum(ratios) / len(ratios)) <= 1.002
        assert row == pytest.approx([-math.exp(delta) * math.exp(each) if kept else 0.0 for each in ratios], rel=1e-9)
    assert [any(row) for row in loss.tolist()] == [True, True, False, False]
