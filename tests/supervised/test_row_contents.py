"""What a row says besides roles and text: tool calls, tools, flags, thinking, keys that nothing reads, other forms."""

import json

import pytest

from tests.supervised.both_ways import rows_both_ways
from tests.support.chat_families import CHATML_CALLS, QWEN3, QWEN25

USER, ANSWER = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
TOOLS_HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
AS_TEXT = QWEN25.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
PRINTS = QWEN25.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")
NAMES_ONLY = QWEN25.replace(CHATML_CALLS, "{{ c.function.name }}")
ONLY_CONTENT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
ONLY_CONTENT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# The last answer without a call is history, which has no thinking, as in Kimi-K2-Thinking.
THINKS_IN_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>"
    "{{ m.reasoning_content if m.tool_calls else '' }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_INLINE = ONLY_CONTENT.replace("m.content or ''", "(m.content or '').split('</think>')[-1]")


def call(name, arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, content=None, **others):
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **others}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def chat_of(template=None):
    from skyrl_megatron.rollout.templates import ChatFormat
    from tests.support.chat_families import family_tokenizer

    return ChatFormat(family_tokenizer("qwen3"), template)


def write(path, lines):
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(lines), path)
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path, template=QWEN25, **settings):
    """(rows, what was said)"""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron_supervised.chat_rows import ChatRows

    said = []
    return rows_both_ways(ChatRows, [str(path)], chat_of(template), SFTConfig(**settings), said.append), said


def trained(path, template=QWEN25, **settings):
    """The trained text of each row."""
    rows, _ = read(path, template, **settings)
    tokenizer = rows.chat.tokenizer
    parts = [[sequence[1:] for sequence in rows[place]["sequences"]] for place in range(len(rows))]
    return [
        tokenizer.decode([token for ids, mask in row for token, one in zip(ids, mask, strict=True) if one])
        for row in parts
    ]


def refused(path, template=QWEN25, **settings):
    from skyrl_megatron.errors import DataError

    with pytest.raises(DataError) as error:
        read(path, template, **settings)
    return str(error.value).removeprefix(str(path))


# ------------------------------------------------------------------------------------------------ tool calls
CALLS = [call("weather", {"city": "Oslo"}), call("add", {"a": 1, "b": 2}), call("now", {})]
WRITTEN = ['{"city": "Oslo"}', '{"a": 1, "b": 2}', "{}"]


def conversations(arguments, tools=None):
    """One conversation for each of CALLS, with arguments as ``arguments`` makes them."""
    calls = [call(each["function"]["name"], arguments(each["function"]["arguments"])) for each in CALLS]
    return [{"messages": [USER, calling(each), RESULT, ANSWER], "tools": tools} for each in calls]


@pytest.mark.parametrize("template", [QWEN25, AS_TEXT, PRINTS], ids=["tojson", "concatenated", "printed"])
@pytest.mark.parametrize("arguments", [json.dumps, dict], ids=["text", "object"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_arguments_are_what_the_template_takes(tmp_path, suffix, arguments, template):
    """JSON text or objects, in rows and in templates, without the keys of other calls that Arrow adds."""
    path = write(tmp_path / f"rows{suffix}", conversations(arguments))
    assert [text.partition('"arguments": ')[2] for text in trained(path, template)] == [
        f"{each}}}\n</tool_call><|im_end|>2<|im_end|>" for each in WRITTEN
    ]


def test_nulls_of_a_row_are_kept_and_those_of_a_column_type_are_not(tmp_path):
    """In JSONL a null is the row's; in Parquet text keeps it, and an object cannot."""
    given = [call("f", {"a": None, "list": [1, None]}), call("f", {"b": {"c": None, "d": [{"e": 1}, {"f": 2}]}})]
    spec = {"type": "function", "function": {"name": "f", "strict": None, "parameters": {"enum": ["x", None]}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"p": {"type": "string"}}}}}
    lines = [{"messages": [USER, calling(each)], "tools": [spec, other]} for each in given]
    template = TOOLS_HEAD + QWEN25
    rows, said = read(write(tmp_path / "rows.jsonl", lines), template)
    whole = [rows.chat.tokenizer.decode([*p, *r]) for place in range(2) for p, r, _ in rows[place]["sequences"]]
    assert '"arguments": {"a": null, "list": [1, null]}' in whole[0] and '"c": null' in whole[1] and not said
    assert '"strict": null' in whole[0]
    rows, said = read(write(tmp_path / "rows.parquet", lines), template)
    whole = [rows.chat.tokenizer.decode([*p, *r]) for place in range(2) for p, r, _ in rows[place]["sequences"]]
    assert (
        '"arguments": {"list": [1, null]}' in whole[0]
        and '"arguments": {"b": {"d": [{"e": 1}, {"f": 2}]}}' in whole[1]
    )
    assert '{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x", null]}}}' in whole[0]
    assert '{"name": "g", "parameters": {"properties": {"p": {"type": "string"}}}}' in whole[0]
    assert said == ["data: null fields that the columns' types add to tool calls and tools are left out (2 of 2 rows)"]


