"""KL estimators against the reference and finite differences; controllers; the penalty inside the reward."""

import pytest

from tests.algorithms.vectors import algorithm_config, cases, tensor

ESTIMATORS = ["k1", "k2", "k3", "abs"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_the_reference(estimator):
    from skyrl_megatron.algorithms.kl import compute_approx_kl

    for case in cases("kl"):
        kl = compute_approx_kl(
            tensor(case["log_probs"]),
            tensor(case["base_log_probs"]),
            loss_mask=tensor(case["loss_mask"]),
            kl_estimator_type=estimator,
        )
        assert (kl - tensor(case["expected"][estimator])).abs().max() <= 1e-9


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients(estimator):
    import torch

    from skyrl_megatron.algorithms.kl import compute_approx_kl

    log_probs = tensor([[float("nan"), -0.5, -2.0], [-1.0, -30.0, -0.1]]).requires_grad_()
    base = tensor([[-1.0, -0.7, -1.0], [float("inf"), -2.0, -0.3]])
    mask = tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    kl = compute_approx_kl(log_probs, base, mask, estimator)
    kl.sum().backward()
    assert (kl[mask == 0] == 0).all() and (log_probs.grad[mask == 0] == 0).all()
    assert kl.isfinite().all() and log_probs.grad.isfinite().all(), "28 nats are clamped, not an overflow"
    free = torch.nan_to_num(log_probs.detach()).requires_grad_()
    finite = torch.where(mask > 0, base, 0.0)
    assert torch.autograd.gradcheck(lambda x: compute_approx_kl(x, finite, mask, estimator), free)


def test_controllers():
    from skyrl_megatron.algorithms.kl import get_kl_controller

    fixed = get_kl_controller(algorithm_config(kl_loss_coef=0.05))
    fixed.update(current=9.0, n_steps=100)
    assert fixed.value == 0.05
    changes = {"kl_ctrl__type": "adaptive", "kl_ctrl__kl_target": 0.1, "kl_ctrl__horizon": 1000}
    adaptive = get_kl_controller(algorithm_config(kl_loss_coef=0.05, **changes))
    adaptive.update(current=0.11, n_steps=500)  # 10 % too high, for half a horizon
    assert adaptive.value == pytest.approx(0.05 * 1.05)
    adaptive.update(current=5.0, n_steps=500)  # at most 20 %
    assert adaptive.value == pytest.approx(0.05 * 1.05 * 1.1)
    adaptive.update(current=0.0, n_steps=1000)
    assert adaptive.value == pytest.approx(0.05 * 1.05 * 1.1 * 0.8)
    with pytest.raises(ValueError, match=r"kl_ctrl\.horizon=0"):
        get_kl_controller(algorithm_config(kl_ctrl__type="adaptive", kl_ctrl__horizon=0))
    with pytest.raises(ValueError, match=r"kl_ctrl\.type='pid'"):
        get_kl_controller(algorithm_config(kl_ctrl__type="pid"))
    with pytest.raises(ValueError, match="kl_estimator_type='k4'"):
        from skyrl_megatron.algorithms.kl import compute_approx_kl

        compute_approx_kl(tensor([[0.0]]), tensor([[0.0]]), kl_estimator_type="k4")


def test_penalty_inside_the_reward():
    from skyrl_megatron.algorithms.kl import penalize_rewards
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.types import RowSpans

    rewards = tensor([0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    log_probs = tensor([9.0, -1.0, -2.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    reference = tensor([0.0, -1.5, -1.0, -1.0, -1.0, -1.9, 5.0, 5.0, 5.0])
    mask = tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).bool()
    given, rows = (rewards, log_probs, reference, mask), RowSpans([3, 3, 3])
    penalized, metrics = penalize_rewards(*given, 0.1, "k1", rows=rows)
    assert penalized.tolist() == pytest.approx([0, -0.05, 1.1, 0, 0, 1.91, 0, 0, 0])
    # Sequence means -0.25 and 0.3; the dummy row does not count.
    assert metric_values(metrics) == pytest.approx({"avg_kl": 0.025, "avg_kl_max": 0.95})
    unchanged, _ = penalize_rewards(*given, -1.0, "k1", rows=rows)
    assert unchanged.equal(rewards), "a negative coefficient would pay for drifting away"
    trained, metrics = penalize_rewards(*(values[1:6] for values in given), 0.1, "k1", rows=RowSpans([2, 3, 0]))
    assert trained.equal(penalized[1:6]), "rows of other lengths, and one without a response"
    assert metric_values(metrics) == pytest.approx({"avg_kl": 0.025, "avg_kl_max": 0.95})
