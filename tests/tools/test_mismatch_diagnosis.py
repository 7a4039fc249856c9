"""Which cause is named, from numbers alone; the command's errors."""

import dataclasses

import numpy as np
import pytest

RUN, ENGINE, NATURAL = ("recorded", "recorded"), ("engine", "recorded"), ("natural", "recorded")


def evidence(ways, now=1e-7, jumps=None, **changes):
    """What is known where ``ways`` are so far from the record; ``jumps``: place → its relative difference, in passes
    with the engine's experts."""
    from skyrl_megatron_tools.logprob_mismatch.diagnosis import (
        ComputeMode,
        Evidence,
        LayerDifferences,
        LogprobMismatch,
    )

    def gap(size):
        return LogprobMismatch(size, 3 * size, 0, 2)

    names = ["embedding", *(f"{n}.{part}" for n in range(2) for part in ("attention", "mlp", "output")), "norm"]
    apart = {name: np.array([1e-7, (jumps or {}).get(name, 1e-7)]) for name in names}
    layers = LayerDifferences(apart, dict.fromkeys(names, 1e-7))
    known = Evidence(
        step=4, wanted=3, loaded=3, dtypes=("float32", "float32"), exact=1e-4, rounding=1e-4, finest=1.0,
        used=ComputeMode(*RUN), ways={ComputeMode(*way): gap(size) for way, size in ways.items()}, now=gap(now),
        layers_used=layers, layers_same=layers,
    )  # fmt: skip
    return dataclasses.replace(known, **changes)


def found(*args, **kwargs):
    from skyrl_megatron_tools.logprob_mismatch.diagnosis import diagnose

    return diagnose(evidence(*args, **kwargs))


def test_nothing_is_wrong():
    assert found({RUN: 2e-7, ENGINE: 3e-7}).cause == "none"


def test_what_makes_the_gap_vanish_is_the_cause():
    assert found({RUN: 0.1, ENGINE: 1e-7, NATURAL: 0.05}).cause == "routes"
    whole, both = ("recorded", "whole"), ("engine", "whole")
    assert found({RUN: 0.1, whole: 1e-7, ENGINE: 0.1, both: 1e-7}).cause == "sampling support"
    assert found({RUN: 0.1, whole: 0.1, ENGINE: 0.1, both: 1e-7}).cause == "several"


def test_a_record_of_other_weights():
    from skyrl_megatron_tools.logprob_mismatch.diagnosis import LogprobMismatch

    first = found({RUN: 0.1, ENGINE: 0.2})
    assert (first.cause, first.asks) == ("stale version", "versions")
    other = {"1": LogprobMismatch(0.3, 0.5, 0, 0), "2": LogprobMismatch(1e-7, 2e-7, 0, 0)}
    again = found({RUN: 0.1, ENGINE: 0.2}, versions=other)
    assert again.cause == "stale version" and again.asks is None
    assert any("matches version 2" in reason for reason in again.why)
    other["2"] = LogprobMismatch(0.2, 0.5, 0, 0)
    assert found({RUN: 0.1, ENGINE: 0.2}, versions=other).cause == "unknown", "of no version that is kept"


def test_a_layer_that_jumps_with_the_same_experts():
    jump = {"1.attention": 0.3, "1.mlp": 0.5}
    one = found({RUN: 0.4, ENGINE: 0.4}, now=0.4, jumps=jump)
    assert (one.cause, one.asks) == ("wrong weight", "weights")
    assert (one.place.where, one.place.token, one.place.size) == ("layer 1, attention", 1, 0.3)
    live = found({RUN: 1e-7, ENGINE: 1e-7}, now=0.4, jumps=jump)
    assert live.cause == "wrong weight", "the engine that would start now, not the record's"


def test_runs_whose_bits_should_agree():
    """A difference of one token in its last bit is named: no limit of rounding covers it."""
    bits = dict(bits=True, exact=0.0, rounding=0.0)
    places = {name: 0.0 for name in ("embedding", "0.attention", "0.mlp", "0.output", "norm")}
    places |= {f"1.{part}": 0.0 for part in ("attention", "mlp", "output")}
    from skyrl_megatron_tools.logprob_mismatch.diagnosis import LayerDifferences

    def layers(**jumps):
        apart = {name: np.array([0.0, jumps.get(name, 0.0)]) for name in places}
        return LayerDifferences(apart, dict.fromkeys(places, 0.0))

    assert found({RUN: 0.0}, now=0.0, layers_same=layers(), **bits).cause == "none"
    jump = dict(layers_same=layers(**{"1.mlp": 1e-8, "1.output": 1e-7}), **bits)
    first = found({RUN: 1e-7}, now=1e-7, **jump)
    assert (first.cause, first.asks, first.place.where) == ("wrong weight", "weights", "layer 1, mlp")
    compared = dict(tensors=["all 4 tensors are equal"], same_tensors=True)
    assert found({RUN: 1e-7}, now=1e-7, **jump, **compared).cause == "other operations"
    softmax = found({RUN: 1e-7}, now=1e-7, layers_same=layers(), **bits)
    assert (softmax.cause, softmax.place.where) == ("other operations", "the softmax")
    assert found({RUN: 1e-7}, now=0.0, layers_same=layers(), **bits).cause == "stale version"


