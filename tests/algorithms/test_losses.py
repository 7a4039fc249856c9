"""Losses against recorded outputs of the reference, cases computed by hand, and finite differences."""

from contextlib import contextmanager

import pytest

from tests.algorithms.vectors import algorithm_config, case_config, cases, tensor

LOSSES = [
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "cross_entropy",
    "importance_sampling",
    "rollout_is",
    "dppo",
    "m2po",
]
IN_THE_VECTORS = [name for name in LOSSES if name not in ("clip_cov", "rollout_is", "dppo", "m2po")]


def mean(metric) -> float:
    return float(metric.sum / metric.weight)


@pytest.mark.parametrize("name", IN_THE_VECTORS)
def test_equals_the_reference(name):
    """Sum of the per-token loss, its gradient, and the clip ratio, with each off-policy correction.

    Known differences: the reference computes PPO ratios and truncated weights in float32 (hence 5e-6 there); it
    returns the masked sum where ours is per token; its ``importance_sampling`` reports no clip ratio.
    """
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    recorded = [case for case in cases("policy_loss") if case["loss"] == name]
    assert len(recorded) in (3, 21)
    for case in recorded:
        log_probs = tensor(case["log_probs"]).requires_grad_()
        loss, metrics = PolicyLossRegistry.get(name)(
            log_probs,
            tensor(case["old_log_probs"]),
            tensor(case["advantages"]),
            case_config(case),
            tensor(case["loss_mask"]),
            tensor(case["rollout_log_probs"]),
        )
        loss.sum().backward()
        in_float32 = name in ("regular", "dual_clip", "cispo") or "tis_ratio_type" in case["off_policy"]
        limit, expected = 5e-6 if in_float32 else 1e-9, case["expected"]
        assert abs(loss.sum().item() - expected["masked_sum"]) <= limit, case["off_policy"]
        assert (log_probs.grad - tensor(expected["grad"])).abs().max() <= limit, case["off_policy"]
        if expected["clip_ratio"] is not None:
            assert mean(metrics["clip_ratio"]) == pytest.approx(expected["clip_ratio"], abs=1e-12)


def run_by_hand(name, p, q, advantages, **changes):
    """Loss, gradient and metrics of one sequence of tokens with probability p now and q before, and a masked NaN."""
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    nan = float("nan")
    log_probs = tensor([[nan, *p]]).log().requires_grad_()
    before = tensor([[nan, *q]]).log()
    mask = torch.ones_like(before)
    mask[0, 0] = 0
    config = algorithm_config(**changes)
    arguments = (before, tensor([[nan, *advantages]]), config, mask, before)
    loss, metrics = PolicyLossRegistry.get(name)(log_probs, *arguments)
    loss.sum().backward()
    assert loss[0, 0] == 0 and log_probs.grad[0, 0] == 0, "a masked token has no part, whatever stands there"
    return loss[0, 1:].detach(), log_probs.grad[0, 1:], metrics


def assert_close(actual, expected):
    import torch

    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_rollout_is_by_hand():
    from math import log

    loss, gradient, metrics = run_by_hand(
        "rollout_is",
        p=[0.5, 0.5, 0.6, 0.3, 0.45, 0.9],
        q=[0.5, 0.4, 0.4, 0.4, 0.5, 0.6],
        advantages=[2.0, -1.0, 1.0, 1.0, 1.0, -3.0],
        eps_clip_low=0.2,
        eps_clip_high=0.28,
    )
    # Ratios 1, 1.25, 1.5, 0.75, 0.9, 1.5; inside (0.8, 1.28) are the first, second and fifth.
    assert_close(loss, [-2 * log(0.5), 1.25 * log(0.5), 0, 0, -0.9 * log(0.45), 0])
    assert_close(gradient, [-2, 1.25, 0, 0, -0.9, 0])
    assert mean(metrics["clip_ratio"]) == 0.5


