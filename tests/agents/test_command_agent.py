"""What of a row an agent's program gets: the prompt and its own column, and nothing of the judge."""

import asyncio
import json
import sys

import pytest

from skyrl_megatron.errors import DataError, SandboxError

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]
SECRET = "answer-4711"
ROW = {
    "reward_spec": {"method": "rule", "ground_truth": SECRET},
    "extra_info": {"answer": SECRET, "index": 3},
    "task": f"/data/{SECRET}/task",
    "solution": SECRET,
    "agent": {"hint": "look at sums.py"},
}
LOOK = "cat; env; cat /proc/self/environ /proc/$PPID/cmdline; grep -rs answer- . $HOME /tests | head -3; "
LOOK += 'echo "text={text}"'


def task_of(row, scored):
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.command_agent import AgentTask
    from skyrl_megatron_agents.gateway import Access

    async def score(text):
        scored.append(text)
        return 0.0

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    return AgentTask(prompt, row, "aime", TrajectoryID("a", 0), Access("http://127.0.0.1:1/a", "k", "p"), 20.0, score)


def printed_here(row, command=LOOK, **options):
    """What a command of this machine prints."""
    from skyrl_megatron_agents.command_agent import CommandAgent

    scored = []
    asyncio.run(CommandAgent(["sh", "-c", command], **options)(task_of(row, scored)))
    return scored[0]


def printed_in_a_sandbox(row, home, *, stdin):
    """What a command in a sandbox prints, started as a run starts it."""
    from skyrl_megatron.config.schema.generator import AgentConfig, GeneratorConfig, SkyRLGymConfig
    from skyrl_megatron_agents.attempt import run_alone
    from skyrl_megatron_agents.sandbox_agent import SandboxAgentGenerator
    from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, make_provider
    from tests.rollout.scripted import tokenizer_of

    cfg = GeneratorConfig(agent=AgentConfig(command=["sh", "-c", LOOK], stdin=stdin))
    generator = SandboxAgentGenerator(cfg, SkyRLGymConfig(), None, tokenizer_of("chatml"))
    task = task_of(row, [])

    async def main(provider):
        queue = SandboxQueue(provider, at_once=1)
        return await run_alone(generator._task_of(task), generator.command_of(task), queue)

    provider = make_provider("namespaces", home=home)
    try:
        return asyncio.run(main(provider)).stdout.decode()
    finally:
        asyncio.run(provider.close())


@pytest.mark.parametrize("stdin", [False, True])
def test_nothing_of_the_judge_reaches_a_program(stdin, tmp_path):
    try:
        texts = [printed_here(ROW, stdin=stdin), printed_in_a_sandbox(ROW, tmp_path, stdin=stdin)]
    except SandboxError as error:
        pytest.skip(str(error))
    for text in texts:
        assert SECRET not in text and "text=What is 3 + 4?" in text
        assert ("look at sums.py" in text) is stdin


def test_what_a_row_declares_for_its_agent():
    shown = json.loads(printed_here(ROW, "cat", stdin=True))
    assert shown == {"prompt": task_of(ROW, []).prompt, "extras": {"hint": "look at sums.py"}}
    assert task_of({"agent": '{"a": 1}'}, []).shown["extras"] == {"a": 1}
    assert task_of({"reward_spec": {}}, []).shown["extras"] == task_of({"agent": ""}, []).shown["extras"] == {}
    for value in ("{", "[1]", 3, ["a"]):
        with pytest.raises(DataError, match="column agent="):
            _ = task_of({"agent": value}, []).shown


def test_a_program_that_its_own_commands_ended_is_a_failure_of_the_policy():
    """It is reward 0 and no way out of one."""
    from skyrl_megatron_agents.command_agent import CommandAgent

    outcome = asyncio.run(CommandAgent(["sh", "-c", "kill -9 $$"])(task_of(ROW, [])))
    assert (outcome.kind, outcome.reward) == ("failed", 0.0) and "code -9" in outcome.why


def test_an_error_on_standard_output_is_shown():
    from skyrl_megatron_agents.command_agent import CommandAgent

    command = ["sh", "-c", "echo started; echo 'API Error: 400'; exit 3"]
    outcome = asyncio.run(CommandAgent(command)(task_of(ROW, [])))
    assert outcome.why == "the command ended with code 3: stdout: API Error: 400"