def test_json_columns_of_datasets_keep_their_nulls(tmp_path):
    """The type Json of the library is no struct: its values are those of the rows."""
    from datasets import Dataset

    lines = [{"messages": [USER, calling(call("f", given))]} for given in ({"a": 1, "n": None}, {"a": "s"})]
    Dataset.from_list(lines, on_mixed_types="use_json").to_parquet(tmp_path / "rows.parquet")
    assert '{"a": 1, "n": null}' in trained(tmp_path / "rows.parquet")[0]


BAD_CALLS = {
    "message 1, tool call 0: arguments is '{\"a\": ', which is no JSON": call("f", '{"a": '),
    "message 1, tool call 0: arguments is '[1]', it must be an object": call("f", "[1]"),
    "message 1, tool call 0: arguments is [1], it must be an object": call("f", [1]),
    "message 1, tool call 0: arguments is '{\"a\": NaN}', which is no JSON": call("f", '{"a": NaN}'),
    "message 1, tool call 0: arguments is '{\"a\": 1e999}', which is no JSON": call("f", '{"a": 1e999}'),
    "message 1, tool call 0 is {'function': {'arguments': '{}'}}": {"function": {"arguments": "{}"}},
}


@pytest.mark.parametrize("problem", BAD_CALLS)
def test_a_call_that_cannot_be_read(tmp_path, problem):
    """One error with file, row, message and call; or the row is skipped."""
    good, bad = {"messages": [USER, ANSWER]}, {"messages": [USER, calling(BAD_CALLS[problem])]}
    path = write(tmp_path / "rows.jsonl", [good, bad])
    assert refused(path).startswith(f", row 1: messages has an invalid tool call: {problem}")
    assert len(read(path, invalid_rows="skip")[0]) == 1


def test_what_a_template_leaves_out_of_a_call(tmp_path):
    """A template without tool calls would train an empty answer; one without arguments is named."""
    path = write(tmp_path / "rows.jsonl", [{"messages": [USER, calling(call("add", {"a": 1}))]}])
    assert "row 0: message 1: the chat template leaves out tool calls: set generator.chat_template" in refused(
        path, ONLY_CONTENT
    )
    assert read(path, NAMES_ONLY)[1] == ["data: nothing reads the key 'arguments' of messages (1 of 1 rows)"]
    said = calling(call("f", {}), content="wait")
    drops_text = QWEN25.replace("m.content or not m.tool_calls", "not m.tool_calls")
    text = write(tmp_path / "text.jsonl", [{"messages": [USER, said]}])
    assert ", row 0: message 1: the chat template does not write the text 'wait'" in refused(text, drops_text)
    text = write(tmp_path / "history.jsonl", [{"messages": [USER, said | {"weight": 0}, RESULT, ANSWER]}])
    assert "the key 'content (with tool calls)' of messages" in read(text, drops_text)[1][0]


# ----------------------------------------------------------------------------------------------------- tools
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("empty", ["", " ", None, "[]", "null"])
def test_a_row_without_tools(tmp_path, empty, suffix):
    spec = json.dumps([{"name": "add", "default": None}])
    lines = [{"messages": [USER, ANSWER], "tools": tools} for tools in (spec, empty)]
    rows, _ = read(write(tmp_path / f"rows{suffix}", lines), TOOLS_HEAD + QWEN25)
    prompts = [rows.chat.tokenizer.decode(rows[place]["sequences"][0][0]) for place in range(2)]
    assert prompts[0] == '{"name": "add", "default": null}' + prompts[1] and prompts[1].startswith("<|im_start|>user")