def test_rounding_that_never_jumps():
    coarse = dict(dtypes=("bfloat16", "float32"), rounding=0.02, finest=2.0**-16)
    for record in (0.01, 1e-7):
        one = found({RUN: record, ENGINE: 0.01}, now=0.01, **coarse)
        assert one.cause == "precision" and one.place.where == "the first layer's input"
    assert found({RUN: 0.5, ENGINE: 0.01}, now=0.01, **coarse).cause == "routes", "more than rounding, and it vanishes"
    assert found({RUN: 0.5, ENGINE: 0.5}, now=0.5, **coarse).cause == "unknown"


def test_differences_of_the_log_probs_of_rows():
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron_tools.logprob_mismatch.diagnosis import LayerDifferences, LogprobMismatch, RouteDiff

    def batch(*masks):
        return collate(
            [[1]] * len(masks), masks, uids=["a"] * len(masks), rewards=[0.0] * len(masks), loss_masks=masks
        )

    rows = batch([0, 1, 1], [1, 1, 1])
    gap = LogprobMismatch.of(np.array([9.0, 1, 2, 1, 2, 3]), np.array([0.0, 1, 2.5, 1, 2, 3]), rows)
    assert gap == LogprobMismatch(0.1, 0.5, 0, 1)
    rows = batch([], [0, 1], [], [0, 1, 1, 1])
    gap = LogprobMismatch.of(np.array([9.0, 1, 8, 2, 1, 2]), np.array([0.0, 1, 0, 2, 1.5, 2]), rows)
    assert gap == LogprobMismatch(0.125, 0.5, 3, 1), "rows of other lengths"
    assert LogprobMismatch.of(np.full(2, np.nan), np.zeros(2), batch([1, 1])).largest == np.inf
    one = {"10.mlp": np.ones((3, 4)), "2.output": np.ones((3, 4)), "norm": np.ones((3, 4)), "other": np.ones((3, 4))}
    other = {**one, "10.mlp": np.diag([1.0, 1, 3]) @ one["10.mlp"]} | {"embedding": np.ones((3, 4))}
    layers = LayerDifferences.of(one, {name: other[name] for name in other if name != "other"}, {})
    assert list(layers.apart) == ["2.output", "10.mlp", "norm"]
    assert (layers.first().where, layers.first().token, layers.first().size) == ("layer 10, mlp", 2, 2.0)
    routes = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    moved = routes.copy()
    moved[1, 1] = [3, 1]
    assert RouteDiff.of([routes, None], [routes[..., ::-1], routes], [0, 1]) == RouteDiff(0.0)
    assert RouteDiff.of([routes], [moved], [0, 1]) == RouteDiff(0.25, 1, 1)


@pytest.mark.process  # imports torch, which asks what the interpreter is
def test_a_tensor_that_an_engine_holds_otherwise_is_named():
    """In a map of several, in half precision, in a vector of several, among experts that a kernel has packed."""
    from skyrl_megatron_tools.logprob_mismatch.replay import differing_tensors, rounded

    rng = np.random.default_rng(0)

    def drawn(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    trainer = {"a.q_proj.weight": drawn(6, 4), "a.k_proj.weight": drawn(2, 4), "a.q_proj.bias": drawn(6)}
    trainer |= {"a.k_proj.bias": drawn(2), "gate.weight": drawn(3, 4)}
    trainer |= {f"mlp.experts.{e}.{name}.weight": drawn(5, 4) for e in range(3) for name in ("gate_proj", "up_proj")}
    half = {name: rounded(tensor, "bfloat16") for name, tensor in trainer.items()}
    engine = {
        "a.qkv.weight": np.concatenate([half["a.q_proj.weight"], half["a.k_proj.weight"]]),
        "a.qkv.bias": np.concatenate([half["a.q_proj.bias"], half["a.k_proj.bias"]]),
        "gate.weight": trainer["gate.weight"],
        "experts.w13": np.stack([
            rng.permutation(np.concatenate([half[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up")]).ravel())
            for e in range(3)
        ]).reshape(3, 10, 4),
    }  # fmt: skip
    assert differing_tensors(trainer, engine, "bfloat16") == []
    for name, line in {
        "a.k_proj.weight": "1 of its 2 rows",
        "a.q_proj.bias": "has no such vector",
        "mlp.experts.1.up_proj.weight": "1 of its 20 values",
    }.items():
        wrong = {**trainer, name: trainer[name].copy()}
        wrong[name].flat[0] += 0.5
        (told,) = differing_tensors(wrong, engine, "bfloat16")
        assert told.startswith(name) and line in told


@pytest.mark.process  # imports torch, which asks what the interpreter is
@pytest.mark.parametrize(
    "run, step, message",
    [
        ("nothing", "1", "has no config.yaml: give the folder of a run"),
        ("run", "7", "(no step is there): run the step with trainer.dump_data_batch=true"),
    ],
)
def test_what_it_cannot_explain_is_one_error(tmp_path, capsys, run, step, message):
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.resolve import save_config
    from skyrl_megatron_tools.logprob_mismatch.explain_mismatch import main
    from tests.job import runs

    runs.prepare(tmp_path)
    cfg, _ = load_config(SkyRLTrainConfig, runs.arguments(tmp_path, environment__env_class="gsm8k"), scripted=True)
    folder = save_config(cfg).parent if run == "run" else tmp_path / run
    assert main([str(folder), "--step", step]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 2 and "Traceback" not in told