def test_dppo_total_variation_by_hand():
    loss, gradient, metrics = run_by_hand(
        "dppo",
        p=[0.5, 0.5, 0.2, 0.35, 0.9, 0.1],
        q=[0.2, 0.4, 0.4, 0.4, 0.2, 0.6],
        advantages=[1.0, 1.0, -1.0, -2.0, -1.0, 2.0],
        dppo__delta_low=0.1,
        dppo__delta_high=0.2,
    )
    # +0.3 with A > 0 and -0.2 with A < 0 are too far; +0.7 with A < 0 and -0.5 with A > 0 are on the way back.
    expected = [0, -1.25, 0, 1.75, 4.5, -1 / 3]
    assert_close(loss, expected)
    assert_close(gradient, expected)
    assert mean(metrics["clip_ratio"]) == pytest.approx(1 / 3)


def test_dppo_binary_kl_by_hand():
    loss, _, _ = run_by_hand(
        "dppo",
        p=[0.5, 0.5, 0.2, 0.35, 0.9, 0.1],
        q=[0.2, 0.4, 0.4, 0.4, 0.2, 0.6],
        advantages=[1.0, 1.0, -1.0, -2.0, -1.0, 2.0],
        dppo__dppo_type="binary_kl",
        dppo__delta_low=0.1,
        dppo__delta_high=0.02,
    )
    # KL(q‖p) = q·ln(q/p) + (1-q)·ln((1-q)/(1-p)): 0.193, 0.0201, 0.105, 0.0054, then two tokens on the way back.
    assert_close(loss, [0, 0, 0, 1.75, 4.5, -1 / 3])


CLIP_COV = {
    # Log-probs -1…-8 (mean -4.5) and advantages with mean 0: covariance is A·(log p + 4.5).
    "log_p": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0],
    "advantages": [1.0, 1.0, 1.0, -1.0, 2.0, -2.0, 1.0, -3.0],
    # cov: 3.5, 2.5, 1.5, -0.5, -1.0, 3.0, -2.5, 10.5; between 1 and 5: tokens 0, 1, 2 and 5
}


@pytest.mark.parametrize("threshold", [1e-9, 0.01, 0.04, 0.3, 1e9])
def test_m2po_equals_the_algorithm_of_the_paper(threshold):
    """Algorithm 1 in plain Python: leave out the largest until the mean of the others is within the threshold."""
    import math

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    for seed in range(5):
        log_probs, _, advantages, mask, rollout, _ = random_batch(seed, rows=5, length=7)
        rollout = log_probs + 6 * (rollout - log_probs)
        columns = [x.tolist() for x in (log_probs, rollout, advantages, mask)]
        places = [(b, t) for b in range(5) for t in range(7)]
        found = {place: [column[place[0]][place[1]] for column in columns] for place in places}
        tokens = {place: (p - q, a) for place, (p, q, a, trained) in found.items() if trained}
        region = [key for key, (delta, a) in tokens.items() if (a > 0 and delta > 0) or (a < 0 and delta < 0)]
        region.sort(key=lambda key: tokens[key][0] ** 2)
        before = [tokens[key][0] ** 2 for key in region]
        while region and sum(tokens[key][0] ** 2 for key in region) / len(region) > threshold:
            dropped = region.pop()
            tokens[dropped] = tokens[dropped][0], None
        loss, metrics = PolicyLossRegistry.get("m2po")(
            log_probs.requires_grad_(), None, advantages, algorithm_config(m2po_threshold=threshold), mask, rollout
        )
        loss.sum().backward()
        for place in places:
            delta, advantage = tokens.get(place, (0.0, None))
            expected = 0.0 if advantage is None else -math.exp(delta) * advantage
            assert loss[place].item() == pytest.approx(expected, rel=1e-12)
            assert log_probs.grad[place].item() == pytest.approx(expected, rel=1e-12)  # d(-e^d A) = -e^d A
        left_out = sum(advantage is None for _, advantage in tokens.values())
        assert mean(metrics["clip_ratio"]) == pytest.approx(left_out / len(tokens))
        assert mean(metrics["m2po/second_moment"]) == pytest.approx(sum(before) / len(before))


