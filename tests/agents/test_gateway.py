"""Conversations of stock clients through the gateway: their rows hold exactly the tokens that were sampled."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from tests.agents.clients import WIRES
from tests.agents.wires import Setting, write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"))
    made = Setting(folder, tmp_path_factory.mktemp("log"))
    yield made
    made.close()


def sampled_since(setting, start):
    return [(prompt, ids) for prompt, ids, _ in setting.client.sampled[start:]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wire", WIRES)
def test_rows_are_what_the_engine_sampled(setting, wire, seed):
    from skyrl_megatron_agents.rows import rows_of

    rng, start = random.Random(seed), len(setting.client.sampled)
    trajectory = setting.open()
    agent = WIRES[wire](trajectory.access)
    for _ in range(rng.randint(2, 5)):
        agent.ask(stream=rng.random() < 0.5)
        agent.reply(rng.choice(["And 5?", "12", "ü\n"]))
    sampled = sampled_since(setting, start)
    assert [(call.prompt_ids, call.generation.token_ids) for call in trajectory.graph.calls] == sampled
    assert not trajectory.graph.forks() and not any(call.text_only for call in trajectory.graph.calls)
    (row,) = rows_of(trajectory.graph)
    last_prompt, last_ids = sampled[-1]
    assert [*row.prompt_ids.tolist(), *row.response_ids.tolist()] == [*last_prompt, *last_ids]
    trained = row.response_ids[row.loss_mask > 0].tolist()
    assert trained == [token for _, ids in sampled for token in ids]
    if wire != "completions":
        assert setting.client.tokenizer.decode(last_prompt).count("Be brief.") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_parallel_tool_calls_arrive(setting, wire, stream):
    made = [("add", {"a": 1, "b": ["x", {"c": None}]}), ("look_up", {"a": 2}), ("add", {})]
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in made]
    text = "So." + "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in written)
    setting.client.say = [text, "Done."]
    trajectory = setting.open()
    agent = WIRES[wire](trajectory.access)
    assert agent.ask(stream=stream)[1] == made
    agent.reply("3")
    assert agent.ask(stream=not stream) == ("Done.", [])
    first, second = trajectory.graph.calls
    assert second.parent is first
    after = setting.client.tokenizer.decode(second.rest.tolist())
    assert after.startswith("\n<|im_start|>tool\n3") and after.endswith("<|im_start|>assistant\n")


def post(trajectory, path, body, key=None, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"authorization": f"Bearer {trajectory.access.key if key is None else key}"} | headers
    return httpx.post(f"{trajectory.access.url}{path}", content=content, headers=given, timeout=60)


def asked(text, **keys):
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **keys}


def test_retries_get_the_first_answer_and_equal_requests_another_sample(setting):
    trajectory = setting.open()
    path, start = "/v1/chat/completions", len(setting.client.sampled)
    first = post(trajectory, path, asked("a"))
    again = post(trajectory, path, asked("a"), **{"x-stainless-retry-count": "1"})
    assert first.content == again.content and len(setting.client.sampled) == start + 1
    other = post(trajectory, path, asked("a"))
    assert other.content != first.content and len(trajectory.graph.calls) == 2
    setting.client.delay = 0.6
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{trajectory.access.url}{path}", json=asked("b"), timeout=0.2,
                headers={"authorization": f"Bearer {trajectory.access.key}"},
            )  # fmt: skip
    finally:
        setting.client.delay = 0.0
    late = post(trajectory, path, asked("b"))  # by a client that does not say that it is a retry
    assert late.status_code == 200 and len(trajectory.graph.calls) == 3
    assert len(setting.client.sampled) == start + 3


def test_several_choices_and_forks(setting):
    from skyrl_megatron_agents.rows import rows_of

    setting.client.say = ["one", "two", "more", "edited"]
    trajectory = setting.open()
    answer = post(trajectory, "/v1/chat/completions", asked("a", n=2, logprobs=True)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two"]
    logprobs = [entry["logprob"] for entry in answer["choices"][1]["logprobs"]["content"]]
    assert logprobs == trajectory.graph.calls[1].generation.logprobs
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "two"}]
    ask = {"model": "policy", "messages": [*history, {"role": "user", "content": "b"}]}
    post(trajectory, "/v1/chat/completions", ask)
    ask["messages"][1] = {"role": "assistant", "content": "three"}
    post(trajectory, "/v1/chat/completions", ask)
    one, two, more, edited = trajectory.graph.calls
    assert (two.parent, more.parent, edited.parent) == (None, two, None)
    assert [call.text_only for call in trajectory.graph.calls] == [False, False, False, True]
    assert 'client sends {"calls":[],"role":"assistant","text":"three"} where call 1' in trajectory.first_unmatched
    assert len(rows_of(trajectory.graph)) == 3 == len(trajectory.graph.leaves())


def test_the_run_decides_how_is_sampled(setting):
    setting.gateway._changes_named = False
    trajectory = setting.open(sampling={"temperature": 0.7, "max_tokens": 50})
    body = asked(
        "a", temperature=0.0, top_p=0.1, max_tokens=400, stop=["ü"], seed=3, response_format={"type": "json_object"}
    )
    assert post(trajectory, "/v1/chat/completions", body).status_code == 200
    *_, keys = setting.client.sampled[-1]
    assert (keys["temperature"], keys["max_tokens"], keys["stop"]) == (0.7, 50, ["ü"])
    assert keys["structured_outputs"] == {"json_object": True} and not {"top_p", "seed"} & keys.keys()
    assert setting.gateway._changes_named


def test_stop_strings_cut_the_text_and_not_the_tokens(setting):
    setting.client.say = ["a b#c", "next"]
    trajectory = setting.open()
    answer = post(trajectory, "/v1/chat/completions", asked("a", stop="#")).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == ("a b", "stop", "#")
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a b"}]
    post(
        trajectory,
        "/v1/chat/completions",
        {"model": "policy", "messages": [*history, {"role": "user", "content": "b"}]},
    )
    first, second = trajectory.graph.calls
    assert second.parent is first and not second.text_only


LONG = "What is 3? " * 3000
ERRORS = [
    ("/v1/chat/completions", asked("a", model="other"), 404, "other"),
    ("/v1/messages", asked("a", model="other", max_tokens=5), 404, "other"),
    ("/v1/responses", {"model": "other", "input": "a"}, 404, "other"),
    ("/v1/chat/completions", b"{", 400, "not a JSON object"),
    ("/v1/messages", b"[1]", 400, "not a JSON object"),
    ("/v1/responses", b"\xff", 400, "not a JSON object"),
    ("/v1/chat/completions", asked(LONG), 400, "context length"),
    ("/v1/chat/completions", asked(LONG, stream=True), 400, "context length"),
    ("/v1/messages", asked(LONG, max_tokens=5), 400, "context length"),
    ("/v1/responses", {"model": "policy", "input": LONG}, 400, "context length"),
    ("/v1/completions", {"model": "policy", "prompt": LONG}, 400, "context length"),
    ("/v1/chat/completions", {"model": "policy", "messages": 3}, 400, "iterable"),
    ("/v1/messages", {"model": "policy", "messages": []}, 400, "max_tokens"),
    ("/v1/responses", {"model": "policy"}, 400, "input"),
    ("/v1/completions", {"model": "policy", "prompt": ["a", "b"]}, 400, "one prompt"),
    ("/v1/chat/completions", asked("a", logprobs=True, top_logprobs=3), 400, "log-probs"),
    ("/v1/chat/completions", asked("a", logprobs=True, top_logprobs=3, stream=True), 400, "log-probs"),
    ("/v1/embeddings", {}, 404, "is not served"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), ERRORS)
def test_errors_are_those_of_the_wire(setting, path, body, status, words):
    trajectory = setting.open()
    answer = post(trajectory, path, body)
    assert answer.status_code == status and words in answer.text, answer.text
    content = answer.json()
    if path == "/v1/messages":
        assert content["type"] == "error" and content["error"]["type"].endswith("_error")
    else:
        assert {"message", "type", "param", "code"} <= content["error"].keys()
    assert not trajectory.graph.calls and bool(trajectory.too_long) == ("context" in words)
    if "context" in words and path != "/v1/messages":
        assert content["error"]["code"] == "context_length_exceeded"
    assert post(trajectory, "/v1/chat/completions", asked("a")).status_code == 200


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "error"), ("/v1/messages", "type")])
def test_keys(setting, path, name):
    mine, other = setting.open(), setting.open()
    before = setting.gateway.counts.now.copy()
    for key, status, words in (("", 401, "missing"), ("sk-ü", 401, "wrong"), (other.access.key, 403, "another")):
        headers = {"x-api-key": key.encode()} if key else {}
        answer = httpx.post(f"{mine.access.url}{path}", json=asked("a"), headers=headers)
        assert answer.status_code == status and words in answer.text and name in answer.json()
    setting.loop(setting.gateway.close(mine.name))
    ended = post(mine, path, asked("a", max_tokens=5))
    assert ended.status_code == 404 and "has ended" in ended.text
    assert setting.gateway.counts.now - before == {"refused": 4, "unattributed": 3}
    assert post(other, path, asked("a", max_tokens=5)).status_code == 200


def test_an_engine_that_fails_is_no_fault_of_the_request(setting):
    from skyrl_megatron.errors import EngineError, RequestError

    trajectory = setting.open()
    for fail, status in ((EngineError("none left"), 503), (RequestError("bad bias"), 400), (KeyError("x"), 500)):
        setting.client.fail = fail
        for keys in ({}, {"stream": True}):
            answer = post(trajectory, "/v1/messages", asked("a", max_tokens=5, **keys))
            assert answer.status_code == status and answer.json()["type"] == "error"
    setting.client.fail = None
    assert "KeyError" in trajectory.failure
    assert post(trajectory, "/v1/messages", asked("a", max_tokens=5)).status_code == 200


def test_count_tokens_and_models(setting):
    trajectory = setting.open()
    counted = post(trajectory, "/v1/messages/count_tokens", asked("a")).json()["input_tokens"]
    post(trajectory, "/v1/messages", asked("a", max_tokens=5))
    assert counted == len(trajectory.graph.calls[0].prompt_ids)
    headers = {"x-api-key": trajectory.access.key}
    models = httpx.get(f"{trajectory.access.url}/v1/models", headers=headers).json()
    assert [model["id"] for model in models["data"]] == ["policy"]


def test_tools_that_the_template_cannot_show_are_refused(setting, tmp_path):
    from tests.agents.wires import make_wire
    from tests.support.tiny_models import CHAT_TEMPLATE

    folder = write_folder(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    other = Setting(folder, tmp_path / "log", setting.loop(make_wire(folder)), client=setting.client)
    try:
        for wire in ("chat", "messages", "responses"):
            trajectory = other.open()
            with pytest.raises(Exception, match="no place for tools") as error:
                WIRES[wire](trajectory.access).ask()
            assert error.value.status_code == 400
            assert post(trajectory, "/v1/messages", asked("a", max_tokens=5)).status_code == 200
    finally:
        other.close()


def test_a_sampled_stop_token_stands_for_the_one_of_the_history(setting, tmp_path):
    """As in gpt-oss: a last answer ends with the token that was sampled, earlier ones end with another one."""
    from tests.agents.wires import TEMPLATE, make_wire

    history = "{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}\n"
    template = TEMPLATE.replace("<|im_end|>\n{% endfor %}{% if add", history + "{% endfor %}{% if add")
    assert template != TEMPLATE
    (path := tmp_path / "template").write_text(template)
    wire = setting.loop(make_wire(setting.folder, chat_template=str(path)), 300)
    other = Setting(setting.folder, tmp_path / "log", wire, client=setting.client)
    try:
        setting.client.say = ["It is 7.", "It is 12."]
        trajectory = other.open()
        agent = WIRES["chat"](trajectory.access)
        agent.ask()
        agent.reply("And 5?")
        agent.ask()
        text = setting.client.tokenizer.decode(trajectory.graph.calls[1].prompt_ids)
        assert "It is 7.<|im_end|>\n<|im_start|>" in text and not trajectory.graph.calls[1].text_only
    finally:
        other.close()


def test_a_new_process_continues_with_the_log(setting, tmp_path):
    made = Setting(setting.folder, tmp_path / "log", setting.wire, client=setting.client)
    try:
        trajectory = made.open("mine")
        agent = WIRES["chat"](trajectory.access)
        agent.ask()
        agent.reply("b")
        agent.ask(stream=True)
        gone = made.open("other")
        post(gone, "/v1/messages", asked("a", max_tokens=5))
        made.loop(made.gateway.forget(["other"]))
        made.loop(made.gateway.stop())
        made.options["port"] = int(made.gateway.server.url.rpartition(":")[2])
        made.start()
        start = len(setting.client.sampled)
        again = made.open("mine")
        assert again.access == trajectory.access
        assert [(c.ids, c.end, c.generation) for c in again.graph.calls] == [
            (c.ids, c.end, c.generation) for c in trajectory.graph.calls
        ]
        replayed = WIRES["chat"](again.access)
        replayed.ask()
        replayed.reply("b")
        replayed.ask(stream=True)
        assert len(setting.client.sampled) == start  # both answers are those of the log
        replayed.reply("c")
        replayed.ask()
        assert again.graph.calls[2].parent is again.graph.calls[1] and not again.graph.forks()
        assert not made.open("other").graph.calls
    finally:
        made.close()


def test_a_client_that_drops_thinking_continues_with_it(setting, tmp_path):
    """The library returns the text only; the prompt of the next call has the sampled thinking nevertheless."""
    from tests.agents.wires import make_wire

    wire = setting.loop(make_wire(setting.folder, reasoning_parser="deepseek_r1"), 300)
    made = Setting(setting.folder, tmp_path / "log", wire, client=setting.client)
    try:
        for name, agent_of in WIRES.items():
            if name == "completions":
                continue
            for stream in (False, True):
                setting.client.say = ["<think>Hidden.</think>Said.", "<think>More.</think>Done."]
                trajectory = made.open()
                agent = agent_of(trajectory.access)
                assert agent.ask(stream=stream) == ("Said.", [])
                if name == "messages":
                    said = [block for block in agent.messages[-1]["content"] if block["type"] == "text"]
                    agent.messages[-1]["content"] = said
                if name == "responses":
                    agent.items = [item for item in agent.items if item.get("type") != "reasoning"]
                agent.reply("And 5?")
                agent.ask(stream=stream)
                first, second = trajectory.graph.calls
                assert second.parent is first and not second.text_only
                assert "Hidden." in setting.client.tokenizer.decode(second.prompt_ids)
    finally:
        made.close()
