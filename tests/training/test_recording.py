"""What routers choose and layers give, recorded in forward passes: transformers' own, wherever the layers run."""

import pytest

from tests.training import bodies, reference
from tests.training.test_routing_replay import LAYOUTS, REPLAY

SOURCE = REPLAY | {f"{bodies.MEGATRON}moe_routing_replay_source": "trainer"}
PADDED = {"trainer.use_sample_packing": False}
CASES = [(layout, {}) for layout in LAYOUTS] + [("tp2", PADDED), ("pp2·vpp2", PADDED)]
PLAIN = [("tp2", {}), ("pp2·vpp2", {})]
every_layout = pytest.mark.parametrize(
    "layout, way",
    [pytest.param(*case, marks=[] if case in PLAIN else pytest.mark.full_matrix) for case in CASES],
    ids=[f"{layout}-{'padded' if way else 'packed'}" for layout, way in CASES],
)


def recorded(folder, batch, layout, overrides):
    """Rows of this rank, and what it recorded of each by name."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.recording import Recorder

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=overrides))
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    with Recorder(engine.model.chunks, layers=True) as recorder:
        engine.compute_logprobs(batch.select(rows), make_step=recorder.step)
    seen = dict(recorder.found)
    engine.compute_logprobs(batch.select(rows))
    assert recorder.found == seen, "nothing is recorded afterwards"
    return rows, recorder.found


def hidden_states(folder, batch):
    """Of each row, name → [n, H] by transformers."""
    import torch

    model, rows = reference.load_model(folder), []
    found = {}
    for number, layer in enumerate(model.model.layers):
        for part, module in (("attention", layer.self_attn), ("mlp", layer.mlp), ("output", layer)):

            def keep(_, arguments, output, name=f"{number}.{part}"):
                found[name] = (output[0] if isinstance(output, tuple) else output)[0].clone().numpy()

            module.register_forward_hook(keep)
    model.model.embed_tokens.register_forward_hook(lambda _, a, output: found.update(embedding=output[0].numpy()))
    model.model.norm.register_forward_hook(lambda _, a, output: found.update(norm=output[0].numpy()))
    with torch.no_grad():
        for row in range(len(batch)):
            model(reference.tokens_of(batch, row), use_cache=False)
            rows.append(dict(found))
    return rows


@every_layout
def test_every_rank_has_whole_rows_of_its_layers(ranks, folder, batch, layout, way):
    """Experts are transformers' choice, hidden states its own within rounding; all layers are somewhere."""
    import numpy as np

    from skyrl_megatron.data.batch import routes_of

    world = LAYOUTS[layout]["world"]
    routes, states = reference.natural_routes(folder, batch).rollout_routes, hidden_states(folder, batch)
    merged = [{} for _ in states]
    for rows, found in ranks(world, recorded, folder, batch, LAYOUTS[layout], SOURCE | way):
        for name, by_row in found.items():
            assert sorted(by_row) == list(range(len(rows)))
            for row, value in by_row.items():
                known = merged[rows[row]].setdefault(name, value)
                np.testing.assert_array_equal(known, value, f"{name}: two ranks of a stage")
    for row, found in enumerate(merged):
        assert found.keys() == {*states[row], *(f"routes.{layer}" for layer in range(4))}
        np.testing.assert_array_equal(np.sort(routes_of(found, 4), -1), np.sort(routes[row], -1))
        for name, wanted in states[row].items():
            np.testing.assert_allclose(found[name], wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


def two_steps(folder, batch, layout, overrides, routes, exports):
    """The first step with and without ``routes``; then, with them, log-probs before the second, metrics of it, and
    the weights that it starts from."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import save_hf, stream_hf

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=overrides))
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    gradients = []
    for given in ([], routes):
        batch.rollout_routes = given
        engine.forward_backward(batch.select(rows))
        engine.reduce_gradients()
        pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
        gradients.append({piece.name: piece.tensor.clone() for piece in pieces})
        if not given:
            engine.clear_gradients()
    engine.optim_step()
    save_hf(engine.model, engine.groups, exports)
    logprobs = engine.compute_logprobs(batch.select(rows))
    return gradients, rows, logprobs, engine.forward_backward(batch.select(rows))


@pytest.mark.parametrize(
    "layout", ["single", *(pytest.param(each, marks=pytest.mark.full_matrix) for each in ("tp2", "pp2", "cp2"))]
)
def test_steps_after_the_first_take_the_experts_from_before_it(ranks, folder, batch, tmp_path, layout):
    """Replayed, the first step is the natural one bit for bit. The second is computed with experts that its weights
    would not choose: its log-probs are those of transformers with these experts forced."""
    import torch

    from tests.training.reference import all_logprobs, natural_routes

    layout, chosen = LAYOUTS[layout], natural_routes(folder, batch)
    overrides = SOURCE | {"trainer.policy.optimizer_config.lr": 3e-2}
    out = ranks(
        layout["world"], two_steps, folder, batch, layout, overrides, chosen.rollout_routes, tmp_path / "second"
    )
    found = torch.zeros(batch.response_mask.shape)
    for (natural, replayed), rows, logprobs, metrics in out:
        assert natural.keys() == replayed.keys()
        assert all(torch.equal(natural[name], replayed[name]) for name in natural)
        found[batch.responses.select(torch.arange(len(found)), rows)] = logprobs
        assert metrics["moe_routing_replayed"] == 1.0 and metrics["moe_routing_mismatch"] > 0.05
    forced, free = all_logprobs(tmp_path / "second", chosen), all_logprobs(tmp_path / "second", batch)
    assert (found - forced).abs().max() < 1e-4 < 1e-2 < (found - free).abs().max()
