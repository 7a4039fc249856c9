"""Generator ``agent``: a command in a sandbox works on a task folder, and its calls through the relay are the rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.agents.test_agent_generator import Running
from tests.agents.wires import write_folder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
]
AGENT = """
import json, os, sys, time, urllib.error, urllib.request
task = json.load(sys.stdin)
what = task["extras"]["what"]
if what == "crashes":
    sys.exit("no such option")
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"


def ask(content, count=1, **more):
    body = {"model": os.environ["AGENT_MODEL"], "messages": [{"role": "user", "content": content}] * count}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers | more)
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return str(error.code)


print(ask(sys.argv[1] * (2000 if what == "context full" else 1)))
wide = {
    "tokens": lambda: ask("a b " * 2000),
    "bytes": lambda: ask("a b ", **{"Content-length": "10000000000"}),
    "messages": lambda: ask("a b ", 30_000),
}
if what in wide:
    print(wide[what]())
if what in ("solved", "context full", "engine"):
    open("sums.py", "w").write("def add(a, b):\\n    return a + b\\n")
if what == "timed out":
    time.sleep(60)
"""
SETTINGS = """
[tests]
command = ["python3", "-I", "/tests/run.py"]
expected = true
[agent]
timeout_s = 6
[sandbox]
memory = 134217728
disk = 16777216
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task(tmp_path):
    for name, text in (
        ("task.md", "Write add in sums.py."),
        ("task.toml", SETTINGS),
        ("expected.txt", "5\n"),
        ("files/sums.py", "def add(a, b):\n    return a\n"),
        ("tests/run.py", "import sys; sys.path.insert(0, '.'); from sums import add; print(add(2, 3))"),
    ):
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "task"


@pytest.fixture
def running(folder, tmp_path, monkeypatch):
    from skyrl_megatron.config.schema.generator import AgentConfig
    from skyrl_megatron.errors import SandboxError
    from skyrl_megatron_agents.sandbox_agent import SandboxAgentGenerator
    from skyrl_megatron_agents.sandboxes.sandbox_queue import make_provider

    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    try:
        make_provider("namespaces")
    except SandboxError as error:
        pytest.skip(str(error))
    program = tmp_path / "program"
    program.mkdir()
    (program / "agent.py").write_text(AGENT)
    agent = AgentConfig(
        command=["python3", "/opt/agent/agent.py", "{text}"],
        mounts={"/opt/agent": str(program)},
        at_once=2,
        stdin=True,
    )
    made = Running(SandboxAgentGenerator, folder, agent=agent)
    yield made
    made.close()


def test_outcomes_of_tasks_are_the_rows_of_the_batch(running, task):
    """The calls are trained on; what a fault ended, or a first prompt too long, has no reward and no target."""
    from skyrl_megatron.errors import EngineError, SkyRLMegatronWarning
    from skyrl_megatron.rollout.interface import TrajectoryID

    plain = running.client.generate

    async def generate(prompts, sampling, sessions=None, adapters=None):
        if any("engine" in each for each in sessions):
            raise EngineError("none left")
        return await plain(prompts, sampling, sessions, adapters)

    running.client.generate = generate
    kinds = ["solved", "failed", "timed out", "context full", "engine", "crashes"]
    ids = [TrajectoryID(what, 0) for what in kinds]
    with pytest.warns(SkyRLMegatronWarning, match="3 of 6 trajectories"):
        output = running([{"agent": {"what": what}, "task": str(task)} for what in kinds], "task", ids=ids)
    whys = [
        None,
        None,
        None,
        "context full: ",
        "infrastructure: EngineError",
        "infrastructure: the agent made",
    ]
    assert output["errors"][-1].endswith("the command ended with code 1: no such option")
    for error, why in zip(output["errors"], whys, strict=True):
        assert error is None if why is None else error.startswith(why), output["errors"]
    assert [sum(reward) for reward in output["rewards"]] == [1.0, 0, 0, 0, 0, 0]
    assert [bool(np.any(mask)) for mask in output["loss_masks"]] == [True, True, True, False, False, False]
    calls = {tuple(ids) for _, ids, _ in running.client.sampled}
    for row in (0, 1, 2):
        mask = np.asarray(output["loss_masks"][row]) > 0
        assert tuple(np.asarray(output["response_ids"][row])[mask].tolist()) in calls
    assert output["rollout_metrics"]["agents/token_in_rate"] == 1.0
    causes = {name: output["rollout_metrics"][f"agents/cause_{name}"] for name in ("tests", "time", "call", "no_call")}
    assert causes == {"tests": 2, "time": 1, "call": 1, "no_call": 1}
    assert running.generator.queue.counts.most == 2, "as many sandboxes as generator.agent.at_once"


WIDE = ["tokens", "bytes", "messages"]


def test_a_request_that_is_too_long_does_not_spare_a_trajectory_its_reward(running, task):
    """The commands of a policy can send one. By ``context_full_reward=None`` such trajectories are no samples."""
    from skyrl_megatron.errors import SkyRLMegatronWarning

    rows = [{"agent": {"what": what}, "task": str(task)} for what in WIDE]
    output = running(rows, "task")
    assert output["errors"] == [None] * 3 and [sum(reward) for reward in output["rewards"]] == [0.0] * 3
    calls = {tuple(ids) for _, ids, _ in running.client.sampled}
    for mask, answer in zip(output["loss_masks"], output["response_ids"], strict=True):
        assert tuple(np.asarray(answer)[np.asarray(mask) > 0].tolist()) in calls
    assert output["rollout_metrics"]["agents/cause_context"] == 3
    running.generator.context_full_reward = None
    with pytest.warns(SkyRLMegatronWarning, match="1 of 2 trajectories"):
        output = running([*rows[:1], {"agent": {"what": "solved"}, "task": str(task)}], "task")
    assert output["errors"][0].startswith("context full: ") and not np.any(output["loss_masks"][0])


def test_another_environment_scores_what_the_command_prints(running):
    """It has neither files nor tests, and the sandbox is the same."""
    running.client.say = ["Answer: 7"]
    (reward,) = running([{"agent": {"what": "prints"}}])["rewards"]
    assert sum(reward) == 1.0


def test_a_row_without_a_folder_is_an_error_of_its_trajectory(running, task):
    from skyrl_megatron.errors import DataError

    (task / "task.toml").unlink()
    for extras, why in (({}, "has no column task"), ({"task": str(task)}, "task.toml of a task cannot be read")):
        with pytest.raises(DataError, match=why):
            running([{"agent": {"what": "solved"}, **extras}], "task")


def test_the_settings_are_checked(tmp_path):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.rules.rollout_rules import rollout_problems

    cfg = SkyRLTrainConfig()
    cfg.generator.name, cfg.generator.agent.sandbox, cfg.generator.batched = "agent", "nowhere", True
    cfg.generator.agent.mounts = {"opt": str(tmp_path), "/opt": "/nowhere/agent"}
    found = {each.key for each in rollout_problems(cfg, {}, Hardware(0))}
    assert {
        "generator.agent.command",
        "generator.agent.sandbox",
        "generator.agent.mounts",
        "generator.agent.mounts./opt",
        "generator.batched",
    } <= found


def test_a_provider_that_cannot_run_here_is_found_before_the_run(monkeypatch, tmp_path):
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_agents.checks import sandboxes

    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    cfg = SkyRLTrainConfig()
    cfg.generator.name, cfg.generator.agent.sandbox = "agent", "docker"
    (found,) = sandboxes(PlannedRun(cfg, Hardware(0, 1)))
    assert found.key == "generator.agent.sandbox" and "cannot run here" in str(found)
