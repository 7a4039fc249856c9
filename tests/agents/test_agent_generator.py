"""Trajectories of agents as rows: commands and functions, what ends them, and that they are those of our own loop."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import numpy as np
import pytest

from tests.agents.wires import Scripted, write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
CLIENT = """
import json, os, sys
import httpx
task = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = task["prompt"]
for turn in range(task["extras"]["turns"]):
    answer = httpx.post(f"{url}/chat/completions", headers={"authorization": f"Bearer {key}"}, timeout=60,
                        json={"model": os.environ["AGENT_MODEL"], "messages": messages})
    if answer.status_code != 200:
        sys.exit(f"status {answer.status_code}")
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Again."}]
print(messages[-2]["content"] if task["extras"]["turns"] else sorted(os.environ))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


class Running:
    """A generator with a scripted engine, on a loop of its own."""

    def __init__(self, kind, folder, **config):
        from transformers import AutoTokenizer

        from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
        from tests.support.engines import LoopThread

        self.loop = LoopThread()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.client = Scripted(tokenizer)
        cfg = GeneratorConfig(**{"max_turns": 9, "max_input_length": 2000, "step_wise_trajectories": True} | config)
        self.generator = kind(cfg, SkyRLGymConfig(), self.client, tokenizer)

    def __call__(self, extras, env_class="aime", prompt="What is 3 + 4?", ids=None, **more):
        batch = {
            "prompts": [[{"role": "user", "content": prompt}] for _ in extras],
            "env_classes": [env_class] * len(extras),
            "env_extras": [{"reward_spec": {"ground_truth": "7"}, **each} for each in extras],
            "sampling_params": None,
            "trajectory_ids": ids,
            "batch_metadata": None,
            **more,
        }
        return self.loop(self.generator.generate(batch), 120)

    def close(self):
        self.loop(self.generator.stop())
        self.loop.close()


@pytest.fixture
def running(folder):
    made = []

    def start(kind, **config):
        made.append(Running(kind, folder, **config))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_command_is_trained_on_what_it_called(running, monkeypatch):
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron_agents.agent_generator import AgentGenerator, CommandAgent
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind
    from skyrl_megatron_agents.sandboxes.sandbox import CommandResult

    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    seen = []

    async def reward(task, ended: CommandResult):
        seen.append(ended)
        if ended.exit_code:
            return Outcome(OutcomeKind.INFRASTRUCTURE, why=ended.stderr.decode().strip())
        return float(len(ended.stdout))

    class Commands(AgentGenerator):
        agent = CommandAgent([sys.executable, "-c", CLIENT], reward=reward, stdin=True)

    each = running(Commands)
    with pytest.warns(SkyRLMegatronWarning, match="1 of 3 trajectories"):
        output = each([{"agent": {"turns": turns}} for turns in (0, 3, 2)])
    printed = b"".join(ended.stdout for ended in seen)
    assert b"SECRET_TOKEN" not in printed and b"AGENT_MODEL" in printed
    assert [error is None for error in output["errors"]] == [False, True, True]
    assert "no call to the model" in output["errors"][0]
    trained = sorted(tuple(np.asarray(r)[np.asarray(m) > 0].tolist()) for r, m in zip(
        output["response_ids"], output["loss_masks"], strict=True
    ))  # fmt: skip
    calls = [ids for _, ids, _ in each.client.sampled]
    assert sum(map(len, trained)) == sum(map(len, calls)) and len(calls) == 5
    assert output["is_last_step"] == [True] * 3 and output["rollout_metrics"]["agents/token_in_rate"] == 1.0


