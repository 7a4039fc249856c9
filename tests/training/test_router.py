"""What keeps experts even: the bias per expert and its update, and the auxiliary losses in the metrics. The closed
forms are written out from the routes that transformers takes."""

import numpy as np
import pytest

from tests.training.test_supervised import MEGATRON, rows

LAYOUTS = {"one": dict(world=1), "dp2·ep2": dict(world=2, ep=2)}
MORE = {"tp2": dict(world=2, tp=2), "cp2": dict(world=2, cp=2), "pp2": dict(world=2, pp=2), "dp2": dict(world=2)}
EVERY = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)]
RATE = 0.125
ASKED = {f"{MEGATRON}transformer_config_kwargs.moe_router_bias_update_rate": RATE}
FROZEN = {
    "not asked": {},
    "frozen router": ASKED | {f"{MEGATRON}freeze_moe_router": True},
    "adapters": ASKED | {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.alpha": 8},
}
BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A folder of a model that chooses experts by score and bias."""
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_hidden_layers=4, num_key_value_heads=2, initializer_range=0.2)
    return save_tiny("glm4_moe", tmp_path_factory.mktemp("glm4_moe"), **sizes)


def routes(folder):
    """(logits [T, E], experts [T, K]) of every layer with experts, and its bias [E] or None, over all rows."""
    import torch

    from tests.training.reference import load_model

    model, seen = load_model(folder), {}
    gates = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    for name, gate in gates.items():
        gate.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, []).append((out[0], out[2])))
    with torch.no_grad():
        for prompt, response, _ in rows():
            model(torch.tensor([[*prompt, *response]]), use_cache=False)
    joined = {name: [torch.cat(parts).numpy() for parts in zip(*each, strict=True)] for name, each in seen.items()}
    bias = {name: getattr(gate, "e_score_correction_bias", None) for name, gate in gates.items()}
    return {name: (*each, None if bias[name] is None else bias[name].numpy()) for name, each in joined.items()}


def engine_of(folder, layout, keys=None):
    """An engine of supervised training, and its share of the rows."""
    from skyrl_megatron.data.packing import split_for_dp
    from skyrl_megatron.rollout.chat_rows import taught_batch
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.training.bodies import config

    algorithm = {f"trainer.algorithm.{name}": False for name in ("use_kl_loss", "use_entropy_loss")}
    algorithm |= {"trainer.algorithm.policy_loss_type": "cross_entropy", "trainer.algorithm.temperature": 1.0}
    engine = MegatronEngine(config(folder, **layout, overrides=algorithm | (keys or {})))
    batch = taught_batch(rows(), [str(row) for row in range(len(rows()))])
    return engine, batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])


def biases(engine):
    """HF name → bias, of the layers of this rank."""
    from skyrl_megatron.runtime.hf_weights import stream_hf

    return {
        each.name: each.tensor.clone().numpy()
        for each in stream_hf(engine.model, engine.groups)
        if each.name.endswith(BIAS)
    }


def one_step(folder, layout, keys):
    """The biases after one step. A pass without gradients, and one that is dropped, do not count."""
    engine, part = engine_of(folder, layout, keys)
    engine.compute_logprobs(part)
    engine.forward_backward(part)
    engine.clear_gradients()
    engine.forward_backward(part)
    engine.optim_step()
    return biases(engine)


@pytest.mark.parametrize("name", EVERY)
def test_the_bias_follows_the_load(ranks, biased, name):
    """b ← b + rate·sign(mean load − load), arXiv:2408.15664, over the tokens of all ranks."""
    layout = (LAYOUTS | MORE)[name]
    wanted = {}
    for gate, (_, experts, bias) in routes(biased).items():
        load = np.bincount(experts.flatten(), minlength=len(bias))
        wanted[gate.replace("mlp.gate", BIAS)] = bias + np.float32(RATE) * np.sign(load.mean() - load)
    found = {}
    for outcome in ranks(layout["world"], one_step, biased, layout, ASKED):
        found |= outcome
    assert found.keys() == wanted.keys() and len(found) == 3
    for tensor, value in wanted.items():
        assert (found[tensor] == value.astype(np.float32)).all(), tensor


@pytest.mark.parametrize("name", FROZEN)
def test_else_the_bias_stays(ranks, biased, name):
    (found,) = ranks(1, one_step, biased, LAYOUTS["one"], FROZEN[name])
    before = {gate.replace("mlp.gate", BIAS): bias for gate, (_, _, bias) in routes(biased).items()}
    assert found.keys() == before.keys() and all((found[tensor] == before[tensor]).all() for tensor in before)


def two_steps(folder, root, layout, resume):
    """The biases between two steps, where a checkpoint is saved, and after them. ``resume``: it is loaded instead."""
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.checkpoint.training import state_of

    engine, part = engine_of(folder, layout, ASKED)
    checkpoints = RankCheckpointer(root, state_of(engine))
    if resume:
        checkpoints.load("from_path", f"{root}/global_step_1")
    else:
        engine.forward_backward(part)
        engine.optim_step()
        checkpoints.save(1)
    checkpoints.close()
    between = biases(engine)
    engine.forward_backward(part)
    engine.optim_step()
    return between, biases(engine)


def test_the_bias_is_saved_and_resumed(ranks, biased, tmp_path):
    layout = LAYOUTS["dp2·ep2"]
    between, whole = ranks(2, two_steps, biased, str(tmp_path), layout, False)[0]
    loaded, resumed = ranks(2, two_steps, biased, str(tmp_path), layout, True)[0]
    assert between.keys() == whole.keys() == loaded.keys() == resumed.keys() and len(whole) == 3
    for tensor in whole:
        assert (between[tensor] == loaded[tensor]).all() and (whole[tensor] == resumed[tensor]).all(), tensor
        assert (between[tensor] != whole[tensor]).any(), tensor


AUXILIARY = {
    f"{MEGATRON}moe_router_load_balancing_type": "aux_loss",
    f"{MEGATRON}moe_aux_loss_coeff": 0.1,
    f"{MEGATRON}moe_z_loss_coeff": 0.05,
    f"{MEGATRON}moe_per_layer_logging": True,
    "trainer.micro_train_batch_size_per_gpu": 5,
}
WHOLE = ("tp2", "cp2", "pp2")
"""Layouts with the micro-batch of one rank."""


def auxiliary_metrics(folder, layout, keys):
    engine, part = engine_of(folder, layout, keys)
    return engine.forward_backward(part)


@pytest.mark.parametrize("name", ["one", *(pytest.param(name, marks=pytest.mark.full_matrix) for name in WHOLE)])
def test_auxiliary_losses_are_metrics(ranks, folder, name):
    """E·Σ share of the tokens · mean probability over experts (arXiv:2101.03961), and the mean of logsumexp² of the
    logits (arXiv:2202.08906), each without its coefficient."""
    layout, wanted = (LAYOUTS | MORE)[name], {}
    for layer, (logits, experts, _) in enumerate(routes(folder).values()):
        logits = logits.astype(np.float64)
        total = np.log(np.exp(logits).sum(1))
        share = np.bincount(experts.flatten(), minlength=logits.shape[1]) / experts.size
        mean = np.exp(logits - total[:, None]).mean(0)
        wanted[f"moe_load_balancing_loss/layer_{layer}"] = logits.shape[1] * (share * mean).sum()
        wanted[f"moe_z_loss/layer_{layer}"] = (total**2).mean()
    for kind in ("moe_load_balancing_loss", "moe_z_loss"):
        wanted[kind] = np.mean([value for metric, value in wanted.items() if metric.startswith(f"{kind}/")])
    for metrics in ranks(layout["world"], auxiliary_metrics, folder, layout, AUXILIARY):
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    (plain,) = ranks(1, auxiliary_metrics, folder, LAYOUTS["one"], {})
    assert not [metric for metric in plain if metric.startswith(("moe_z", "moe_load_balancing"))]
