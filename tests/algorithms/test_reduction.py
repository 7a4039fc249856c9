"""Loss and gradient do not depend on how a batch is cut into ranks, micro-batches and dummy rows."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algorithms.vectors import algorithm_config, tensor

LOSSES = [
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "sapo",
    "cross_entropy",
    "importance_sampling",
    "rollout_is",
    "dppo",
]
REDUCTIONS = ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
CORRECTIONS = [
    {},
    {"tis_ratio_type": "token", "token_mask_is_threshold_high": 1.1},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "geo_mask_low": 0.95, "geo_mask_high": 1.05},
    {"outlier_token_is_threshold_low": 0.8, "token_mask_is_threshold_low": 0.95},
]
LENGTH = 5


def make_batch(seed, rows):
    """Random rows of up to 4 prompts (groups of one among them); responses may be empty, rows all masked."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kinds = random.Random(seed)

    def noise(scale):
        return scale * torch.randn(rows, LENGTH, dtype=torch.float64, generator=generator)

    lengths = torch.tensor([kinds.choice([0, 1, 2, 3, LENGTH]) for _ in range(rows)])
    mask = (torch.arange(LENGTH) >= LENGTH - lengths[:, None]).double()
    mask[[row for row in range(rows) if kinds.random() < 0.15]] = 0
    mask[:, LENGTH // 2] *= (noise(1.0)[:, 0] > -1).double()  # tokens of the environment inside a response
    log_probs = -noise(1.0).abs() - 0.1
    old = log_probs + noise(0.2)
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": old + noise(0.08),
        "ref_log_probs": log_probs + noise(0.3),
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0),
        "loss_mask": mask,
        "uids": [f"prompt {kinds.randrange(4)}" for _ in range(rows)],
    }


def rows_of(batch, rows):
    return {
        key: [value[row] for row in rows] if isinstance(value, list) else value[list(rows)]
        for key, value in batch.items()
    }


def with_dummies(batch, count):
    """``count`` rows of padding that hold nonsense and are masked."""
    import torch

    padded = {}
    for key, value in batch.items():
        if isinstance(value, list):
            padded[key] = [*value, *["dummy"] * count]
        else:
            filling = 0.0 if key == "loss_mask" else float("nan")
            padded[key] = torch.cat([value, value.new_full((count, LENGTH), filling)])
    return padded


def run(config, batch, plan, dummies=0):
    """Loss, gradients by row and metrics of a batch cut as ``plan`` says: ranks, their micro-batches, their rows."""
    import torch

    from skyrl_megatron.algorithms.metrics import PackedMetrics, merge_metrics, metric_values, pack_metrics
    from skyrl_megatron.algorithms.objective import PolicyObjective
    from skyrl_megatron.algorithms.reduction import StepTotals

    objective = PolicyObjective(config)
    shards = [with_dummies(rows_of(batch, [row for rows in rank for row in rows]), dummies) for rank in plan]
    counted = ("loss_mask", "old_log_probs", "rollout_log_probs", "uids")
    totals = sum((objective.totals(**{key: shard[key] for key in counted}) for shard in shards), StepTotals())
    loss, packed = 0.0, []
    gradients = {key: torch.zeros_like(batch[key]) for key in ("log_probs", "entropy")}
    for rank in plan:
        parts = []
        for rows in rank:
            micro = with_dummies(rows_of(batch, rows), dummies)
            leaves = {key: micro[key].clone().requires_grad_() for key in gradients}
            value, metrics = objective(totals, **(micro | leaves))
            value.backward()
            loss += value.item()
            parts.append(metrics)
            for key, leaf in leaves.items():
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                gradients[key][list(rows)] += gradient[: len(rows)]
                assert (gradient[len(rows) :] == 0).all(), "dummy rows have no gradient"
        packed.append(pack_metrics(merge_metrics(*parts)))
    reduced = PackedMetrics(  # what two all-reduces over the ranks would leave
        packed[0].means,
        packed[0].extremes,
        torch.stack([part.sums for part in packed]).sum(0),
        torch.stack([part.maxima for part in packed]).amax(0),
    )
    return loss, gradients, metric_values(reduced.unpack())


