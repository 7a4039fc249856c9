"""Every example runs on the tiny model by its command: what it teaches is in its numbers."""

import json
import subprocess
import sys

import pytest

from tests.examples.commands import EXAMPLES, commands, environment
from tests.guides.documents import ROOT, blocks

pytestmark = [pytest.mark.full_matrix, pytest.mark.vllm]

STEPS = {"distillation": 16}  # the others take 4
SHOWS = {  # metric of training steps → what its values must be
    "custom_advantage_estimator": ("policy/grad_norm", lambda values: max(values) > 0),
    "custom_policy_loss": ("policy/loss_metrics/clip_ratio", lambda values: values == [0, 0, 0, 0]),
    "dapo": ("reward/overlong_penalty", lambda values: max(values) > 0),
    "own_environment": ("environment/exact", lambda values: max(values) > 0),
    "own_generator": ("generate/hinted", lambda values: values == [0.5] * 4),
    "multi_turn_tool": ("environment/tool_calls", lambda values: max(values) > 0),
    "text_to_sql": ("generate/avg_turns", lambda values: max(values) > 1.5),
    # a model of a million parameters is no judge: it says 0 of nearly all, and this number tells
    "llm_judge": ("environment/judge_agrees", lambda values: len(values) == 4 and 0 < max(values) < 1),
    "ppo_with_critic": ("policy/grad_norm", lambda values: len(values) == 2),  # the critic learns alone for two steps
    "lora": ("policy/grad_norm", lambda values: min(values) > 0),
    "distillation": ("distillation/reverse_kl", lambda values: sum(values[-4:]) < 0.9 * sum(values[:4])),
    "gsm8k": ("policy/grad_norm", lambda values: max(values) > 0),
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


def steps_of(words, name, folder):
    """The metrics of a command that is typed in a folder."""
    done = subprocess.run(
        [*words, f"trainer.run_name={name}"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    file = folder / "tiny" / "runs" / "logs" / "examples" / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", commands())
def test_an_example_runs(name, taught):
    lines = steps_of(commands()[name], name, taught)
    assert [line["step"] for line in lines] == [*range(STEPS.get(name, 4) + 1)]
    if name != "llm_judge":
        assert max(line["reward/avg_raw_reward"] for line in lines[1:]) > 0, "the tiny model is right now and then"
    metric, holds = SHOWS[name]
    values = [line[metric] for line in lines[1:] if metric in line]
    assert holds(values), f"{metric}: {values}"


def test_the_agent_of_the_guide_is_trained(taught):
    """The file and the command of agents.md."""
    guide = ROOT / "docs" / "guides" / "agents.md"
    (agent,) = [block for block in blocks(guide, "python") if block.file]
    (taught / agent.file).write_text(agent.text)
    _, words = blocks(guide, "bash")[0].commands()
    lines = steps_of(words, "agent", taught)
    assert [line["step"] for line in lines] == [*range(5)]
    assert all(line["agents/token_in_rate"] == 1 and line["reward/avg_raw_reward"] > 0 for line in lines[1:])