def test_what_ends_an_agent(running):
    from skyrl_megatron.errors import DataError, SkyRLMegatronWarning
    from skyrl_megatron_agents.agent_generator import AgentGenerator, CommandAgent

    async def agent(task):
        import openai

        client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key, max_retries=0)
        what = task.extras["what"]
        content = "What is 3? " * (3000 if what == "long" else 1)
        if what == "broken":
            each.client.lost.add(task.access.url.rpartition("/")[2])
        try:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
        except openai.APIStatusError:
            assert what in ("long", "broken")
        if what == "raise":
            raise KeyError("mine")
        if what == "slow":
            await asyncio.sleep(600)
        if what == "env":
            return await task.score("Answer: 7")
        return float("nan") if what == "nan" else 1.0

    class Functions(AgentGenerator):
        timeout_s = 1.0

    Functions.agent = staticmethod(agent)
    Functions.timeout_s = -18.0  # with the grace of an agent that ends itself: 2 s
    each = running(Functions)
    kinds = ["good", "long", "broken", "raise", "slow", "nan", "env"]
    with pytest.warns(SkyRLMegatronWarning, match="5 of 7 trajectories"):
        output = each([{"what": what} for what in kinds])
    whys = [None, "context full: ", "infrastructure: EngineError", "infrastructure: the agent raised KeyError",
            "timed out: ", "infrastructure: the agent raised NonFiniteReward", None]  # fmt: skip
    for error, why in zip(output["errors"], whys, strict=True):
        assert error is None if why is None else error.startswith(why), error
    assert [sum(reward) for reward in output["rewards"]] == [1.0, 0, 0, 0, 0, 0, 1.0]
    masked = [not np.any(mask) for mask in output["loss_masks"]]
    assert masked == [why is not None for why in whys]

    class Endless(AgentGenerator):
        agent = CommandAgent(["sh", "-c", "sleep 600 & echo $! > /tmp/agents-test-$PPID; sleep 600"])
        timeout_s = 0.5

    with pytest.raises(DataError, match=r"timed out: the command ran for 0\.5 s"):
        running(Endless)([{}])
    file = f"/tmp/agents-test-{os.getpid()}"
    left = int(open(file).read())
    os.unlink(file)
    assert not os.path.exists(f"/proc/{left}") or open(f"/proc/{left}/stat").read().split()[2] == "Z"


def test_what_changes_the_distribution_is_refused_where_it_is_trained_on(running):
    """A grammar is accounted for by the tokens that it leaves, which engines return if they do so for the run."""
    import openai

    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron.rollout.interface import BatchMetadata
    from skyrl_megatron_agents.agent_generator import AgentGenerator

    biases, grammar = {"logit_bias": {"5": 10.0}}, {"response_format": {"type": "json_object"}}
    answers, named = [], []

    class Asks(AgentGenerator):
        async def agent(self, task):
            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key, max_retries=0)
            for more in ({}, biases, grammar, {"frequency_penalty": 0.0}):
                message = {"role": "user", "content": str(more)}
                try:
                    await client.chat.completions.create(model="policy", messages=[message], **more)
                    answers.append("")
                except openai.BadRequestError as error:
                    answers.append(error.message)
            return 1.0

    def asked(phase, **config):
        answers.clear()
        each = running(Asks, **config)
        each([{}], batch_metadata=BatchMetadata(global_step=1, training_phase=phase))
        named.append(each.generator._running.gateway._changes_named)
        return list(answers)

    _, biased, grammatical, neutral = asked("train")
    assert "logit_bias changes the distribution" in biased and "generator.unaccounted_sampling=warn" in biased
    assert "structured_outputs changes" in grammatical and "set generator.sampling_params.top_k" in grammatical
    assert not neutral
    whys = asked("train", sampling_params=SamplingParams(top_k=20))
    assert "logit_bias" in whys[1] and not whys[2]
    assert asked("eval") == [""] * 4
    assert asked("train", unaccounted_sampling="warn") == [""] * 4
    assert named == [False, True, False, True]  # in the log: the engine of this test returns no support


def test_the_grammar_of_optional_tool_calls_is_left_out_where_it_is_not_accounted_for(running):
    """vLLM adds one for a strict tool and for at most one call, also where the policy may choose."""
    import openai

    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron_agents.agent_generator import AgentGenerator

    parameters = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    asked = {
        "strict": {"tools": [strict]},
        "one call": {"tools": [tool], "parallel_tool_calls": False},
        "required": {"tools": [tool], "tool_choice": "required"},
    }
    refused = []

    class Asks(AgentGenerator):
        async def agent(self, task):
            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key, max_retries=0)
            try:
                messages = [{"role": "user", "content": "Look."}]
                await client.chat.completions.create(model="policy", messages=messages, **asked[task.extras["what"]])
            except openai.BadRequestError as error:
                refused.append((task.extras["what"], error.message))
            return 1.0

    each = running(Asks)
    output = each([{"what": what} for what in ("strict", "one call")])
    assert output["errors"] == [None, None] and not refused
    assert all("structured_outputs" not in keys for *_, keys in each.client.sampled)
    with pytest.raises(Exception, match="structured_outputs changes the distribution"):
        each([{"what": "required"}])
    assert [what for what, _ in refused] == ["required"]
    whole = running(Asks, sampling_params=SamplingParams(top_k=20))
    whole([{"what": what} for what in ("strict", "one call")])
    assert all("structural_tag" in keys["structured_outputs"] for *_, keys in whole.client.sampled)


