"""The simulator against arithmetic, against laws that any run obeys, and against a run that was made."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_megatron.errors import ConfigError
from skyrl_megatron_tools.simulate.simulation import MODES, DecodeCurve, Distribution, RunPlan, simulate

RUN = Path(__file__).resolve().parents[1] / "data/simulated_run"


def plan(**changes):
    """One engine with a slot for each sequence of a batch: 100 tokens of 10 ms, 1 s of training, 0.25 s of sync."""
    made = {
        "engines": 1,
        "slots": 8,
        "decode": DecodeCurve(((1, 0.01),)),
        "groups": 2,
        "samples": 4,
        "tokens": Distribution(100),
        "train": 1.0,
        "sync": 0.25,
    }
    return RunPlan(**made | changes)


def step(**changes):
    return simulate(plan(**changes)).step_seconds


def test_a_synchronous_step_is_the_sum_of_its_phases():
    assert step(mode="sync") == pytest.approx(1 + 1 + 0.25)
    assert step(mode="sync", env=Distribution(0.5), turns=5) == pytest.approx(1 + 0.5 + 1 + 0.25)
    assert step(mode="sync", slots=4) == pytest.approx(2 * 1 + 1 + 0.25)  # two waves
    assert step(mode="sync", engines=2, slots=4) == pytest.approx(1 + 1 + 0.25)
    assert step(mode="sync", decode=DecodeCurve(((1, 0.01), (8, 0.02)))) == pytest.approx(2 + 1 + 0.25)
    assert step(mode="sync", decode=DecodeCurve(((1, 0.01), (4, 0.016)))) == pytest.approx(
        2.4 + 1.25
    )  # 0.016 + 4·0.002


def test_pace_follows_the_number_of_sequences():
    """Four of 100 tokens and four of 200: together at 80 ms, then alone at 40 ms a token."""
    pace = DecodeCurve(((4, 0.04), (8, 0.08)))
    seconds = simulate(plan(mode="sync", decode=pace, tokens=Distribution(0, values=(100.0, 200.0)), steps=400))
    assert set(np.round(seconds.steps, 6)) <= {
        round(1.25 + 100 * pace.table(8)[8] + 100 * pace.table(8)[long], 6) for long in range(9)
    } | {round(1.25 + 100 * pace.table(8)[8], 6)}


def test_overlap_hides_the_shorter_half():
    assert step(mode="one-step-off") == pytest.approx(max(1, 1) + 0.25)
    assert step(mode="one-step-off", train=3.0) == pytest.approx(3 + 0.25)
    assert step(mode="one-step-off", tokens=Distribution(500)) == pytest.approx(5 + 0.25)
    assert step(mode="async", staleness=1) == pytest.approx(1.25)
    three = {"staleness": 2, "slots": 24, "train": 0.1, "tokens": Distribution(500), "warmup": 6, "steps": 66}
    assert step(mode="async", **three) == pytest.approx((5 + 0.1 + 3 * 0.25) / 3)  # three batches at the same time


def test_shares():
    found = simulate(plan(mode="sync", engine_gpus=3, trainer_gpus=1))
    assert found.trainer_busy == pytest.approx(1 / 2.25) and found.engines_busy == pytest.approx(1 / 2.25)
    assert found.gpus_busy == pytest.approx(1 / 2.25) and found.sync_share == pytest.approx(0.25 / 2.25)
    assert found.slots_used == pytest.approx(1 / 2.25)
    assert found.tokens_per_second == pytest.approx(800 / 2.25)
    assert found.tokens_per_second_per_gpu == pytest.approx(200 / 2.25)


def test_a_straggler_delays_its_group_alone():
    slow = Distribution(1.0, straggler_share=0.05, straggler_factor=8)
    changes = {"env": slow, "tokens": Distribution(1), "groups": 4, "samples": 1, "steps": 300, "slots": 64}
    sync, ahead = (simulate(plan(mode=mode, staleness=8, **changes)) for mode in ("sync", "async"))
    assert ahead.step_seconds < 0.6 * sync.step_seconds and ahead.staleness_max <= 8


DISTRIBUTIONS = st.builds(
    Distribution,
    st.floats(0, 50),
    st.floats(0, 60),
    straggler_share=st.sampled_from([0.0, 0.1]),
    straggler_factor=st.just(8.0),
)
PLANS = st.builds(
    plan,
    engines=st.integers(1, 4),
    slots=st.integers(1, 6),
    groups=st.integers(1, 5),
    samples=st.integers(1, 4),
    turns=st.integers(1, 3),
    tokens=DISTRIBUTIONS,
    env=DISTRIBUTIONS,
    train=st.floats(0, 20),
    sync=st.floats(0.01, 2),
    decode=st.sampled_from([DecodeCurve(((1, 0.01),)), DecodeCurve(((1, 0.01), (6, 0.1))), DecodeCurve(((1, 0.0),))]),
    mode=st.sampled_from(MODES),
    staleness=st.integers(0, 4),
    workers=st.integers(0, 12),
    steps=st.integers(2, 8),
    warmup=st.integers(0, 1),
    seed=st.integers(0, 99),
)


@settings(max_examples=200, deadline=None)
@given(PLANS)
def test_laws_of_any_run(one):
    found = simulate(one)
    assert found.staleness_max <= one.bound and sum(found.staleness.values()) == one.groups * (one.steps - one.warmup)
    assert found.started == found.trained + found.waiting + found.running
    assert found.trained == one.steps * one.groups
    assert found.started <= (one.steps + one.bound) * one.groups
    assert len(found.steps) == one.steps and min(found.steps) >= one.train + one.sync - 1e-9
    assert found.sync_share * found.step_seconds == pytest.approx(one.sync)
    for share in (found.trainer_busy, found.engines_busy, found.slots_used, found.gpus_busy):
        assert -1e-9 <= share <= 1 + 1e-9
    assert found.engines_busy <= 1 - found.sync_share + 1e-9  # engines stand still while weights travel
    assert simulate(one) == found


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_bound_zero_is_the_synchronous_run(one):
    sync, ahead = (
        replace(simulate(replace(one, mode=mode, staleness=0, workers=0)), mode="") for mode in ("sync", "async")
    )
    assert sync == ahead


def test_all_tokens_are_counted():
    """Every token of the trained groups, and none twice."""
    one = plan(mode="sync", tokens=Distribution(30, 20), warmup=0, engines=3, slots=2, seed=5)
    found = simulate(one)
    rng = np.random.default_rng(5)
    expected = 0.0
    for _ in range(one.steps * one.groups):
        expected += one.tokens.draw(rng, one.samples).sum()
        one.env.draw(rng, one.samples)
    assert found.tokens_per_second * sum(found.steps) == pytest.approx(expected)


def test_distributions():
    rng = np.random.default_rng(0)
    drawn = Distribution(100, 50).draw(rng, 200_000)
    assert drawn.mean() == pytest.approx(100, rel=0.01) and drawn.std() == pytest.approx(50, rel=0.02)
    assert set(Distribution(2, values=(1.0, 3.0)).draw(rng, 100)) == {1.0, 3.0}
    assert Distribution(100, 50, most=120).draw(rng, 1000).max() == 120
    slow = Distribution(1, straggler_share=0.25, straggler_factor=8).draw(rng, 20_000)
    assert set(slow) == {1.0, 8.0} and (slow == 8).mean() == pytest.approx(0.25, abs=0.02)
    assert Distribution(0, 5).draw(rng, 3).tolist() == [0, 0, 0]


def test_the_plan_of_a_run(capsys):
    """A synchronous run is found again; what it would take with sampling ahead follows from its phases."""
    from skyrl_megatron_tools.simulate.__main__ import main

    assert main(["--run", str(RUN), "--json", "--steps", "8", "--warmup", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    measured = answer["measured"]
    sync, off, ahead = answer["predicted"]
    assert sync["step_seconds"] == pytest.approx(measured["timing/step"], rel=0.05)
    busy = measured["timing/step"] - measured["timing/generate"]
    assert off["step_seconds"] == pytest.approx(busy, rel=0.02) and ahead["step_seconds"] == pytest.approx(
        busy, rel=0.02
    )
    assert ahead["staleness_max"] == 1


def test_quantile_to_deviation():
    from skyrl_megatron_tools.simulate.__main__ import _from_p90

    sigma = 0.5
    p90 = 10 * math.exp(1.2815515655446004 * sigma - sigma**2 / 2)
    assert _from_p90(10, p90).std == pytest.approx(10 * math.sqrt(math.exp(sigma**2) - 1))
    assert _from_p90(10, 9).std == 0


GIVEN = "--engines 62 --slots 256 --decode 1:0.01,256:0.03 --groups 128 --samples 16 --tokens 4000:3000 --train 60"
GIVEN += " --sync 5 --engine-gpus 8 --trainer-gpus 504 --max-tokens 16000 --steps 6"


def test_a_table_for_people(capsys):
    from skyrl_megatron_tools.simulate.__main__ import main

    assert main(GIVEN.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1000 GPUs: 62 engines x 8, trainer 504")
    assert [line.split()[0] for line in lines[3:]] == list(MODES)
    assert main([*GIVEN.split(), "--mode", "async", "--env-stragglers", "0.1:8", "--env", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("", "--engines=None: is required without --run"),
        ("--run /nowhere", "--run=/nowhere: has no config.yaml"),
        (GIVEN + " --slots 0", "slots=0: must be at least 1"),
        (GIVEN + " --train -1", "train=-1.0: must be 0 or more"),
        (GIVEN + " --train nan", "train=nan: must be 0 or more"),
        (GIVEN + " --warmup 9", "warmup=9: must be below steps=6"),
        (GIVEN + " --decode 1", "argument --decode: invalid _curve value: '1'"),
        (GIVEN + " --tokens a", "argument --tokens: invalid"),
        (GIVEN + " --tokens-file /nowhere", "argument --tokens-file: invalid"),
        (GIVEN + " --mode fast", "argument --mode: invalid choice: 'fast'"),
        (GIVEN + " --eng 3", "unrecognized arguments: --eng 3"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    from skyrl_megatron_tools.simulate.__main__ import main

    try:
        code = main(arguments.split())
    except SystemExit as ended:
        code = ended.code
    written = capsys.readouterr()
    assert code == 2 and not written.out
    assert written.err.count("\n") == 1 and said in written.err


def test_plans_from_python_name_the_mistake():
    with pytest.raises(ConfigError, match="groups=0"):
        plan(groups=0)
    with pytest.raises(ConfigError, match="straggler_share=2"):
        plan(tokens=Distribution(1, straggler_share=2))
