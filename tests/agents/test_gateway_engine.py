"""The gateway with a real engine: its rows are the engine's own record, and those of our own loop, bit for bit."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tests.agents.clients import Chat, Messages, Responses
from tests.agents.wires import Setting, make_wire, set_template
from tests.support.chat_families import FAMILIES
from tests.support.engines import tiny_settings
from tests.support.tiny_models import CHAT_TEMPLATE, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.engines("gateway")]
FORCED = ("glm", "harmony", "qwen3", "deepseek", "kimi", "minimax", "hunyuan 3")
CALL = r'\n<tool_call>\n\{"name": "(add|look_up)", "arguments": \{"a": [0-9]\}\}\n</tool_call>'
CALLS = rf"(No\. |(No\. )?({CALL}){{1,2}})"
"""Answers are not empty: with many stop tokens, nearly all would be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    set_template(made)
    add_tokens(made)
    return made


def add_tokens(folder):
    """Give a folder the special tokens of several families, and all their stop tokens."""
    from transformers import AutoTokenizer

    tokenizer, families = AutoTokenizer.from_pretrained(folder), [FAMILIES[name] for name in FORCED]
    tokenizer.add_tokens([token for family in families for token in family.specials], special_tokens=True)
    tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    stops = sorted({tokenizer.convert_tokens_to_ids(token) for family in families for token in family.stops})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stops}))


@pytest.fixture(scope="module")
def served(folder, engines, tmp_path_factory):
    """(gateway's setting, record of what the engine sampled)"""
    from skyrl_megatron.inference.client import InferenceClient

    with engines.pool(tiny_settings(folder, max_model_len=1500)) as pool:
        engine, record = pool.slots[0].engine, []
        plain = engine.generate

        async def generate(request_id, prompt, *rest, **options):
            made = await plain(request_id, prompt, *rest, **options)
            record.append((list(prompt), made))
            return made

        engine.generate = generate
        client = InferenceClient(pool)
        wire = engines.loop(make_wire(folder, max_model_len=1500), 300)
        made = Setting(folder, tmp_path_factory.mktemp("log"), wire, client=client, loop=engines.loop)
        try:
            yield made, record
        finally:
            made.close()
            del engine.generate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [Chat, Messages, Responses])
def test_rows_are_the_engines_own_record(served, kind, seed):
    from skyrl_megatron_agents.rows import rows_of

    setting, record = served
    rng, start = random.Random(seed), len(record)
    sampling = {"structured_outputs": {"regex": CALLS}, "max_tokens": 90, "seed": seed}
    trajectory = setting.open(sampling=sampling)
    agent = kind(trajectory.access)
    for _ in range(3):
        agent.ask(stream=rng.random() < 0.5)
        agent.reply("3")
    (row,) = rows_of(trajectory.graph)
    prompt, last = record[-1]
    assert [*row.prompt_ids.tolist(), *row.response_ids.tolist()] == [*prompt, *last.token_ids]
    trained = np.flatnonzero(row.loss_mask)
    assert row.response_ids[trained].tolist() == [t for _, made in record[start:] for t in made.token_ids]
    logprobs = np.asarray([p for _, made in record[start:] for p in made.logprobs], np.float32)
    np.testing.assert_array_equal(row.rollout_logprobs[trained], logprobs)


