"""A real run prints and records, in its second step, what the step takes on paper."""

import re

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def test_the_second_step_is_compared(tmp_path):
    done = runs.run(runs.prepare(tmp_path), trainer__max_training_steps=3).check()
    by_step = {line["trainer/global_step"]: line for line in done.lines if "trainer/global_step" in line}
    names = {name for name in by_step[2] if name.startswith("estimate/")}
    phases = ("generate", "fwd_logprobs_values_reward", "train_critic_and_policy", "sync_weights")
    assert names == {f"estimate/{each}_s" for each in (*phases, "step", "step_low", "step_high")}
    assert not any(name.startswith("estimate/") for step in (1, 3) for name in by_step[step])
    (said,) = re.findall(r"^measured \(on paper\): (.+)$", done.out, re.MULTILINE)
    shown = re.findall(r"(\S+) ([\d.]+) s \(([\d.]+), ([\d.]+) … ([\d.]+)\)", said)
    assert [name for name, *_ in shown] == ["generate", "log-probs", "train", "sync", "step"]
    for (_, took, paper, low, high), phase in zip(shown, (*phases, "step"), strict=True):
        assert float(took) == pytest.approx(by_step[2][f"timing/{phase}"], rel=0.01, abs=1e-3)
        assert float(low) <= float(paper) <= float(high)
