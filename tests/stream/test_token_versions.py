"""Off-policy by span: how old each token is, and corrections whose ratios are to the version that sampled it."""

import itertools

import pytest


def test_lags_stand_where_their_tokens_do():
    from skyrl_megatron.sources.staleness import token_staleness
    from skyrl_megatron.types import RowSpans

    spans = [[("3", 0, 2), ("5", 4, 5)], [("base", 0, 1), ("4", 1, 3)]]
    rows = RowSpans([5, 0, 3])
    lags = token_staleness([spans[0], [], spans[1]], rows, 6)
    assert lags.tolist() == [3, 3, -1, -1, 1, -1, 2, 2]
    assert [lags[rows.of(row)].tolist() for row in range(3)] == [[3, 3, -1, -1, 1], [], [-1, 2, 2]]


def test_metrics_count_what_is_trained_on():
    import torch

    from skyrl_megatron.data.batch import collate
    from skyrl_megatron.sources.staleness import token_staleness, token_staleness_metrics

    batch = collate(
        [[1], [1], [1]],
        [[2, 3, 4, 5], [6, 7], [8]],
        uids=["a", "a", "b"],
        rewards=[0.0] * 3,
        loss_masks=[[1, 1, 0, 1], [1, 1], [0]],
        rollout_logprobs=[[-1.0, -1.0, 0.0, -2.0], [-1.0, -3.0], [-9.0]],
    )
    lags = token_staleness([[("7", 0, 2), ("9", 3, 4)], [("8", 0, 2)], [("0", 0, 1)]], batch.responses, 9)
    batch.old_logprobs = torch.where(batch.response_mask, -1.5, 0.0)
    found = token_staleness_metrics(batch, lags, 2)
    assert found == pytest.approx(
        {
            "async/token_lag_mean": (2 + 2 + 0 + 1 + 1) / 5,
            "async/mixed_rows": 0.5,
            "async/token_lag_0": 0.2,
            "async/token_lag_1": 0.4,
            "async/token_lag_2": 0.4,
            "async/logprob_diff_lag_0": 0.5,
            "async/logprob_diff_lag_1": 1.0,
            "async/logprob_diff_lag_2": 0.5,
        }
    )
    batch.old_logprobs = None
    assert not [name for name in token_staleness_metrics(batch, lags, 2) if "diff" in name]
    batch.loss_mask[:] = 0
    assert token_staleness_metrics(batch, lags, 2) == {}


@pytest.mark.parametrize("mixed", [True, False])
def test_a_response_of_two_versions_is_weighted_by_each_ones_probabilities(mixed):
    """All responses of two tokens, the first from one policy and the second from another: weighted by the product of
    their ratios, the mean of any function is the current policy's, exactly. Taken for samples of the first policy
    alone, it is not."""
    import torch

    from skyrl_megatron.algorithms.off_policy import correct
    from skyrl_megatron.config.schema.algorithm import OffPolicyCorrectionConfig

    rng = torch.Generator().manual_seed(0)

    def policy():
        """Log-probs of the first token [3], and of the second [3, 3]."""
        return [torch.randn(size, generator=rng, dtype=torch.float64).log_softmax(-1) for size in ((3,), (3, 3))]

    old, sampler, current = policy(), policy(), policy()
    value = torch.randn(3, 3, generator=rng, dtype=torch.float64)
    pairs = list(itertools.product(range(3), repeat=2))
    first, second = map(list, zip(*pairs, strict=True))
    drawn = torch.stack([old[0][first], sampler[1][first, second]], 1)
    told = drawn if mixed else torch.stack([old[0][first], old[1][first, second]], 1)
    now = torch.stack([current[0][first], current[1][first, second]], 1)
    cfg = OffPolicyCorrectionConfig(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1e6)
    weight = correct(now, told, torch.ones(9, 2, dtype=torch.float64), cfg).weight
    mean = (drawn.sum(1).exp() * weight[:, 0] * value[first, second]).sum().item()
    expected = (now.sum(1).exp() * value[first, second]).sum().item()
    assert (mean == pytest.approx(expected, rel=1e-12)) is mixed