def test_m2po_leaves_out_what_the_paper_does_and_the_authors_code_clips_more():
    """The shares that the loss's description gives, of 40,000 tokens with Gaussian log r and as many of both signs.

    The authors' code lowers |log r| of the region to a common bound, where the algorithm removes the largest: the
    bound is much lower. Its functions have a floor for it (ratios of 0.7 and 1.5), which its training scripts unset.
    """
    import math
    import random

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    draw, budget, count = random.Random(0), 0.04, 40_000
    deltas = [draw.gauss(0.0, 0.3) for _ in range(count)]
    signs = [draw.choice((-1.0, 1.0)) for _ in range(count)]
    region = sorted((i for i in range(count) if deltas[i] * signs[i] > 0), key=lambda i: deltas[i] ** 2)

    kept, total = len(region), math.fsum(deltas[i] ** 2 for i in region)  # algorithm 1
    while total > budget * kept:
        kept -= 1
        total -= deltas[region[kept]] ** 2
    below, clipped = 0.0, len(region)  # the authors' code: the largest bound that holds the mean of the capped squares
    for place, i in enumerate(region):
        if below + (len(region) - place) * deltas[i] ** 2 > budget * len(region):
            clipped = len(region) - place
            break
        below += deltas[i] ** 2
    bound = abs(deltas[region[len(region) - clipped]])
    high, low = max(bound, math.log(1.5)), min(-bound, math.log(0.7))
    floored = sum(not low <= deltas[i] <= high for i in region)
    shares = [number / len(region) for number in (len(region) - kept, clipped, floored)]
    print(f"left out {shares[0]:.4f}; clipped {shares[1]:.4f}, with the floor {shares[2]:.4f}")
    assert shares == pytest.approx([0.1956, 0.3735, 0.2055], abs=0.005)  # Gaussian integrals; 3 deviations of sampling

    rollout = tensor([[-1.0 - delta for delta in deltas]])
    log_probs = (rollout * 0 - 1.0).requires_grad_()
    loss, metrics = PolicyLossRegistry.get("m2po")(
        log_probs, None, tensor([signs]), algorithm_config(m2po_threshold=budget), rollout * 0 + 1, rollout
    )
    loss.sum().backward()
    left_out = set(region[kept:])
    wanted = tensor([[0.0 if i in left_out else -math.exp(deltas[i]) * signs[i] for i in range(count)]])
    assert (loss - wanted).abs().max() < 1e-12 and (log_probs.grad - wanted).abs().max() < 1e-12
    assert mean(metrics["clip_ratio"]) == len(left_out) / count


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_m2po_on_constant_advantages(advantage):
    """Every token is left out that would move away at a threshold near 0; the gradient has the advantage's sign."""
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    q = tensor([[-1.0, -1.0, -1.0]])
    p = (q + tensor([[0.5, 0.0, -0.5]])).requires_grad_()
    loss, _ = PolicyLossRegistry.get("m2po")(
        p, None, q * 0 + advantage, algorithm_config(m2po_threshold=1e-9), None, q
    )
    loss.sum().backward()
    moves = {-1.0: [1, 1, 0], 0.0: [0, 0, 0], 1.0: [0, 1, 1]}[advantage]
    assert (p.grad != 0).tolist() == [[bool(each) for each in moves]]
    assert (p.grad * advantage <= 0).all() and p.grad.isfinite().all()


def run_clip_cov(clip_ratio, seed, ratios=(1.0,) * 8):
    from math import exp

    from skyrl_megatron.algorithms.losses import seed_random_picks

    seed_random_picks("step", seed)
    p = [exp(x) for x in CLIP_COV["log_p"]]
    q = [probability / ratio for probability, ratio in zip(p, ratios, strict=True)]
    return run_by_hand("clip_cov", p, q, CLIP_COV["advantages"], clip_cov__clip_ratio=clip_ratio)


def test_clip_cov_by_hand():
    # Tokens 0 and 1 are clipped by PPO (ratio 1.5, A > 0), so 2 and 5 remain to be chosen: both, of ⌊0.25·8⌋ = 2.
    loss, gradient, metrics = run_clip_cov(0.25, seed=0, ratios=(1.5, 1.5, 1.1, 1.0, 1.0, 0.9, 1.0, 1.0))
    assert_close(loss, [-1.2, -1.2, 0, 1, -2, 0, -1, 3])
    assert_close(gradient, [0, 0, 0, 1, -2, 0, -1, 3])
    assert mean(metrics["clip_ratio"]) == 0.25


