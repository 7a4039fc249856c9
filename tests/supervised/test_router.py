"""What keeps experts even: the bias per expert and its update, and the auxiliary losses in metrics and gradients. The
closed forms are written out from the routes that transformers takes; gradients are transformers' own in fp64."""

import numpy as np
import pytest

from tests.supervised.test_supervised import MEGATRON, rows

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
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron_supervised.chat_rows import taught_batch
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


# ------------------------------------------------------------------ every kind of load-balancing loss
COEFFICIENT = 0.1
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
WAYS = {
    "one": {"trainer.micro_train_batch_size_per_gpu": 5},
    "dp2": {"trainer.micro_train_batch_size_per_gpu": 5},
    "tp2": {"trainer.micro_train_batch_size_per_gpu": 5, "trainer.gradient_checkpointing": True},
    "cp2": {"trainer.micro_train_batch_size_per_gpu": 5},
    "pp2": {"trainer.micro_train_batch_size_per_gpu": 5, "trainer.gradient_checkpointing": True},
    "padded": {"trainer.micro_train_batch_size_per_gpu": 5, "trainer.use_sample_packing": False},
}
BY_ROW = {"trainer.micro_train_batch_size_per_gpu": 1}
"""With five rows, one of two replicas has a micro-batch of padding alone."""


def balancing(kind):
    return {f"{MEGATRON}moe_router_load_balancing_type": kind, f"{MEGATRON}moe_aux_loss_coeff": COEFFICIENT}


def loss_of(logits, experts, share):
    """E · Σ_e share_e · probability_e of each token, [T]; ``share``: of which tokens' choices, [T, T] bool."""
    import torch

    chosen = torch.nn.functional.one_hot(experts, logits.shape[1]).sum(1).to(logits.dtype)
    shares = share.to(logits.dtype) @ chosen
    return logits.shape[1] * (shares / shares.sum(1, keepdim=True) * logits.softmax(-1)).sum(1)


def router_graphs(folder):
    """transformers' model in fp64, and (logits [T, E], experts [T, K]) of each router with the graph behind them."""
    import torch

    from tests.training.reference import load_model

    model, seen = load_model(folder, "float64"), {}
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:
        gate.register_forward_hook(lambda module, _, out: seen.setdefault(module, []).append((out[0], out[2])))
    for prompt, response, _ in rows():
        model(torch.tensor([[*prompt, *response]]), use_cache=False)
    return model, [[torch.cat(each) for each in zip(*seen[gate], strict=True)] for gate in gates]