def test_forks_need_several_rows(running):
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_agents.agent_generator import AgentGenerator

    class Forks(AgentGenerator):
        async def agent(self, task):
            import openai

            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key)
            for text in ("a", "b"):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
            return 1.0

    class Last(Forks):
        rule = "final"

    output = running(Forks)([{}])
    assert output["is_last_step"] == [False, True] and [sum(r) for r in output["rewards"]] == [0.0, 1.0]
    assert len(running(Last, step_wise_trajectories=False)([{}])["response_ids"]) == 1
    with pytest.raises(DataError, match="step_wise_trajectories=true"):
        running(Forks, step_wise_trajectories=False)([{}])


def test_a_batch_that_failed_is_tried_again(running, tmp_path):
    """In the same process, and then in another one that reads the log."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.agent_generator import AgentGenerator

    class Forks(AgentGenerator):
        log_folder = tmp_path

        @staticmethod
        async def agent(task):
            import openai

            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key)
            for text in task.extras["texts"]:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
            if task.extras["waits"]:
                await asyncio.sleep(60)
            return 1.0

    ids = [TrajectoryID("forks", 0), TrajectoryID("waits", 0)]
    texts = [{"texts": ["a", "b"], "waits": False}, {"texts": ["c"], "waits": True}]
    each = running(Forks, step_wise_trajectories=False)
    with pytest.raises(DataError, match="step_wise_trajectories=true"):
        each(texts, ids=ids)
    assert all(trajectory.closed for trajectory in each.generator._running.gateway.trajectories.values())
    sampled = len(each.client.sampled)
    again = [{"texts": ["b"], "waits": False}, {"texts": ["c", "c"], "waits": False}]
    each.generator.generator_cfg.step_wise_trajectories = True
    assert len(each(again, ids=ids)["response_ids"]) == 4
    assert len(each.client.sampled) == sampled + 1
    each.loop(each.generator.stop(), 60)
    another = running(Forks)
    assert len(another(again, ids=ids)["response_ids"]) == 4 and not another.client.sampled


def test_an_agent_that_rewrites_answers_ends_the_run(running, tmp_path):
    """One trajectory in two rewrites each answer: half of the later calls continue no sampled tokens."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.interface import BatchMetadata
    from skyrl_megatron_agents.agent_generator import AgentGenerator
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

    class Rewriting(AgentGenerator):
        @staticmethod
        async def agent(task):
            import openai

            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key, max_retries=0)
            messages = list(task.prompt)
            for _ in range(26):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
                content = answer.choices[0].message.content + ("!" if task.extras["rewrites"] else "")
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
            return 1.0

    each = running(Rewriting, min_token_in_rate=0.8)
    each.generator.records = TrajectoryRecords(tmp_path, each.generator.tokenizer, 8, 1)
    batch = {"batch_metadata": BatchMetadata(1, "train")}
    each([{"rewrites": False}], **batch)
    metrics = each([{"rewrites": False}], **batch)["rollout_metrics"]
    assert metrics["agents/token_in_rate"] == 1.0 and metrics["agents/unmatched"] == 0
    with pytest.raises(
        DataError, match=r"rate of 52 calls is 0\.519, below generator.min_token_in_rate=0\.8"
    ) as error:
        each([{"rewrites": False}, {"rewrites": True}], **batch)
    assert "the client sends" in str(error.value) and '!"}' in str(error.value)
    kept = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [(len(each["calls"]), sum(call["unmatched"] for call in each["calls"])) for each in kept] == [
        (26, 0), (26, 0), (26, 0), (26, 25)
    ]  # fmt: skip
    assert all(call["row"] is not None for call in kept[-1]["calls"]) and kept[-1]["outcome"] == "solved"
