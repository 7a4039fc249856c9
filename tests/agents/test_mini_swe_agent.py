"""mini-swe-agent, as its package is published, works on a task folder of Harbor and is trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.agents.test_agent_generator import Running
from tests.agents.test_harbor_tasks import write
from tests.agents.wires import write_folder

VENV = Path(__file__).parents[2] / ".venv-environments" / "mini-swe-agent"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.skipif(not (VENV / "bin/mini").is_file(), reason="needs launch/requirements/environments.sh"),
]
COMMAND = [
    *("env", "MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP=True"),
    *("/opt/mini/bin/python", "-m", "minisweagent", "-m", "openai/policy", "--agent-class", "default"),
    *("-c", "mini.yaml", "-c", "agent.step_limit=6", "-t", "{text}"),
]


def calls(*commands):
    """Answers that call its tool; the first with text before it."""
    each = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
    return ["I look first.\n" * (not at) + f"<tool_call>\n{call}\n</tool_call>" for at, call in enumerate(each)]


@pytest.fixture
def running(tmp_path, monkeypatch):
    from skyrl_megatron.config.schema.generator import AgentConfig
    from skyrl_megatron.errors import SandboxError
    from skyrl_megatron_agents.sandbox_agent import SandboxAgentGenerator
    from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(tmp_path / "home"))
    try:
        make_provider("namespaces")
    except SandboxError as error:
        pytest.skip(str(error))
    agent = AgentConfig(command=COMMAND, mounts={"/opt/mini": str(VENV)}, at_once=1)
    made = Running(SandboxAgentGenerator, write_folder(tmp_path / "model"), agent=agent, max_input_length=7000)
    yield made
    made.close()


def test_it_solves_a_task_and_every_token_of_it_is_trained(running, tmp_path):
    """The policy's answers are scripted, as no tiny model calls tools; the agent, its client and the rest are real."""
    settings = "[agent]\ntimeout_sec = 100\n[verifier]\nenv = {WANTED = 'hello'}\n[environment]\nmemory_mb = 1024\n"
    task = write(tmp_path / "task", **{"task.toml": settings})
    running.client.say = calls(
        "ls -a; cat hello.sh",
        "printf '#!/bin/sh\\necho hello\\n' > hello.sh && ./hello.sh > /data/out.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    )
    output = running([{"task": str(task)}], "task")
    assert output["errors"] == [None] and [sum(each) for each in output["rewards"]] == [1.0]
    assert output["rollout_metrics"]["agents/token_in_rate"] == 1.0
    assert output["rollout_metrics"]["agents/calls"] == 3 and output["rollout_metrics"]["agents/unmatched"] == 0
    (row,), (mask,) = output["response_ids"], output["loss_masks"]
    sampled = [token for _, tokens, _ in running.client.sampled for token in tokens]
    assert np.asarray(row)[np.asarray(mask) > 0].tolist() == sampled, "one row, with what was sampled and no more"


def test_it_fails_with_a_policy_that_calls_no_tool(running, tmp_path):
    """As a policy without training does. That is a sample, not a failure of the agent."""
    task = write(tmp_path / "task", **{"task.toml": "[environment]\nmemory_mb = 1024\n"})
    running.client.say = ["No idea."] * 6
    output = running([{"task": str(task)}], "task")
    assert output["errors"] == [None] * 3, "it drops an answer that it cannot use, so each call is a path"
    assert sum(map(sum, output["rewards"])) == 0 and output["is_last_step"] == [False, False, True]
    assert output["rollout_metrics"]["agents/token_in_rate"] == 1.0
