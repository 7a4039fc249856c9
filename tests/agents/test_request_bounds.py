"""Requests of one agent do not hold up those of others, and what it may use is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time

import httpx
import pytest

from tests.agents.test_gateway import asked, post
from tests.agents.wires import Setting, write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"))
    made = Setting(folder, tmp_path_factory.mktemp("log"))
    yield made
    made.close()


async def until(condition):
    """Wait for an event. Raises TimeoutError after 30 s."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def tool(number):
    return {"type": "function", "function": {"name": f"t{number}", "parameters": {"type": "object"}}}


def called(number):
    item = {"type": "function_call", "name": "x", "arguments": "{}", "call_id": f"{number}", "id": f"fc_{number}"}
    return [item, {"type": "function_call_output", "call_id": f"{number}", "output": "1"}]


BODIES = {
    "messages": (CHAT, {"messages": [USER, ANSWER] * 2000}, "messages"),
    "answers": (CHAT, {"messages": [USER, *[ANSWER] * 4000]}, "messages"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}]}, "messages"),
    "blocks": (MESSAGES, {"messages": [USER, ANSWER] * 2000, "max_tokens": 5}, "messages"),
    "system": (MESSAGES, {"messages": [USER], "system": [{"type": "text", "text": "a"}] * 4000, "max_tokens": 5},
               "system"),
    "items": (RESPONSES, {"input": [item for number in range(1200) for item in called(number)]}, "input"),
    "tools": (CHAT, {"messages": [USER], "tools": [tool(number) for number in range(2000)]}, "tools"),
    "values": (CHAT, {"messages": [USER], "metadata": {"a": [[0]] * 30_000}}, "values"),
    "samples": (CHAT, {"messages": [USER], "n": 10_000}, "n"),
    "best of": (COMPLETIONS, {"prompt": "a", "best_of": 10_000}, "best_of"),
    "stops": (CHAT, {"messages": [USER], "stop": ["x"] * 5000}, "stop"),
    "sequences": (MESSAGES, {"messages": [USER], "stop_sequences": ["x"] * 5000, "max_tokens": 5}, "stop_sequences"),
    "words": (CHAT, {"messages": [USER], "bad_words": ["x"] * 5000}, "bad_words"),
    "biases": (CHAT, {"messages": [USER], "logit_bias": {str(number): 1 for number in range(5000)}}, "logit_bias"),
    "schema": (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"enum": ["a" * 150_000]}}}}, "response_format"),
    "tokens": (COMPLETIONS, {"prompt": [5] * 40_000}, "prompt"),
    "own tokens": (CHAT, {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [5]}}, "kv_transfer_params"),
    "beams": (CHAT, {"messages": [USER], "use_beam_search": True}, "use_beam_search"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_no_prompt_can_hold_is_refused_before_vllm_sees_it(setting, name, monkeypatch):
    trajectory = setting.open()
    seen = []
    monkeypatch.setattr(setting.wire, "call", lambda *given, **options: seen.append(given))
    path, body, field = BODIES[name]
    answer = post(trajectory, path, {"model": "policy", **body})
    assert answer.status_code == 400 and field in answer.text and not seen, answer.text
    assert bool(trajectory.too_long) == (
        name in ("messages", "answers", "parts", "blocks", "system", "items", "tokens")
    )
    assert not trajectory.failure and not trajectory.agents_failure


def test_a_body_of_more_bytes_than_a_context_is_not_read(setting):
    trajectory = setting.open()
    answer = post(trajectory, CHAT, asked("a" * setting.gateway.bounds.body_bytes))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert trajectory.too_long and not trajectory.held
    deadline = time.monotonic() + 30.0
    while trajectory.requests and time.monotonic() < deadline:  # it is counted until the answer is written
        time.sleep(0.01)
    assert not trajectory.requests


def test_wide_requests_are_converted_in_another_thread(setting, monkeypatch):
    """And their answers are those that other requests get."""
    from skyrl_megatron.inference.vllm import splicing

    threads = []
    original = splicing.SplicingRenderer.preprocess_chat

    async def noted(self, *given, **options):
        threads.append(threading.current_thread().name)
        return await original(self, *given, **options)

    monkeypatch.setattr(splicing.SplicingRenderer, "preprocess_chat", noted)
    trajectory = setting.open()
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a"] * 2100}}}
    history = [USER]
    for wide in (False, True, True, False):
        setting.client.say = [f"answer {len(history)}"]
        body = {"model": "policy", "messages": history, "stream": True, **({"response_format": form} if wide else {})}
        answer = post(trajectory, CHAT, body)
        assert f"{len(history)}" in answer.text and answer.status_code == 200, answer.text
        history += [{"role": "assistant", "content": f"answer {len(history)}"}, USER]
        assert (threads[-1] == "wide requests") == wide
    assert [call.parent for call in trajectory.graph.calls] == [None, *trajectory.graph.calls[:3]]
    assert not any(call.text_only for call in trajectory.graph.calls)


def test_the_thread_of_wide_requests_ends_with_the_gateway(setting, tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a"] * 2100}}}
    made = Setting(setting.folder, tmp_path / "log", setting.wire, client=setting.client)

    def threads():
        return {each.ident for each in threading.enumerate()}

    made.loop(setting.wire.stop())
    before = threads()
    for _ in range(2):  # the second starts the thread again
        assert post(made.open(), CHAT, asked("a", response_format=form)).status_code == 200
        assert "wide requests" in {each.name for each in threading.enumerate()}
        made.loop(setting.wire.stop())
    made.close()
    left = [each.name for each in threading.enumerate() if each.ident not in before]
    assert not [name for name in left if not name.startswith("asyncio_")], "the loop's own pool stays"


def test_requests_of_a_trajectory_are_converted_one_at_a_time(setting, monkeypatch):
    """Those of another one are not behind them."""
    from skyrl_megatron.inference.vllm import splicing

    now, most, order = {}, {}, []
    original = splicing.SplicingRenderer.preprocess_chat

    async def noted(self, request, *given, **options):
        name = request.user
        now[name] = now.get(name, 0) + 1
        most[name] = max(most.get(name, 0), now[name])
        await asyncio.sleep(0.05)
        order.append(name)
        now[name] -= 1
        return await original(self, request, *given, **options)

    monkeypatch.setattr(splicing.SplicingRenderer, "preprocess_chat", noted)
    mine, other = setting.open(), setting.open()

    async def ask():
        async with httpx.AsyncClient(timeout=60) as client:

            def one(trajectory, name, text):
                headers = {"authorization": f"Bearer {trajectory.access.key}"}
                return client.post(f"{trajectory.access.url}{CHAT}", json=asked(text, user=name), headers=headers)

            many = [asyncio.create_task(one(mine, "many", str(number))) for number in range(10)]
            await until(lambda: "many" in order)
            assert (await one(other, "one", "x")).status_code == 200
            done = len([each for each in order if each == "many"])
            assert {answer.status_code for answer in await asyncio.gather(*many)} == {200}
            return done

    assert asyncio.run(ask()) < 10
    assert most == {"many": 1, "one": 1}


LIMITS = [("calls", 3, {}), ("samples", 3, {}), ("samples", 3, {"n": 4}), ("tokens", 20, {})]


@pytest.mark.parametrize(("name", "most", "keys"), LIMITS)
def test_an_agent_that_wants_more_has_failed(setting, tmp_path, name, most, keys):
    from skyrl_megatron_agents.open_trajectory import TrajectoryLimits

    made = Setting(setting.folder, tmp_path / "log", setting.wire, client=setting.client,
                   limits=TrajectoryLimits(**{name: most}))  # fmt: skip
    try:
        trajectory, status = made.open(), []
        made.client.say = ["ten letters"] * 40
        for number in range(8):
            status.append(post(trajectory, CHAT, asked(f"{number}", **keys)).status_code)
        assert status[-1] == 403 and f"generator.agent.max_{name}={most}" in trajectory.agents_failure
        assert status == sorted(status) and (status[0] == 200) == (not keys)
        assert {"calls": trajectory.calls, "samples": len(trajectory.graph.calls), "tokens": most}[name] <= most + 5
        assert post(made.open(), CHAT, asked("a")).status_code == 200, "another trajectory has limits of its own"
    finally:
        made.client.say = []
        made.close()


def test_requests_at_once_and_unfinished_bodies_are_bounded(setting, tmp_path):
    from skyrl_megatron_agents.open_trajectory import TrajectoryLimits

    made = Setting(setting.folder, tmp_path / "log", setting.wire, client=setting.client,
                   limits=TrajectoryLimits(connections=6))  # fmt: skip

    async def unfinished(trajectory, length, sent):
        host, port = trajectory.access.url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /{trajectory.name}{CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key: {trajectory.access.key}\r\n"
        writer.write(f"{head}content-length: {length}\r\n\r\n".encode() + b" " * sent)
        await writer.drain()
        return reader, writer

    async def status(reader):
        async with asyncio.timeout(30):
            return int((await reader.readline()).split()[1])

    async def ask():
        trajectory, bound = made.open(), made.gateway.bounds.body_bytes
        held = [await unfinished(trajectory, 100, 1) for _ in range(6)]
        await until(lambda: trajectory.requests == 6)
        reader, _ = await unfinished(trajectory, 100, 1)
        assert await status(reader) == 429 and not trajectory.agents_failure
        for _, writer in held:
            writer.close()
        await until(lambda: not trajectory.requests)
        large = [await unfinished(trajectory, bound, bound - 1) for _ in range(5)]
        first, _ = await asyncio.wait([asyncio.ensure_future(status(reader)) for reader, _ in large],
                                      return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert [task.result() for task in first] == [429]
        for _, writer in large:
            writer.close()
        await until(lambda: not trajectory.requests)
        assert not trajectory.held

    try:
        asyncio.run(ask())
    finally:
        made.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "max_tokens": 32000}),
        (CHAT, {"messages": [USER], "max_completion_tokens": 10**20}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 32000}),
        (RESPONSES, {"input": "a", "max_output_tokens": 32000}),
        (MESSAGES, {"messages": [USER], "max_tokens": 32000}),
        (MESSAGES, {"messages": [USER], "max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}}),
        (MESSAGES + "/count_tokens", {"messages": [USER], "max_tokens": 32000}),
    ],
)
def test_a_limit_above_the_context_is_the_context(setting, path, body):
    trajectory, start = setting.open(), len(setting.client.sampled)
    answer = post(trajectory, path, {"model": "policy", **body})
    assert answer.status_code == 200, answer.text
    for prompt, _, keys in setting.client.sampled[start:]:
        assert keys["max_tokens"] == setting.wire.max_model_len - len(prompt)


NULLS = {
    CHAT: ("tools", "tool_choice", "stop", "n", "logit_bias", "max_tokens", "response_format", "structured_outputs"),
    COMPLETIONS: ("n", "echo", "best_of", "stop", "suffix"),
    RESPONSES: ("background", "truncation", "tools", "tool_choice", "service_tier", "store", "text", "reasoning",
                "parallel_tool_calls", "temperature", "metadata", "instructions"),
    MESSAGES: ("system", "tools", "tool_choice", "stop_sequences", "stream", "thinking", "metadata"),
}  # fmt: skip


@pytest.mark.parametrize("path", NULLS)
def test_a_field_that_is_null_is_absent(setting, path):
    trajectory = setting.open()
    needed = {COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}, MESSAGES: {"max_tokens": 5}}.get(path, {})
    needed = needed if "prompt" in needed or "input" in needed else {**needed, "messages": [USER]}
    for name in NULLS[path]:
        answer = post(trajectory, path, {"model": "policy", **needed, name: None})
        assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize("value", ["x", [1], 3, "", {"json": 3}, {"choice": "a"}, {"unknown": 1}])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, COMPLETIONS])