@pytest.mark.parametrize("tools", ["{1: ", "{}x", '{"name": "add"}', [1], 7, {"name": "add"}, ["{"]])
def test_tools_of_another_form(tmp_path, tools):
    lines = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": tools}]
    path = write(tmp_path / "rows.jsonl", lines)
    assert refused(path).startswith(f", row 1: tools is {tools!r}, it must be a list or its JSON text")
    assert len(read(path, invalid_rows="skip")[0]) == 1


# ----------------------------------------------------------------------------------------------------- flags
def talk(**flags):
    again = {"role": "user", "content": "no"}
    return [USER, {"role": "assistant", "content": "3", **flags}, again, ANSWER]


def test_a_message_that_is_not_trained(tmp_path):
    from skyrl_megatron.data.messages import FLAGS

    lines = [{"messages": talk(**{name: value})} for name in FLAGS for value in (0, False, 0.0)]
    lines += [{"messages": talk(**{name: value})} for name in FLAGS for value in (1, True, None)]
    found = trained(write(tmp_path / "rows.jsonl", lines))
    assert found == ["2<|im_end|>"] * (3 * len(FLAGS)) + ["3<|im_end|>2<|im_end|>"] * (3 * len(FLAGS))
    arrow = trained(write(tmp_path / "rows.parquet", [{"messages": talk(weight=0)}, {"messages": talk()}]))
    assert arrow == ["2<|im_end|>", "3<|im_end|>2<|im_end|>"]
    assert trained(write(tmp_path / "x.jsonl", [{"messages": talk(loss=False)}]), turns="last") == ["2<|im_end|>"]


LEFT_OUT = {
    "the row is not trained (weight is 0)": {"messages": talk(), "weight": 0},
    "no message of the assistant is trained: the flags of the messages leave out all": {
        "messages": [USER, ANSWER | {"weight": 0}]
    },
}


@pytest.mark.parametrize("said", LEFT_OUT)
def test_a_row_that_says_it_is_not_trained_is_left_out(tmp_path, said):
    """It is no mistake, so it does not end the run; it is counted."""
    path = write(tmp_path / "rows.jsonl", [{"messages": talk(), "weight": 1}, LEFT_OUT[said]])
    rows, lines = read(path)
    assert len(rows) == 1 and lines == [f"data: skipped 1 of 2 rows: {said}"]
    alone = write(tmp_path / "alone.jsonl", [LEFT_OUT[said]])
    assert "none of 1 rows can be trained" in refused(alone)


BAD_FLAGS = {
    "message 1: weight is 0.5, which cannot be obeyed": {"messages": talk(weight=0.5)},
    "message 1: loss is '0', which cannot be obeyed": {"messages": talk(loss="0")},
    "message 1: loss_mask is [0, 1], which cannot be obeyed": {"messages": talk(loss_mask=[0, 1])},
    "message 1: train_detail is [], which cannot be obeyed": {"messages": talk(train_detail=[])},
    "message 1: weight and train contradict each other": {"messages": talk(weight=0, train=True)},
    "message 0: train is True, but a message of the role 'user' is not trained": {
        "messages": [USER | {"train": True}, ANSWER]
    },
    "weight is 0.5, which cannot be obeyed": {"messages": talk(), "weight": 0.5},
    "loss_mask is [1, 0, 1], which cannot be obeyed": {"messages": talk(), "loss_mask": [1, 0, 1]},
}


@pytest.mark.parametrize("problem", BAD_FLAGS)
def test_a_flag_that_is_not_obeyed(tmp_path, problem):
    path = write(tmp_path / "rows.jsonl", [{"messages": talk(), "weight": 1}, BAD_FLAGS[problem]])
    assert refused(path).startswith(f", row 1: {problem}")
    assert len(read(path, invalid_rows="skip")[0]) == 1


# -------------------------------------------------------------------------------------------------- thinking
THOUGHT = "one and one"