def test_clip_cov_picks_are_seeded():
    zeros = [run_clip_cov(0.0002, seed)[0].eq(0).nonzero().flatten().tolist() for seed in range(12)]
    assert all(len(picked) == 1 and picked[0] in (0, 1, 2, 5) for picked in zeros), "one of the four candidates"
    assert len({tuple(picked) for picked in zeros}) > 1, "not always the same"
    again = [run_clip_cov(0.0002, seed)[0].eq(0).nonzero().flatten().tolist() for seed in range(12)]
    assert again == zeros, "ranks that share a seed choose the same"


@pytest.mark.parametrize("name", ["regular", "dual_clip", "gspo", "sapo"])
def test_a_ratio_anchored_to_the_rollout(name):
    """The loss is that of engine's log-probs in the place of the old ones, which are not needed; masks of the
    off-policy correction still read them, and weights are refused."""
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.errors import AlgorithmError

    loss = PolicyLossRegistry.get(name)
    draw = torch.Generator().manual_seed(0)
    now, old, rollout, advantages = (torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(4))
    mask = torch.ones(4, 6)
    mask[1, 3:] = 0
    expected, _ = loss(now, rollout, advantages, algorithm_config(), mask, rollout)
    config = algorithm_config(ratio_anchor="rollout")
    for given in (None, old):
        found, _ = loss(now, given, advantages, config, mask, rollout)
        assert torch.equal(found, expected)
    assert not torch.equal(loss(now, old, advantages, algorithm_config(), mask, rollout)[0], expected)
    with pytest.raises(AlgorithmError, match=r"ratio_anchor=rollout needs the engine's log-probs"):
        loss(now, old, advantages, config, mask)
    old[2] = rollout[2] + 1.0
    old[[0, 1, 3]] = rollout[[0, 1, 3]]
    masked = {"off_policy_correction__sequence_mask_metric": "geometric", "off_policy_correction__geo_mask_high": 2.0}
    found, metrics = loss(now, old, advantages, algorithm_config(ratio_anchor="rollout", **masked), mask, rollout)
    assert not found[2].any() and torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert mean(metrics["geo_sequence_mask_masked_ratio"]) == 0.25
    twice = algorithm_config(ratio_anchor="rollout", off_policy_correction__tis_ratio_type="token")
    with pytest.raises(AlgorithmError, match=r"corrects twice: set tis_ratio_type=null or ratio_anchor=old"):
        loss(now, old, advantages, twice, mask, rollout)


def test_cispo_anchored_to_the_rollout():
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    config = algorithm_config(cispo__anchor="rollout", cispo__cispo_eps_clip_low=0.5, cispo__cispo_eps_clip_high=1.0)
    log_probs, rollout = tensor([[0.5, 0.2, 0.9]]).log(), tensor([[0.4, 0.8, 0.3]]).log()
    loss, metrics = PolicyLossRegistry.get("cispo")(log_probs, None, torch.ones(1, 3).double(), config, None, rollout)
    assert_close(loss[0], (-tensor([1.25, 0.5, 2.0]) * log_probs[0]).tolist())
    assert mean(metrics["clip_ratio"]) == pytest.approx(2 / 3)
    assert float(metrics["cispo/ratio_max"]) == pytest.approx(3) and float(metrics["cispo/ratio_min"]) == 0.25
    config.off_policy_correction.tis_ratio_type = "token"
    with pytest.raises(ValueError, match="corrects twice"):
        PolicyLossRegistry.get("cispo")(log_probs, log_probs, torch.ones(1, 3).double(), config, None, rollout)


@contextmanager
def frozen_detach(recorded):
    """Values behind ``detach`` stay those of the first call, as the gradient takes them to be."""
    import torch

    original, replay, position = torch.Tensor.detach, bool(recorded), iter(list(recorded))

    def detach(self):
        if replay:
            return next(position)
        recorded.append(original(self).clone())
        return recorded[-1]

    torch.Tensor.detach = detach
    try:
        yield
    finally:
        torch.Tensor.detach = original