def gradients_of(model, loss):
    """HF name → gradient, of the parameters that ``loss`` depends on."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: each.grad.numpy().copy() for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture(scope="module")
def balanced(folder):
    """Kind → (metric per layer, {name: gradient} of the loss that the router adds), from transformers in fp64."""
    import torch

    model, routers = router_graphs(folder)
    sizes = torch.tensor([len(prompt) + len(response) for prompt, response, _ in rows()])
    row = torch.arange(len(sizes)).repeat_interleave(sizes)
    together = {"seq_aux_loss": row[:, None] == row, "aux_loss": torch.ones(len(row), len(row), dtype=torch.bool)}
    together["global_aux_loss"] = together["aux_loss"]
    outcome = {}
    for kind, share in together.items():
        losses = [loss_of(logits, experts, share).mean() for logits, experts in routers]
        outcome[kind] = [loss.item() for loss in losses], gradients_of(model, COEFFICIENT * sum(losses))
    return outcome


def added_gradient(folder, layout, keys, kind):
    """(metrics, {name: what the losses of routers add to the gradient}) of this rank."""
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from skyrl_megatron.runtime.model.moe import routers_of
    from tests.training.bodies import NO_DISTRIBUTED

    keys = NO_DISTRIBUTED | keys | balancing(kind) | {f"{MEGATRON}moe_per_layer_logging": True}
    engine, part = engine_of(folder, layout, keys)
    gradients, z_loss = [], engine.model.config.moe_z_loss_coeff
    for chosen in ("none", kind):
        for router in routers_of(engine.model.chunks):
            router.routing_type = chosen
            router.config.moe_z_loss_coeff = z_loss if chosen == kind else None
        engine.clear_gradients()
        metrics = engine.forward_backward(part)
        engine.reduce_gradients()
        pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
        gradients.append({each.name: each.tensor.detach().double().numpy().copy() for each in pieces})
    plain, whole = gradients
    return metrics, {name: whole[name] - plain[name] for name in whole}


def check_balance(outcomes, wanted):
    losses, gradients = wanted
    seen = set()
    for metrics, added in outcomes:
        layers = [value for name, value in metrics.items() if name.startswith("moe_load_balancing_loss/layer_")]
        assert layers == pytest.approx(losses, rel=1e-5)
        for name in added.keys() & gradients.keys():
            seen.add(name)
            error = np.abs(added[name] - gradients[name]).max() / np.abs(gradients[name]).max()
            assert error <= 1e-3, f"{name}: {error:.1e}"
    assert sum(name.endswith("mlp.gate.weight") for name in seen) == len(losses)


EVERY_WAY = [
    pytest.param(
        kind,
        way,
        marks=() if (kind, way) in {("seq_aux_loss", "tp2"), ("global_aux_loss", "cp2")} else pytest.mark.full_matrix,
    )
    for kind in KINDS
    for way in WAYS
    if (kind, way) != ("aux_loss", "dp2")  # another loss: each replica's micro-batch alone
]


@pytest.mark.parametrize("kind, way", EVERY_WAY)
def test_load_balancing_losses(ranks, folder, balanced, kind, way):
    """Metric and gradient are the same in every layout, and those of tokens without padding."""
    layout = (LAYOUTS | MORE | {"padded": dict(world=1)})[way]
    check_balance(ranks(layout["world"], added_gradient, folder, layout, WAYS[way], kind), balanced[kind])


@pytest.mark.parametrize("way", ["one", *(pytest.param(way, marks=pytest.mark.full_matrix) for way in ("tp2", "cp2"))])
def test_losses_of_a_router_of_log_odds(ranks, tmp_path, way):
    """ERNIE 4.5, which chooses by probability and bias: the losses are of its logits and its best probabilities."""
    import torch

    from tests.bridges.tiny_models import save_tiny

    base = save_tiny("ernie4_5_moe", tmp_path / "hf", num_key_value_heads=2, initializer_range=0.2)
    model, routers = router_graphs(base)
    every = torch.ones(len(routers[0][0]), len(routers[0][0]), dtype=torch.bool)
    losses = [loss_of(logits, logits.topk(2).indices, every).mean() for logits, _ in routers]
    squares = [logits.logsumexp(-1).square().mean() for logits, _ in routers]
    assert any((experts.sort().values != logits.topk(2).indices.sort().values).any() for logits, experts in routers)
    gradients = gradients_of(model, COEFFICIENT * sum(losses) + 0.05 * sum(squares))
    keys, layout = WAYS[way] | {f"{MEGATRON}moe_z_loss_coeff": 0.05}, (LAYOUTS | MORE)[way]
    outcomes = ranks(layout["world"], added_gradient, base, layout, keys, "aux_loss")
    check_balance(outcomes, ([loss.item() for loss in losses], gradients))
    entropies = [torch.distributions.Categorical(logits=logits).entropy().mean().item() for logits, _ in routers]
    for metrics, _ in outcomes:
        assert metrics["moe_z_loss"] == pytest.approx(np.mean([each.item() for each in squares]), rel=1e-5)
        assert metrics["moe_router_entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_the_loss_of_a_sequence_is_its_own(ranks, folder, balanced):
    """One row a micro-batch, one of them padding alone: the numbers of one micro-batch of all rows."""
    outcomes = ranks(2, added_gradient, folder, MORE["dp2"], BY_ROW, "seq_aux_loss")
    check_balance(outcomes, balanced["seq_aux_loss"])


def balance_by_row(folder, layout, keys):
    engine, part = engine_of(folder, layout, keys)
    order = [batch.rows.tolist() for batch in engine._micro_batches(part, 2)]
    return order, engine.forward_backward(part)


def test_the_global_loss_counts_the_tokens_so_far(ranks, folder):
    """Micro-batches of unequal length: each token counts once in the shares."""
    import torch

    keys = balancing("global_aux_loss") | {"trainer.micro_train_batch_size_per_gpu": 2}
    ((order, metrics),) = ranks(1, balance_by_row, folder, LAYOUTS["one"], keys)
    assert sorted(map(len, order)) == [1, 2, 2]
    ends = np.cumsum([len(prompt) + len(response) for prompt, response, _ in rows()])
    tokens = [np.arange(end - len(row[0]) - len(row[1]), end) for row, end in zip(rows(), ends, strict=True)]
    losses = []
    for logits, experts, _ in routes(folder).values():
        logits, experts, so_far, total = torch.tensor(logits).double(), torch.tensor(experts), [], 0.0
        for micro_batch in order:
            part = np.concatenate([tokens[row] for row in micro_batch])
            so_far += part.tolist()
            share = torch.zeros(len(logits), len(logits), dtype=torch.bool)
            share[:, so_far] = True
            total += loss_of(logits, experts, share)[part].sum().item()
        losses.append(total / len(logits))
    assert metrics["moe_load_balancing_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
