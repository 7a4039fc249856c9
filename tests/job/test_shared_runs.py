"""A run with shared prefixes against one whose rows are computed separately: the same curve, to rounding.

Compared by hand, with ``trainer.deterministic``: ten steps of the embedded run from its weights after the tenth one,
256 prompts a step, 70 % of the tokens shared (prompts of 20 tokens, shared from two on): rewards equal in all steps,
gradient norms to 7e-6, losses to 3e-7. Ten steps of the agent of ``docs/guides/agents.md`` on the same recorded
samples, 73 % shared, rewards from 0.29 to 0.66: gradient norms to 3e-5, losses to 5e-6 (to 7e-7 in the first).
"""

import json

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

STEPS = 3
CURVE = ("policy/policy_loss", "policy/grad_norm", "reward/avg_raw_reward")
KEYS = {
    "trainer__max_prompt_length": 96,
    "trainer__max_training_steps": STEPS,
    "trainer__resume_mode": "none",
    "trainer__deterministic": "true",
    "trainer__policy__optimizer_config__lr": 1e-4,  # weights that differ by rounding sample the same tokens
}


@pytest.fixture
def folder(tmp_path):
    """Prompts that are several times as long as their answers, of which no two begin alike."""
    folder = runs.prepare(tmp_path)
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["prompt"][0]["content"] = f"{10 + number}+" * 20 + "1=?"
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_curve_is_that_of_separate_rows(folder):
    found = {}
    for value in ("never", "auto"):
        logs = folder / value
        done = runs.run(folder, trainer__share_prefixes=value, trainer__log_path=logs, **KEYS).check()
        lines = [json.loads(line) for line in (logs / "skyrl/run/metrics.jsonl").read_text().splitlines()]
        found[value] = [line for line in lines if "timing/step" in line]
        assert "computed again" not in done.out
    assert len(found["auto"]) == len(found["never"]) == STEPS
    shares = [line["policy/shared_prefix_share"] for line in found["auto"]]
    assert min(shares) > 0.5 and not any("policy/shared_prefix_share" in line for line in found["never"])
    first = [lines[0]["reward/avg_raw_reward"] for lines in found.values()]
    assert first[0] == first[1] > 0
    for shared, separate in zip(found["auto"], found["never"], strict=True):
        for name in CURVE:
            assert shared[name] == pytest.approx(separate[name], rel=1e-4, abs=1e-6), (name, shared["step"])