def random_batch(seed=0, rows=4, length=6):
    """Float64 tensors of a batch with ragged responses: log_probs, old, advantages, mask, rollout, ref."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(rows, length, dtype=torch.float64, generator=generator)

    log_probs = -noise(1.0).abs() - 0.1
    old = log_probs + noise(0.2)
    mask = (torch.arange(length) >= torch.randint(0, length, (rows, 1), generator=generator)).double()
    return log_probs, old, noise(1.0), mask, old + noise(0.05), log_probs + noise(0.3)


CORRECTIONS = [{}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.02}, {"tis_ratio_type": "sequence"}]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_formula(name):
    """``gradcheck`` of each loss, with and without truncated weights; what a loss detaches is held fixed."""
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry, seed_random_picks

    function = PolicyLossRegistry.get(name)
    for correction in CORRECTIONS:
        changes = {f"off_policy_correction__{key}": value for key, value in correction.items()}
        config = algorithm_config(
            clip_cov__clip_cov_lb=0.01, clip_cov__clip_ratio=0.2, sapo__tau_neg=1.3, clip_ratio_c=1.1, **changes
        )
        log_probs, old, advantages, mask, rollout, _ = random_batch()
        recorded = []

        def loss(log_probs, old=old, advantages=advantages, config=config, mask=mask, rollout=rollout, kept=recorded):
            seed_random_picks(0)
            with frozen_detach(kept):
                return function(log_probs, old, advantages, config, mask, rollout)[0]

        loss(log_probs)
        assert torch.autograd.gradcheck(loss, log_probs.requires_grad_(), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_critic_loss(value_clip):
    import torch

    from skyrl_megatron.algorithms.losses import ppo_critic_loss

    config = algorithm_config(value_clip=value_clip)
    values, old = tensor([[9.0, 1.0, 1.5, 0.0, 3.0, 2.0, 1.1]]), tensor([[9.0, 1.0, 1.0, 1.0, 1.0, 1.9, 1.0]])
    returns, mask = tensor([[0.0, 2.0, 2.0, 2.0, 0.0, 2.0, 1.0]]), tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    loss, metrics = ppo_critic_loss(values.requires_grad_(), old, returns, config, mask)
    if value_clip:  # clipped to 1.2 and 0.8 … ; the larger square counts
        assert_close(loss.detach()[0], [0, 0.5, 0.32, 2.0, 4.5, 0, 0.005])
        assert mean(metrics["clip_ratio"]) == pytest.approx(1 / 6)
    else:
        assert_close(loss.detach()[0], [0, 0.5, 0.125, 2.0, 4.5, 0, 0.005])
    free = values.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ppo_critic_loss(v, old, returns, config, mask)[0], free)


@pytest.mark.parametrize("name", LOSSES)
def test_batches_without_a_valid_token(name):
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    log_probs = torch.full((2, 3), float("nan"), requires_grad=True)
    nothing = torch.full((2, 3), float("inf"))
    function = PolicyLossRegistry.get(name)
    loss, metrics = function(log_probs, nothing, nothing, algorithm_config(), torch.zeros(2, 3), nothing)
    loss.sum().backward()
    assert (loss == 0).all() and (log_probs.grad == 0).all()
    assert all(float(metric.sum) == 0 for key, metric in metrics.items() if not key.endswith(("_min", "_max")))


def test_bad_input():
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry, ppo_critic_loss

    loss, config, x = PolicyLossRegistry.get("regular"), algorithm_config(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 4\), log_probs has \(2, 3\)"):
        loss(x, x, torch.zeros(2, 4), config, x)
    with pytest.raises(ValueError, match=r"log_probs must be \[B, T\], got shape \(6,\)"):
        loss(x.flatten(), x, x, config, x)
    with pytest.raises(ValueError, match=r"old_log_probs has dtype torch\.int64"):
        loss(x, x.long(), x, config, x)
    with pytest.raises(ValueError, match="regular needs old_log_probs"):
        loss(x, None, x, config, x)
    for name in ("rollout_is", "dppo", "m2po"):
        with pytest.raises(ValueError, match=f"{name} needs the engine's log-probs"):
            PolicyLossRegistry.get(name)(x, x, x, config, x)
    with pytest.raises(ValueError, match="dppo_type='top_k'"):
        PolicyLossRegistry.get("dppo")(x, x, x, algorithm_config(dppo__dppo_type="top_k"), x, x)
    with pytest.raises(ValueError, match=r"returns has shape \(3,\)"):
        ppo_critic_loss(x, x, torch.zeros(3), config)