@pytest.mark.parametrize("name", FORCED)
def test_an_engine_that_is_made_to_say_an_answer_stops_at_its_last_trained_token(folder, served, name):
    """At each token of a trained answer the engine may sample this token only, after those before it. It stops at the
    last one, because generation_config.json says so, and at no other."""
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    family = FAMILIES[name]
    chat = ChatFormat(load_tokenizer(folder), family.template)
    thought = {"reasoning_content": "2"} if family.thinks == "always" else {}
    call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "7", **thought},
        {"role": "user", "content": "4?"},
        *([{"role": "assistant", "content": "", "tool_calls": [call], **thought}] if family.calls else []),
        *([{"role": "tool", "content": "1", "tool_call_id": "f:0"}] if family.calls else []),
        {"role": "assistant", "content": "It", **thought},
    ]
    prompts, sampling, expected, said = [], [], [], []
    for prompt, response, mask in trained_sequences(chat, messages):
        for place, (token, trained) in enumerate(zip(response, mask, strict=True)):
            if not trained:
                continue
            prompts.append([*prompt, *response[:place]])
            sampling.append({"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": [token]})
            last = place + 1 == len(mask) or not mask[place + 1]
            expected.append(([token], "stop" if last else "length"))
            said.append(chat.tokenizer.decode([token]) + ("" if not last else "\n"))
    made = served[0].loop(served[0].client.generate(prompts, sampling, None), 300)
    assert [(each.token_ids, each.finish_reason) for each in made] == expected
    answers = [message for message in messages if message["role"] == "assistant"]
    oracle = "".join(family.said(message) + family.stop(message) + "\n" for message in answers)
    assert "".join(said) == oracle


def test_a_batch_of_agents_is_that_of_our_own_loop(folder, served, tmp_path):
    """Same prompts and seeds: tokens, log-probs, masks and rewards of the training batch are equal bit for bit."""
    import torch
    from transformers import AutoTokenizer

    from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron.envs import BaseTextEnv, register
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
    from skyrl_megatron.rollout.interface import BatchMetadata, TrajectoryID
    from skyrl_megatron.rollout.outputs import to_training_batch
    from skyrl_megatron_agents.agent_generator import AgentGenerator

    setting, _ = served

    class Asks(BaseTextEnv):
        turn = 0

        def step(self, action):
            self.turn += 1
            again = [{"role": "user", "content": f"Why {len(action)}?"}]
            done = self.turn == 3
            return {
                "observations": [] if done else again,
                "reward": len(action) * float(done),
                "done": done,
                "metadata": {},
            }

    register("asks", Asks)

    class Agents(AgentGenerator):
        async def agent(self, task):
            import openai

            client = openai.AsyncOpenAI(base_url=f"{task.access.url}/v1", api_key=task.access.key)
            env, messages = Asks(), list(task.prompt)
            while True:
                made = await client.chat.completions.create(model="policy", messages=messages)
                text = self.tokenizer.decode(self.sampled_last(task), skip_special_tokens=True)
                step = env.step(text)
                if step["done"]:
                    return step["reward"]
                messages += [made.choices[0].message.model_dump(exclude_none=True), *step["observations"]]

        def sampled_last(self, task):
            name = task.access.url.rpartition("/")[2]
            return self._running.gateway.trajectories[name].graph.calls[-1].generation.token_ids

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    path = tmp_path / "template"
    path.write_text(CHAT_TEMPLATE)
    batch = {
        "prompts": [[{"role": "user", "content": f"What is {n} + 4?"}] for n in (3, 3, 5)],
        "env_classes": ["asks"] * 3,
        "env_extras": [{}] * 3,
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1), TrajectoryID("b", 0)],
        "batch_metadata": BatchMetadata(4, "train"),
    }

    def config(**changes):
        sampling = SamplingParams(max_generate_length=20, temperature=1.0)
        template = {"source": "file", "name_or_path": str(path)}
        cfg = GeneratorConfig(max_turns=3, max_input_length=400, sampling_params=sampling, **changes)
        cfg.chat_template.source, cfg.chat_template.name_or_path = template["source"], template["name_or_path"]
        return cfg

    made = []
    for kind in (SkyRLGymGenerator, Agents):
        generator = kind(config(), SkyRLGymConfig(), setting.client, tokenizer, seed=11)
        made.append(setting.loop(generator.generate(batch, True), 300))
        if kind is Agents:
            setting.loop(generator.stop())
    own, agents = made
    for key in ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs", "rollout_versions"):
        for left, right in zip(own[key], agents[key], strict=True):
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=key)
    assert own["stop_reasons"] == agents["stop_reasons"] and own["errors"] == agents["errors"] == [None] * 3
    uids = ["a", "a", "b"]
    left, right = to_training_batch(own, uids), to_training_batch(agents, uids)
    for name in ("lengths", "response_lengths"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    for name in ("tokens", "response_mask", "loss_mask", "rewards", "rollout_logprobs"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
