"""Every example runs on the tiny model by its command: what it teaches is in its numbers."""

import json
import subprocess
import sys

import pytest

from tests.examples.commands import EXAMPLES, commands, environment

pytestmark = [pytest.mark.full_matrix, pytest.mark.vllm]


def finite(lines, name):
    values = [line[name] for line in lines if name in line]
    assert values, f"no {name}"
    return values


def learns_alone(lines):
    """The critic learns before the policy does."""
    assert finite(lines, "critic/critic_loss")
    assert [line["step"] for line in lines if "policy/grad_norm" in line] == list(range(3, 9))


def teaches(lines):
    kl = finite(lines, "distillation/reverse_kl")
    assert kl[-1] < kl[0]


SHOWS = {
    "custom_advantage_estimator": lambda lines: None,
    "custom_policy_loss": lambda lines: None,
    "dapo": lambda lines: finite(lines, "reward/overlong_penalty"),
    "own_environment": lambda lines: finite(lines, "environment/exact"),
    "own_generator": lambda lines: finite(lines, "generate/hinted"),
    "multi_turn_tool": lambda lines: max(finite(lines, "environment/tool_calls")) > 0,
    "text_to_sql": lambda lines: max(finite(lines, "generate/avg_turns")) > 1,
    "llm_judge": lambda lines: min(finite(lines, "environment/judge_agrees")) > 0.5,
    "ppo_with_critic": learns_alone,
    "lora": lambda lines: None,
    "distillation": teaches,
    "gsm8k": lambda lines: None,
}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The folder that the commands are typed in."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "launch").symlink_to(EXAMPLES.parent)
    subprocess.run(
        [sys.executable, "launch/examples/tiny.py"], cwd=folder, env=environment(folder), check=True, timeout=900
    )
    return folder


@pytest.mark.parametrize("name", commands())
def test_an_example_runs(name, taught):
    done = subprocess.run(
        [*commands()[name], f"trainer.run_name={name}"],
        cwd=taught,
        env=environment(taught),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    file = taught / "tiny" / "runs" / "logs" / "examples" / name / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(9))
    assert max(finite(lines, "reward/avg_raw_reward")) > 0
    SHOWS[name](lines)