def test_structured_outputs_of_another_type_are_the_requests_fault(setting, path, value):
    trajectory, start = setting.open(), len(setting.client.sampled)
    needed = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "a"}, COMPLETIONS: {"prompt": "a"}}[path]
    answer = post(trajectory, path, {"model": "policy", **needed, "structured_outputs": value})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text
    assert len(setting.client.sampled) == start and not trajectory.failure


def test_what_vllm_fails_on_is_a_fault_of_the_request_or_of_the_policy(setting, monkeypatch):
    """Planted, because faults of vLLM are mended there: before sampling, and when the answer is parsed."""
    from skyrl_megatron.inference.vllm import splicing, wire_app

    trajectory = setting.open()
    with monkeypatch.context() as patch:
        patch.setattr(splicing, "_plain", lambda message: message.nothing)
        answer = post(trajectory, CHAT, asked("a"))
    assert answer.status_code == 400 and not trajectory.failure and not trajectory.agents_failure
    with monkeypatch.context() as patch:
        patch.setattr(wire_app, "played_back", lambda *given: [][0])
        answer = post(trajectory, CHAT, asked("a"))
    assert answer.status_code >= 400 and not trajectory.failure, answer.text
    assert "cannot be written as an answer" in trajectory.agents_failure
    assert post(trajectory, CHAT, asked("a")).status_code == 200 and not trajectory.agents_failure


