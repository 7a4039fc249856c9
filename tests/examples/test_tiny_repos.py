"""The agent on tiny repositories: the lines that it puts in solve them, and a run trains on its calls."""

import asyncio
import json
import random
import runpy
import subprocess
import sys

import pytest

from tests.examples.commands import EXAMPLES, environment

FOLDER = EXAMPLES / "tiny_repos"


@pytest.fixture(scope="module")
def scripts():
    return {name: runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name) for name in ("agent", "make", "train")}


def test_the_right_line_repairs_each_repository(scripts):
    """And only what the task names is changed."""
    agent, make = scripts["agent"], scripts["make"]
    for each in make["repositories"](0, 100):
        name, module = agent["TASK"].search(each.text).groups()
        source, solution = each.files[f"{module}.py"], each.solution[f"{module}.py"]
        line = solution.partition(f"def {name}(")[2].splitlines()[1].strip()
        made = agent["repaired"](source, name, line)
        names = {}
        exec(made, names)
        printed = [json.dumps(names[name](*case)) for case in each.cases]
        assert "".join(f"{line}\n" for line in printed) == each.expected
        assert made == solution or name.startswith("turned"), "a missing function is added at the end"
        seen = agent["shown"](source, name)
        assert (seen in source and line not in seen and name in seen) if seen else name.startswith("turned")


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_agent_solves_with_the_right_answer_and_only_with_it(scripts, tmp_path, monkeypatch):
    """As a run starts it: in a sandbox, from which it reaches a server by the relay. The server is a fake: a
    tiny model does not know the right answer."""
    from skyrl_megatron.errors import SandboxError
    from skyrl_megatron_agents.attempt import AgentCommand, attempt
    from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, make_provider
    from skyrl_megatron_agents.task import read_task

    monkeypatch.setenv("SKYRL_MEGATRON_HOME", str(tmp_path / "home"))
    try:
        provider = make_provider("namespaces")
    except SandboxError as error:
        pytest.skip(str(error))
    (made,) = scripts["make"]["repositories"](0, 1)
    scripts["make"]["write"](made, tmp_path / "task")
    right = made.solution[f"{made.module}.py"].partition(f"def {made.function}(")[2].splitlines()[1].strip()
    variables = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "key", "AGENT_MODEL": "policy"}
    agent = AgentCommand(["python3", "/opt/agent/agent.py", "{text}"], variables, {"/opt/agent": FOLDER})

    async def with_answer(line):
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": line}}
            given = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [message]}
            head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
            writer.write((head + json.dumps(given)).encode())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            queue = SandboxQueue(provider, at_once=1)
            address = server.sockets[0].getsockname()
            return await attempt(read_task(tmp_path / "task"), agent, queue, server=address)
        finally:
            server.close()

    async def main():
        try:
            return [await with_answer(line) for line in (right, "return 0")]
        finally:
            await provider.close()

    solved, failed = asyncio.run(main())
    assert (solved.outcome, failed.outcome) == ("solved", "failed"), (solved, failed)


def test_the_model_is_taught_the_form_of_answers_and_few_right_ones(scripts):
    make, train = scripts["make"], scripts["train"]
    held_out = {each.name for each in make["repositories"](0, 40)}
    taught = make["repositories"](0, 100)[40:]
    assert not held_out & {each.name for each in taught}
    made = train["talks"](taught, make, random.Random(0))
    answers = {message["content"] for talk in (next(made) for _ in range(2000)) for message in talk[1:]}
    rights = {each.solution[f"{each.module}.py"].partition(f"def {each.function}(")[2].splitlines()[1].strip() for each in taught}  # fmt: skip  # noqa: E501
    assert rights <= answers and len(answers - rights) > 5


@pytest.mark.full_matrix
@pytest.mark.unseen
@pytest.mark.timeout(960)
@pytest.mark.vllm
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_agent_is_trained(tmp_path):
    (tmp_path / "launch").symlink_to(EXAMPLES.parent)
    words = ["trainer.max_training_steps=1", "trainer.eval_interval=1", "generator.eval_n_samples_per_prompt=1"]
    done = subprocess.run(
        [sys.executable, "launch/examples/tiny_repos/train.py", *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = tmp_path.rglob("metrics.jsonl")
    before, step = [json.loads(line) for line in file.read_text().splitlines()]
    assert 0 < before["eval/all/avg_score"] < 0.8 and step["policy/grad_norm"] > 0
    assert step["agents/token_in_rate"] == 1.0
    assert step["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
