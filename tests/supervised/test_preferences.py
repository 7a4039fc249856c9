"""The step of training on preferences: a closed form in float64, in every layout and cut."""

import numpy as np
import pytest

LAYOUTS = {"dp2": dict(world=2), "tp2": dict(world=2, tp=2)}
MORE = {"cp2": dict(world=2, cp=2), "pp2": dict(world=2, pp=2), "dp2·ep2": dict(world=2, ep=2)}
SETTINGS = {"sigmoid": dict(beta=0.3), "ipo": dict(beta=0.2), "kto": dict(beta=0.3, undesirable_weight=0.7)}
KL = 0.4


def rows(loss):
    """Items of five pairs, or of ten answers; the first answer has two sequences."""
    rng = np.random.default_rng(5)

    def sequence(prompt, response):
        mask = (rng.random(response) < 0.7).astype(int)
        mask[-1] = 1
        return [*rng.integers(0, 1003, prompt)], [*rng.integers(0, 1003, response)], mask.tolist()

    answers = [[sequence(4, 9), sequence(13, 3)]]
    answers += [
        [sequence(p, r)] for p, r in ((4, 20), (7, 3), (7, 9), (3, 12), (3, 2), (9, 6), (9, 8), (2, 9), (2, 1))
    ]
    if loss == "kto":
        return [
            {"uid": str(n), "sequences": each, "sides": [1 if n % 3 else -1] * len(each)}
            for n, each in enumerate(answers)
        ]
    return [
        {"uid": str(n), "sequences": [*a, *b], "sides": [1] * len(a) + [-1] * len(b)}
        for n, (a, b) in enumerate(zip(answers[::2], answers[1::2], strict=True))
    ]


def with_one_prompt(items):
    """The items, with the prompt of their first sequence before all of their answers."""
    return [
        item | {"sequences": [(item["sequences"][0][0], *answer) for _, *answer in item["sequences"]]}
        for item in items
    ]


def batch_of(loss, one_prompt=False):
    """The batch, with made-up sums of a reference near those of the model."""
    import torch

    from skyrl_megatron_supervised.preference_rows import preference_batch

    batch, noise = (
        preference_batch(with_one_prompt(rows(loss)) if one_prompt else rows(loss)),
        np.random.default_rng(6).normal(0, 2, 11),
    )
    batch.preferences[:, 1] = -7 * batch.responses.sum(batch.loss_mask) + torch.from_numpy(noise)
    batch.metadata["kto_kl"] = KL
    return batch


def step(folder, loss, layout, overrides=None, one_prompt=False):
    """(metrics, {HF name: gradient}) of this rank's share."""
    from skyrl_megatron.config.schema.supervised import DPOConfig
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from skyrl_megatron.workers.dispatch import _split
    from skyrl_megatron_supervised.preference_engine import PreferenceEngine
    from tests.training.bodies import NO_DISTRIBUTED, config

    algorithm = {f"trainer.algorithm.{name}": False for name in ("use_kl_loss", "use_entropy_loss")}
    algorithm |= {"trainer.algorithm.policy_loss_type": "cross_entropy", "trainer.algorithm.temperature": 1.0}
    cfg = config(folder, **layout, overrides=NO_DISTRIBUTED | algorithm | (overrides or {}))
    cfg.dpo = DPOConfig(loss=loss, **SETTINGS[loss])
    engine, batch = PreferenceEngine(cfg), batch_of(loss, one_prompt)
    shares = _split(batch, np.arange(len(batch)), engine.flops.forward(batch.lengths), engine.dp_size)
    part = batch.select(shares[engine.dp_rank][0])
    metrics = engine.forward_backward(part)
    engine.reduce_gradients()
    pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
    return metrics, {f"{piece.name}[{piece.index}]": piece.tensor.detach().float().cpu().numpy() for piece in pieces}


def close(found, want):
    for tensor, gradient in found.items():
        assert np.abs(gradient - want[tensor]).max() <= 1e-5 * np.abs(want[tensor]).max(), tensor


@pytest.fixture(scope="module", params=["sigmoid", "ipo", "kto"])
def loss(request):
    return request.param


@pytest.fixture(scope="module")
def alone(ranks, folder, loss):
    return ranks(1, step, folder, loss, dict(world=1))[0]