def mutated(rng, value, depth=0):
    """A JSON value with something else at one place."""
    others = [None, True, -1, 0, 10**30, 1.5, "", "x", "\ud800", [], [[]], {}, {"type": "text"}, "9" * 1000]
    if depth > 5 or not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(others)
    made = dict(value) if isinstance(value, dict) else list(value)
    place = rng.choice(list(made) if isinstance(made, dict) else range(len(made)))
    choice = rng.random()
    if choice < 0.1:
        del made[place]
    elif choice < 0.2 and isinstance(made, dict):
        made[rng.choice(FIELDS)] = rng.choice(others)
    else:
        made[place] = mutated(rng, made[place], depth + 1)
    return made


FIELDS = [
    "stream", "n", "stop", "tools", "tool_choice", "logit_bias", "response_format", "structured_outputs", "thinking",
    "reasoning", "include", "text", "truncation", "store", "max_tokens", "logprobs", "top_logprobs", "echo", "suffix",
    "stream_options", "chat_template_kwargs", "documents", "best_of", "min_tokens", "bad_words", "allowed_token_ids",
    "return_token_ids", "truncate_prompt_tokens", "add_generation_prompt", "mm_processor_kwargs", "prompt_embeds",
]  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}  # fmt: skip
ORDINARY = [
    (CHAT, {"messages": [{"role": "system", "content": "s"}, USER, CALLED, {"role": "tool", "tool_call_id": "c",
            "content": [{"type": "text", "text": "1"}]}], "tools": [{"type": "function", "function": {
                "name": "f", "parameters": PARAMETERS}}], "max_tokens": 50, "stream": True, "logit_bias": {"5": 1}}),
    (CHAT, {"messages": [USER], "n": 2, "logprobs": True, "stop": ["x"], "response_format": {"type": "json_schema",
            "json_schema": {"name": "a", "schema": PARAMETERS}}, "max_tokens": 50}),
    (MESSAGES, {"system": [{"type": "text", "text": "s"}], "messages": [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "tool_use", "id": "u", "name": "f",
        "input": {"a": 1}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": [
            {"type": "text", "text": "1"}]}]}], "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "max_tokens": 50, "stream": True}),
    (RESPONSES, {"instructions": "s", "input": [USER, {"type": "reasoning", "id": "r", "summary": []}, *called(1)],
                 "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}], "stream": True}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 50, "stream": True, "stop": "x", "logprobs": 1}),
    (MESSAGES + "/count_tokens", {"messages": [USER], "system": "s"}),
]  # fmt: skip


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.full_matrix)])
def test_mutated_requests_get_one_clear_error_or_an_answer(setting, count, caplog):
    rng = random.Random(count)
    trajectory = setting.open()
    for number in range(count):
        path, body = rng.choice(ORDINARY)
        changed = {"model": "policy", **body}
        for _ in range(rng.choice([1, 1, 2, 3])):
            changed = mutated(rng, changed) if isinstance(changed, dict) and changed else changed
        answer = post(trajectory, path, changed)
        shown = json.dumps(changed)[:500], answer.text[:500]
        unwritable = answer.status_code == 500 and "the policy sampled cannot be written as an answer" in answer.text
        assert answer.status_code in (200, 400, 404) or unwritable, shown  # a tool's arguments that were cut off
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and "Traceback" not in error["message"], shown
        assert not trajectory.failure and not trajectory.agents_failure, shown
        if number % 20 == 0:
            assert post(setting.open(), CHAT, asked("a", max_tokens=20)).status_code == 200
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("skyrl")]