def thinking(key, *messages, content="2"):
    return [USER, *messages, {"role": "assistant", "content": content, key: THOUGHT}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_reaches_the_template_by_the_key_that_it_reads(tmp_path, key):
    """Of three keys in use, the template reads one, or takes the thinking out of the content."""
    path = write(tmp_path / "rows.jsonl", [{"messages": thinking(key)}])
    expected = [f"<think>\n{THOUGHT}\n</think>\n\n2<|im_end|>"]
    assert trained(path, QWEN3) == trained(path, QWEN3.replace("m.reasoning_content", "m.thinking")) == expected
    parses = ONLY_CONTENT.replace(
        "{{ m.content or '' }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    )
    assert trained(path, parses) == expected


def test_thinking_that_no_key_brings_to_the_template(tmp_path):
    """An error, unless the row's thinking is to be dropped, or to be written into the content."""
    from skyrl_megatron.rollout.templates import BUILT_IN

    path = write(tmp_path / "rows.jsonl", [{"messages": thinking("reasoning_content")}])
    for template in (ONLY_CONTENT, BUILT_IN["qwen3_with_thinking"], THINKS_IN_CALLS, DROPS_INLINE):
        problem = refused(path, template)
        assert problem.startswith(
            ", row 0: message 1: the chat template does not write reasoning_content in this place"
        )
        assert "sft.thinking=content" in problem and "drop" in problem
        assert trained(path, template, thinking="drop")[0].endswith("2<|im_end|>")
        said = read(path, template, thinking="drop")[1]
        assert said == ["data: reasoning_content is dropped (sft.thinking=drop) (1 of 1 rows)"]
    assert trained(path, ONLY_CONTENT, thinking="content") == [f"<think>\n{THOUGHT}\n</think>\n\n2<|im_end|>"]
    assert "does not write the thinking (<think>) of the content" in refused(path, THINKS_IN_CALLS, thinking="content")


def test_thinking_that_a_template_writes_in_some_places(tmp_path):
    messages = [USER, calling(call("f", {}), reasoning=THOUGHT), RESULT, ANSWER]
    path = write(tmp_path / "rows.jsonl", [{"messages": messages}])
    assert trained(path, THINKS_IN_CALLS) == [f"<think>{THOUGHT}</think>f {{}}<|im_end|><think></think>2<|im_end|>"]


def test_thinking_in_the_content(tmp_path):
    """A template that drops it, or writes it after other thinking, gets it by its key, or the row is an error."""
    path = write(
        tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER | {"content": f"<think>\n{THOUGHT}\n</think>\n\n2"}]}]
    )
    expected = [f"<think>\n{THOUGHT}\n</think>\n\n2<|im_end|>"]
    assert trained(path, ONLY_CONTENT) == trained(path, QWEN3) == expected
    for template in (DROPS_INLINE, THINKS_IN_CALLS):
        assert "row 0: message 1: the chat template does not write the thinking (<think>)" in refused(path, template)
        assert trained(path, template, thinking="drop")[0].endswith("2<|im_end|>")
        assert THOUGHT not in trained(path, template, thinking="drop")[0]


def test_thinking_by_two_keys(tmp_path):
    """Equal ones are one, as vLLM's messages have them."""
    both = thinking("reasoning")[1] | {"reasoning_content": THOUGHT}
    path = write(tmp_path / "rows.jsonl", [{"messages": [USER, both]}])
    assert trained(path, QWEN3) == [f"<think>\n{THOUGHT}\n</think>\n\n2<|im_end|>"]
    differs = write(tmp_path / "x.jsonl", [{"messages": [USER, both | {"reasoning": "other"}]}])
    assert "message 1: reasoning_content and reasoning differ" in refused(differs, QWEN3)
    inside = [USER, both | {"content": "<think>\nmore\n</think>\n\n2"}]
    twice = write(tmp_path / "z.jsonl", [{"messages": inside}])
    assert "and the content have thinking: keep one of them" in refused(twice, QWEN3)
    number = write(tmp_path / "y.jsonl", [{"messages": [USER, ANSWER | {"thinking": 3}]}])
    assert "message 1: thinking is 3, it must be text" in refused(number, QWEN3)


# --------------------------------------------------------------------- keys that nothing reads, roles, parts of text
def test_keys_that_nothing_reads_are_named_once_with_their_count(tmp_path):
    lines = [{"messages": [USER | {"name": "me"}, ANSWER], "source": "web", "extra_info": {"id": 1}}] * 3
    path = write(tmp_path / "rows.jsonl", [*lines, {"messages": [USER, ANSWER], "source": None}])
    rows, said = read(path)
    assert len(rows) == 4 and said == [
        "data: nothing reads the column 'source' (3 of 4 rows)",
        "data: nothing reads the key 'name' of messages (3 of 4 rows)",
    ]
    assert refused(path, strict_rows=True).startswith(", row 0: nothing reads the column 'source' (sft.strict_rows)")
    assert len(read(path, strict_rows=True, invalid_rows="skip")[0]) == 1
    reads = QWEN25.replace("'<|im_start|>' + m.role", "'<|im_start|>' + (m.name or m.role)")
    assert read(path, reads)[1] == ["data: nothing reads the column 'source' (3 of 4 rows)"]