def random_plan(rows, seed):
    """Any order of the rows, cut into 1–3 ranks and those into micro-batches of any size."""
    chooser = random.Random(seed)
    order = list(range(rows))
    chooser.shuffle(order)
    cuts = sorted(chooser.choices(range(1, rows + 1), k=chooser.randrange(3)))
    ranks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    plan = []
    for rank in filter(None, ranks):
        size = chooser.randrange(1, len(rank) + 1)
        plan.append([rank[start : start + size] for start in range(0, len(rank), size)])
    return plan


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(LOSSES),
    st.sampled_from(REDUCTIONS),
    st.sampled_from(CORRECTIONS),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 10_000),
)
def test_any_cut_gives_the_same_loss_and_gradient(name, reduction, correction, rows, dummies, seed):
    import torch

    config = algorithm_config(
        policy_loss_type=name,
        loss_reduction=reduction,
        max_seq_len=7,
        kl_loss_coef=0.5,
        use_entropy_loss=True,
        entropy_loss_coef=0.5,
        **{f"off_policy_correction__{key}": value for key, value in correction.items()},
    )
    batch = make_batch(seed, rows)
    whole = run(config, batch, [[list(range(rows))]])
    cut = run(config, batch, random_plan(rows, seed), dummies)
    assert cut[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    for key, gradient in whole[1].items():
        torch.testing.assert_close(cut[1][key], gradient, rtol=1e-12, atol=1e-12)
    assert cut[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12), "metrics, too"


def definition(values, mask, uids, reduction, max_seq_len=7):
    """The four means as one would write them down, in plain Python."""
    rows = [
        ([v for v, m in zip(row, valid, strict=True) if m], uid)
        for row, valid, uid in zip(values.tolist(), mask.tolist(), uids, strict=True)
    ]
    rows = [(tokens, uid) for tokens, uid in rows if tokens]
    if not rows:
        return 0.0
    match reduction:
        case "token_mean":
            return sum(sum(tokens) for tokens, _ in rows) / sum(len(tokens) for tokens, _ in rows)
        case "sequence_mean":
            return sum(sum(tokens) / len(tokens) for tokens, _ in rows) / len(rows)
        case "seq_mean_token_sum_norm":
            return sum(sum(tokens) / max_seq_len for tokens, _ in rows) / len(rows)
    prompts = {uid: [token for tokens, owner in rows if owner == uid for token in tokens] for _, uid in rows}
    return sum(sum(tokens) / len(tokens) for tokens in prompts.values()) / len(prompts)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_the_whole_is_the_mean_that_its_name_says(reduction, seed):
    """Policy loss, KL and entropy against the definitions, with coefficients and signs.

    Tokens that the correction drops (ratio above 1.05) count neither above nor below the line; what PPO clips does.
    """
    from skyrl_megatron.algorithms.kl import compute_approx_kl
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    config = algorithm_config(
        loss_reduction=reduction, max_seq_len=7, kl_loss_coef=0.3, use_entropy_loss=True, entropy_loss_coef=0.2
    )
    batch = make_batch(seed, 8)
    uids, x, old = batch["uids"], batch["log_probs"], batch["old_log_probs"]
    kept = ((old - batch["rollout_log_probs"]).exp() <= 1.05).double()
    mask = batch["loss_mask"] * kept
    assert mask.sum() < batch["loss_mask"].sum()
    config.off_policy_correction.token_mask_is_threshold_high = 1.05
    loss, gradients, metrics = run(config, batch, [[list(range(8))]])
    config.off_policy_correction.token_mask_is_threshold_high = None
    per_token, _ = PolicyLossRegistry.get("regular")(x, old, batch["advantages"], config, mask)
    policy = definition(per_token, mask, uids, reduction)
    kl = definition(compute_approx_kl(x, batch["ref_log_probs"], None, "k3"), mask, uids, reduction)
    entropy = definition(batch["entropy"], mask, uids, reduction)
    assert loss == pytest.approx(policy + 0.3 * kl - 0.2 * entropy, rel=1e-12)
    assert metrics["policy_loss"] == pytest.approx(policy) and metrics["policy_kl"] == pytest.approx(kl)
    assert metrics["policy_entropy"] == pytest.approx(entropy) and metrics["final_loss"] == pytest.approx(loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_of_the_whole_objective(reduction):
    """Policy loss + KL - entropy by finite differences, with respect to log-probs and entropy."""
    import torch

    from skyrl_megatron.algorithms.objective import PolicyObjective

    config = algorithm_config(
        loss_reduction=reduction, max_seq_len=7, kl_loss_coef=0.3, use_entropy_loss=True, entropy_loss_coef=0.2
    )
    batch = make_batch(2, 6)
    objective = PolicyObjective(config)
    totals = objective.totals(batch["loss_mask"], uids=batch["uids"])
    assert totals.rows >= 3

    def loss(log_probs, entropy):
        return objective(totals, **(batch | {"log_probs": log_probs, "entropy": entropy}))[0]

    leaves = [batch[key].clone().requires_grad_() for key in ("log_probs", "entropy")]
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-7, atol=1e-6)


def test_a_step_without_a_token():
    import torch

    batch = make_batch(0, 3)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for reduction in REDUCTIONS:
        loss, gradients, metrics = run(algorithm_config(loss_reduction=reduction, max_seq_len=7), batch, [[[0, 1, 2]]])
        assert loss == 0 and all((gradient == 0).all() for gradient in gradients.values()) and metrics == {}


def test_float32_loss_keeps_its_precision():
    """A step of a million tokens in fp32: the sum over rows is not the place to lose digits."""
    import torch

    from skyrl_megatron.algorithms.reduction import row_weights, step_totals, weighted_sum

    values = 1 + 1e-3 * torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(values)
    weights = row_weights(mask, step_totals(mask))
    exact = values.double().mean().item()
    assert weighted_sum(values, mask, weights).item() == pytest.approx(exact, rel=1.2e-7)


def test_losses_that_depend_on_the_cut_say_so_once():
    import warnings

    from skyrl_megatron.algorithms.objective import PolicyObjective, _warned
    from skyrl_megatron.errors import SkyRLMegatronWarning

    _warned.clear()
    for name in ("clip_cov", "kl_cov"):
        with pytest.warns(SkyRLMegatronWarning, match=f"'{name}' uses statistics of its micro-batch"):
            PolicyObjective(algorithm_config(policy_loss_type=name))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PolicyObjective(algorithm_config(policy_loss_type=name))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"loss_reduction": "token_mean_legacy"}, "loss_reduction='token_mean_legacy': choose one of token_mean, "),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "needs trainer.algorithm.max_seq_len"),
        ({"use_entropy_loss": True}, "use_entropy_loss=true needs entropy"),
        (
            {"policy_loss_type": "reg"},
            "policy loss 'reg' is not registered. Registered: cispo, clip_cov, cross_entropy",
        ),
    ],
)
def test_bad_configuration(change, message):
    import torch

    from skyrl_megatron.algorithms.objective import PolicyObjective
    from skyrl_megatron.algorithms.reduction import StepTotals

    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        PolicyObjective(algorithm_config(**change))(StepTotals(2, 1), x, x, x, old_log_probs=x, ref_log_probs=x)


def test_bad_masks_and_uids():
    from skyrl_megatron.algorithms.reduction import step_totals

    with pytest.raises(ValueError, match=r"loss_mask must hold 0 and 1 only, found 0\.5 in row 0, token 1"):
        step_totals(tensor([[1.0, 0.5]]))
    with pytest.raises(ValueError, match="prompt_mean needs the uid of each of the 1 rows, got none"):
        step_totals(tensor([[1.0, 1.0]]), "prompt_mean")
