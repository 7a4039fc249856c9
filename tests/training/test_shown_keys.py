"""Every field that is passed on to Megatron, or read here, shows in a step of a tiny model."""

import pytest

from tests.support.rank_pool import end_layout
from tests.support.shown_keys import IN_A_STEP
from tests.training import bodies
from tests.training.reference import LR

MUON = {"trainer.policy.optimizer_config.optimizer": "muon", "trainer.policy.optimizer_config.lr": LR}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder of a model with shared experts."""
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_hidden_layers=2, num_key_value_heads=2, initializer_range=0.2)
    return save_tiny("qwen2_moe", tmp_path_factory.mktemp("qwen2_moe"), **sizes)


def steps_body(folder, batch, cases):
    """For each (keys, function): calls of the function, the size of the gradients, and by how much a step moves the
    weights; or the message of the error."""
    import importlib
    import unittest.mock

    from skyrl_megatron.runtime.engine import MegatronEngine

    def moved(engine):
        weights = [parameter.detach().clone() for parameter in engine.chunks[0].parameters()]
        engine.forward_backward(batch)
        engine.reduce_gradients()
        size = sum(float(parameter.main_grad.double().abs().sum()) for parameter in engine.chunks[0].parameters())
        engine.optim_step()
        now = engine.chunks[0].parameters()
        return size, sum(float((new - old).double().abs().sum()) for old, new in zip(weights, now, strict=True))

    found = []
    for keys, function in cases:
        module, _, path = function.partition(":")
        owner, _, name = path.rpartition(".")
        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        real = getattr(place, name)
        with unittest.mock.patch.object(place, name, autospec=True, side_effect=real) as counted:
            try:
                engine = MegatronEngine(bodies.config(folder, overrides=bodies.NO_DISTRIBUTED | keys), total_steps=9)
                size, way = moved(engine)
                found.append((counted.call_count, size, way))
            except Exception as error:
                found.append(str(error))
        end_layout()
    return found


ANY = "skyrl_megatron.runtime.optimizer:fuse_gradients"


@pytest.mark.parametrize("kind", IN_A_STEP)
def test_each_field_shows(ranks, shared, batch, kind):
    cases, shown = [], IN_A_STEP[kind]
    for name, key in shown.items():
        plain = {f"{bodies.MEGATRON}{other}": value for other, value in key.beside}
        plain |= MUON if name.startswith("muon_") else {}
        field = {f"{bodies.MEGATRON}{kind}_config_kwargs.{name}": key.value}
        cases += [(keys, key.calls or ANY) for keys in (plain, plain | field)]
    (outcomes,) = ranks(1, steps_body, shared, batch, cases)
    unseen = {}
    for (name, key), plain, asked in zip(shown.items(), outcomes[::2], outcomes[1::2], strict=True):
        if key.says:
            seen = key.says in asked and key.says not in plain
        elif key.calls:
            seen = plain[0] != asked[0]
        elif kind == "optimizer":
            seen = plain[1] == asked[1] and plain[2] != asked[2]
        else:
            seen = plain[1] != asked[1]
        if not seen:
            unseen[name] = (plain, asked)
    assert unseen == {}


@pytest.mark.parametrize("overlapped", [True, False])
def test_stages_send_as_they_are_told(shared, overlapped):
    """``overlap_p2p_comm``, as the ranks of four interleaved stages get it."""
    import torch

    from skyrl_megatron.config.roles import role_layout
    from skyrl_megatron.runtime.engine_settings import hf_model, transformer_kwargs
    from skyrl_megatron.runtime.model.build import transformer_config

    given = {f"{bodies.MEGATRON}transformer_config_kwargs.overlap_p2p_comm": overlapped}
    cfg = bodies.config(shared, pp=4, vpp=2, world=4, overrides=given)
    config = transformer_config(
        hf_model(cfg, "policy"),
        role_layout(cfg, "policy"),
        dtype=torch.float32,
        overrides=transformer_kwargs(cfg, "policy"),
    )
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (overlapped, not overlapped)