def test_a_role_that_the_template_leaves_out(tmp_path):
    """Not in silence: the message would vanish."""
    develop = {"role": "developer", "content": "Be brief."}
    path = write(tmp_path / "rows.jsonl", [{"messages": [develop, USER, ANSWER]}])
    only = ONLY_CONTENT.replace(
        "{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}"
    )
    assert ", row 0: message 0: the chat template leaves out messages of the role 'developer'" in refused(path, only)
    assert trained(path, ONLY_CONTENT) == ["2<|im_end|>"]


def test_parts_of_text(tmp_path):
    """As vLLM joins them: by the template's own loop, else by a line break."""
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "=?"}]
    lines = [{"messages": [USER | {"content": parts}, ANSWER | {"content": [{"type": "text", "text": "2"}]}]}]
    path = write(tmp_path / "rows.jsonl", lines)
    loops = ONLY_CONTENT.replace(
        "{{ m.content or '' }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endif %}",
    )
    for template, text in ((QWEN25, "1+1\n=?"), (loops, "1+1=?")):
        rows, _ = read(path, template)
        ((prompt, _, _),) = rows[0]["sequences"]
        assert f"<|im_start|>user\n{text}<|im_end|>" in rows.chat.tokenizer.decode(prompt)
        assert trained(path, template) == ["2<|im_end|>"]


# ------------------------------------------------------------------------------------------------------ forms
TURNS = [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "3", "weight": 0}]
FORMS = {
    "sharegpt": [
        {"conversations": [*TURNS, {"from": "human", "value": "no"}, {"from": "gpt", "value": "2"}], "system": "Add."},
        {"conversations": [TURNS[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"a": null}}'}]},
    ],
    "alpaca": [{"instruction": "add", "input": "1+1", "output": "2", "history": [["a", "b"]], "system": "Add."}],
    "prompt_completion": [
        {"prompt": [USER, ANSWER | {"content": "3"}, USER], "completion": [ANSWER]},
        {"prompt": "1+1=?", "completion": "2"},
    ],
    "anthropic": [
        {
            "system": "Add.",
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "wait"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
                ANSWER,
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        }
    ],
    "openai_functions": [
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
                {"role": "function", "name": "f", "content": "ok"},
                ANSWER,
            ],
            "functions": [{"name": "f", "parameters": {}}],
        }
    ],
}
CALLED = '\n<tool_call>\n{"name": "f", "arguments": ARGS}\n</tool_call><|im_end|>'
FORM_TEXTS = {
    "sharegpt": ["2<|im_end|>", CALLED.replace("ARGS", '{"a": null}')],
    "alpaca": ["b<|im_end|>2<|im_end|>"],
    "prompt_completion": ["2<|im_end|>", "2<|im_end|>"],
    "anthropic": ["wait" + CALLED.replace("ARGS", '{"a": 1}') + "2<|im_end|>"],
    "openai_functions": [CALLED.replace("ARGS", '{"a": 1}') + "2<|im_end|>"],
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_other_tools(tmp_path, form):
    """Converted if their format is named; else refused, with the option that reads them."""
    for number, line in enumerate(FORMS[form]):
        path = write(tmp_path / f"{number}.jsonl", [line])
        assert f"; sft.format={form} reads such rows: " in refused(path)
        texts = trained(path, TOOLS_HEAD + QWEN25, format=form)
        assert [text.removeprefix("\n") for text in texts] == [FORM_TEXTS[form][number].removeprefix("\n")]
    rows, said = read(tmp_path / "0.jsonl", TOOLS_HEAD + QWEN25, format=form)
    whole = rows.chat.tokenizer.decode([token for part in rows[0]["sequences"][0][:2] for token in part])
    assert ("system\nAdd." in whole) == ("system" in FORMS[form][0]) and said == []
    assert ('"function": {"name": "f"' in whole) == (form in ("anthropic", "openai_functions"))


def test_a_key_that_arguments_have_twice_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"messages": [USER, calling(call("f", '{"a": 1, "a": 2}'))]}])
    assert "the key 'a' is given twice" in refused(path, QWEN25)