@pytest.fixture(scope="module")
def closed_form(folder, loss):
    """(loss, rewards of each row's two answers, {HF name: gradient}) of transformers' model in float64."""
    import torch

    from tests.training.reference import load_model

    model = load_model(folder).double()
    model.set_experts_implementation("eager")  # the grouped product is not of float64
    batch = batch_of(loss)
    beta = SETTINGS[loss]["beta"]
    losses, rewards, place = [], [], 0
    for row in rows(loss):
        ratios, tokens = {1: 0.0, -1: 0.0}, {1: 0, -1: 0}
        for (prompt, response, mask), side in zip(row["sequences"], row["sides"], strict=True):
            logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
            of_tokens = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
            ratios[side] = ratios[side] + of_tokens[torch.tensor(mask) > 0].sum() - batch.preferences[place, 1]
            tokens[side] += sum(mask)
            place += 1
        if loss == "sigmoid":
            losses.append((1 + (-beta * (ratios[1] - ratios[-1])).exp()).log())
        elif loss == "ipo":
            losses.append((ratios[1] / tokens[1] - ratios[-1] / tokens[-1] - 1 / (2 * beta)) ** 2)
        else:
            side = row["sides"][0]
            weight = 1.0 if side > 0 else SETTINGS[loss]["undesirable_weight"]
            losses.append(weight * (1 - 1 / (1 + (-beta * side * (ratios[side] - KL)).exp())))
        rewards.append([float((beta * torch.as_tensor(ratios[side])).detach()) for side in (1, -1)])
    total = sum(losses) / len(losses)
    total.backward()
    return total.item(), np.array(rewards), {name: value.grad for name, value in model.named_parameters()}


def test_loss_and_rewards_are_the_closed_form(alone, closed_form, loss):
    metrics, rewards = alone[0], closed_form[1]
    assert metrics["policy_loss"] == pytest.approx(closed_form[0], rel=1e-6)
    if loss != "kto":
        margins = rewards[:, 0] - rewards[:, 1]
        assert metrics["rewards/margins"] == pytest.approx(margins.mean(), rel=1e-5, abs=1e-6)
        assert metrics["rewards/accuracies"] == pytest.approx((margins > 0).mean())
        assert metrics["rewards/chosen"] == pytest.approx(rewards[:, 0].mean(), rel=1e-5)
    else:
        chosen = [row["sides"][0] > 0 for row in rows(loss)]
        assert metrics["rewards/chosen"] == pytest.approx(rewards[chosen, 0].mean(), rel=1e-5)
        assert "rewards/margins" not in metrics


def test_gradients_are_the_closed_form(alone, closed_form):
    """Of the tensors that disk and memory name alike; the others are compared over layouts."""
    found = {name.removesuffix("[None]"): value for name, value in alone[1].items()}
    same = {name: value.numpy() for name, value in closed_form[2].items() if name in found and value is not None}
    assert len(same) > 20
    close({name: found[name] for name in same}, same)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_every_layout_has_the_same_loss_and_gradients(ranks, folder, alone, loss, name):
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], step, folder, loss, layout)
    for metrics, gradients in outcomes:
        for metric in ("policy_loss", "rewards/chosen", "rewards/rejected", "logps/chosen"):
            assert metrics[metric] == pytest.approx(alone[0][metric], rel=1e-6), metric
        close(gradients, alone[1])
    assert set().union(*(gradients for _, gradients in outcomes)) == alone[1].keys()


CUTS = {"one": {"trainer.micro_train_batch_size_per_gpu": 1}, "tokens": {"trainer.max_tokens_per_microbatch": 60}}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_has_the_same_loss_and_gradients(ranks, folder, alone, loss, cut):
    ((metrics, gradients),) = ranks(1, step, folder, loss, dict(world=1), CUTS[cut])
    assert metrics["policy_loss"] == pytest.approx(alone[0]["policy_loss"], rel=1e-6)
    assert metrics["num_microbatches"] != alone[0]["num_microbatches"]
    close(gradients, alone[1])


def test_a_pair_that_fits_no_micro_batch(ranks, folder):
    with pytest.raises(Exception, match=r"exceeds trainer\.max_tokens_per_microbatch=32"):
        ranks(1, step, folder, "sigmoid", dict(world=1), {"trainer.max_tokens_per_microbatch": 32})


def test_pairs_are_not_split(loss):
    from skyrl_megatron.data.splitting import units
    from skyrl_megatron.workers.dispatch import _split

    batch = batch_of(loss)
    assert units(batch)[0].tolist() == ([0, 1] if loss == "kto" else [0, 1, 2])
    shares = [rows for rows, _ in _split(batch, np.arange(len(batch)), batch.lengths.astype(float), 2)]
    assert not {batch.uids[row] for row in shares[0]} & {batch.uids[row] for row in shares[1]}


def shared_step(*arguments):
    """:func:`step` with shared prefixes."""
    from tests.training.test_shared_prefixes import SHARED, sharing

    with sharing():
        return step(*arguments, SHARED, True)


def test_the_prompt_of_a_pair_is_computed_once(ranks, folder, loss):
    [(metrics, gradients)] = ranks(1, shared_step, folder, loss, dict(world=1))
    [(of_rows, want)] = ranks(1, step, folder, loss, dict(world=1), None, True)
    assert metrics["shared_prefix_share"] > (0.01 if loss == "kto" else 0.1)  # one of its answers has two sequences
    for name in ("policy_loss", "rewards/chosen"):
        assert metrics[name] == pytest.approx(of_rows[name], rel=1e-5)
    close(gradients, want)
