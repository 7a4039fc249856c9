"""Whole runs whose samples come from agents: stock clients call the policy through the gateway, and the trainer takes
steps on what was sampled for them."""

import json

import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP
from tests.job.test_fully_async import AHEAD, weights
from tests.job.test_roles import critic
from tests.job.test_routing_replay import REPLAY
from tests.job.test_several_adapters import named, prepared

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(2 * runs.TIMEOUT_S)]

TURNS = {
    "trainer__max_prompt_length": 32,
    "generator__max_turns": 2,
    "generator__max_input_length": 64,
    "environment__env_class": "conversation",
}
STOCK = """
import json
from skyrl_megatron_agents.agent_generator import AgentGenerator
from skyrl_megatron.envs import BaseTextEnv
from skyrl_megatron.plugins import register_generator

MORE = {"role": "user", "content": "more"}

class Conversation(BaseTextEnv):
    digits = 0
    def step(self, action):
        self.turns += 1
        self.digits += sum(character.isdigit() for character in action)
        done = self.turns == 2
        reward = self.digits / 12 if done else 0.0
        return {"observations": [] if done else [MORE], "reward": reward, "done": done, "metadata": {}}

register("conversation", Conversation)

@register_generator("stock")
class Stock(AgentGenerator):
    async def agent(self, task):
        import openai
        client = openai.AsyncOpenAI(base_url=task.access.url + "/v1", api_key=task.access.key)
        env, messages = Conversation(), list(task.prompt)
        while True:
            answer = await client.chat.completions.create(model=task.access.model, messages=messages)
            step = env.step(answer.choices[0].message.content or "")
            if step["done"]:
                return step["reward"]
            messages += [answer.choices[0].message.model_dump(exclude_none=True), *step["observations"]]

def postprocess_generator_output(self, output, uids):
    rows = zip(output["rollout_versions"], output["loss_masks"], output["response_ids"], output["rollout_logprobs"])
    with open("rows.jsonl", "a") as file:
        for spans, mask, ids, logprobs in rows:
            row = [spans, list(map(int, mask)), list(map(int, ids)), list(map(float, logprobs))]
            file.write(json.dumps([self.global_step, *row]) + chr(10))
    return RayPPOTrainer.postprocess_generator_output(self, output, uids)
Trainer.postprocess_generator_output = postprocess_generator_output
"""
"""A conversation of two turns, as an environment of our own loop and as an agent with OpenAI's client."""


RUNS_AHEAD = """
from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer as RayPPOTrainer
class Trainer(RayPPOTrainer):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(folder):
    """(step, spans of versions, mask, ids, log-probs) of every row that was trained on."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_step_through_the_gateway_is_that_of_our_own_loop(folder, monkeypatch):
    """The same tokens with the same log-probs give the same weights, bit for bit. An engine computes one sequence at
    a time here: its log-probs depend, by rounding, on what it batches."""
    keys = TURNS | {
        "trainer__deterministic": "true",
        "trainer__hf_save_interval": 2,
        "generator__inference_engine__max_num_seqs": 1,
    }
    made = {}
    for name in ("skyrl_gym", "stock"):
        own = folder / name
        own.mkdir()
        monkeypatch.chdir(own)
        runs.prepare(own)
        done = runs.run(own, STOCK, **keys, generator__name=name).check()
        assert [line[GAP] <= AGREE for line in done.lines] == [True, True]
        lasting = ("policy/final_loss", "policy/grad_norm", "reward/avg_raw_reward")
        lines = [[line[each] for each in lasting] for line in done.lines]
        made[name] = rows(own), lines, weights(own, 2)
    (own_rows, own_lines, own), (agent_rows, lines, agents) = made["skyrl_gym"], made["stock"]
    assert len(own_rows) == 32 and own_rows == agent_rows
    assert own_lines == lines and own_lines[0][1] > 0
    assert own == agents and own != start_weights(folder / "stock")


def start_weights(folder):
    from safetensors.numpy import load_file

    files = sorted((folder / "model").glob("*.safetensors"))
    return {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


def has_versions(row):
    """Whether each sampled token of a row has the version that sampled it."""
    _, spans, mask, _, _ = row
    covered = [place for _, first, end in spans for place in range(first, end)]
    return covered == [place for place, sampled in enumerate(mask) if sampled]


@pytest.mark.parametrize("kind", ["critic", "ahead", "routes", "adapters"])
def test_rows_of_agents_have_what_training_needs(folder, kind):
    """Values for GAE, versions per token for staleness, experts per token for replay, the adapter of each row."""
    prepared(folder) if kind == "adapters" else runs.prepare(folder)
    keys = {
        "critic": critic(folder, trainer__policy_mini_batch_size=2),
        "ahead": AHEAD | {"trainer__max_training_steps": 4},
        "routes": REPLAY | {"trainer__placement__ref_num_gpus_per_node": 1}
        | {"trainer__ref__megatron_config__expert_model_parallel_size": 1},
        "adapters": named(),
    }[kind]  # fmt: skip
    body = (RUNS_AHEAD if kind == "ahead" else "") + STOCK
    lines = runs.run(folder, body, **TURNS | keys, generator__name="stock").check().lines
    found = rows(folder)
    assert found and all(has_versions(row) for row in found)
    for line in lines:
        assert line["agents/token_in_rate"] == 1.0 and line["generate/avg_turns"] == 2.0
        assert kind == "ahead" or line[GAP] <= AGREE
    if kind == "critic":
        assert all(line["critic/critic_loss"] > 0 for line in lines)
    if kind == "ahead":
        assert max(line["async/staleness_max"] for line in lines) == 1.0
        oldest = [min(int(version) for version, _, _ in spans) for _, spans, *_ in found]
        assert {step - version for (step, *_), version in zip(found, oldest, strict=True)} <= {0, 1}
    if kind == "routes":
        assert all(0.5 < line["policy/moe_routing_replayed"] < 1.0 for line in lines)