def test_a_tool_result_that_is_an_error_is_not_made_a_plain_one(tmp_path):
    line = json.loads(json.dumps(FORMS["anthropic"][0]))
    line["messages"][2]["content"][0]["is_error"] = True
    path = write(tmp_path / "rows.jsonl", [line])
    assert "a tool_result has is_error=true" in refused(path, TOOLS_HEAD + QWEN25, format="anthropic")


def test_messages_in_two_columns_are_an_error(tmp_path):
    line = {"messages": [USER, ANSWER], "conversations": [*TURNS, TURNS[0], {"from": "gpt", "value": "2"}]}
    path = write(tmp_path / "rows.jsonl", [line])
    assert "the messages are given twice, in messages and in conversations" in refused(path, format="sharegpt")
    assert read(path)[1] == ["data: nothing reads the column 'conversations' (1 of 1 rows)"]


def test_a_key_of_a_tool_call_that_nothing_reads_is_named(tmp_path):
    made = call("add", {"a": 1}) | {"thought": "zz"}
    path = write(tmp_path / "rows.jsonl", [{"messages": [USER, calling(made)]}])
    assert read(path, QWEN25)[1] == ["data: nothing reads the key 'tool_calls.thought' of messages (1 of 1 rows)"]


def test_alpaca_without_a_question_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "1+1=?", "output": "2"}])
    assert ", row 0: no instruction and no input: the question is empty" in refused(path, format="alpaca")


def test_tools_in_another_form(tmp_path):
    """Bare functions are those of ShareGPT's rows; elsewhere the template gets them as they are, and it is said."""
    bare = [{"name": "f", "description": "d", "parameters": {}}]
    path = write(
        tmp_path / "share.jsonl",
        [{"conversations": TURNS + TURNS[:1] + [{"from": "gpt", "value": "2"}], "tools": bare}],
    )
    rows, said = read(path, TOOLS_HEAD + QWEN25, format="sharegpt")
    assert '"function": {"name": "f"' in rows.chat.tokenizer.decode(rows[0]["sequences"][0][0]) and said == []
    path = write(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER], "tools": bare}])
    assert "data: tools are written as they are, not in the form" in read(path, TOOLS_HEAD + QWEN25)[1][0]


def test_the_formats_of_the_configuration_are_those_of_the_reader():
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.row_shapes import CONVERTERS
    from skyrl_megatron.errors import ConfigError

    for form in ("messages", *CONVERTERS):
        SFTConfig.from_dict_config({"format": form})
    with pytest.raises(ConfigError, match="format"):
        SFTConfig.from_dict_config({"format": "chatml"})


# ---------------------------------------------------------------------------------------------- rows of any kind
def test_rows_that_are_changed_at_random(tmp_path):
    """Each is read, or is one error with file and row."""
    import random

    from skyrl_megatron.errors import DataError

    rng = random.Random(0)
    good = [(form, line) for form, lines in FORMS.items() for line in lines]
    good += [("messages", line) for line in conversations(json.dumps)]
    values = [None, "", "x", "null", 0, -1, 0.5, True, 10**400, [], {}, [None], [{}], {"role": "user"}, "{", "[1]"]

    def changed(value):
        if isinstance(value, dict) and value and rng.random() < 0.8:
            key = rng.choice(list(value))
            rest = {name: each for name, each in value.items() if name != key}
            return rest if rng.random() < 0.2 else rest | {key: changed(value[key])}
        if isinstance(value, list) and value and rng.random() < 0.8:
            place = rng.randrange(len(value))
            return [*value[:place], changed(value[place]), *value[place + 1 :]]
        return rng.choice(values)

    read_ = 0
    for number in range(300):
        form, line = rng.choice(good)
        path = write(tmp_path / "rows.jsonl", [changed(line) or {"messages": None}])
        try:
            rows, _ = read(path, TOOLS_HEAD + QWEN3, format=form)
            read_ += len(rows[0]["sequences"]) > 0
        except DataError as error:
            assert str(error).startswith(f"{tmp_path}/rows.jsonl, row 0: "), (number, error)
    assert 30 < read_ < 200
