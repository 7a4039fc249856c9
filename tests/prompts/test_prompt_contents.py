"""Prompts with tools, tool calls and keys that nothing reads; columns that a file lacks."""

import asyncio
import json

import pytest

from skyrl_megatron.errors import DataError
from tests.prompts.test_prompts import cache, dataset, save  # noqa: F401
from tests.rollout.scripted import ScriptedEngine, batch_of, generation, generator_of, say, tokenizer_of

USER = {"role": "user", "content": "?"}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }} "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SPEC = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}}}
OTHER = {"type": "function", "function": {"name": "now", "strict": True}}


def with_said(path, **options):
    said = []
    return dataset([path], say=said.append, **options), said


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "text"])
def test_tools_of_a_row_are_part_of_the_prompt(tmp_path, suffix, as_text):
    """They are counted in its length, and sampled with; an environment gets them too."""
    column = json.dumps if as_text else list
    rows = [{"prompt": [USER], "tools": column(tools)} for tools in ([SPEC], [SPEC, OTHER], [])]
    path = save(rows, tmp_path / f"data{suffix}")
    tokenizer = tokenizer_of("chatml")
    texts = ["".join(json.dumps(tool) for tool in tools) for tools in ([SPEC], [SPEC, OTHER], [])]
    prompts = [tokenizer.encode(f"{text}<|im_start|>user ?<|im_end|><|im_start|>assistant ") for text in texts]
    found, _ = with_said(path, template=TEMPLATE)
    assert [json.loads(e[2]["tools"]) if as_text else e[2]["tools"] for e in (found[n] for n in range(3))] == [
        [SPEC],
        [SPEC, OTHER],
        [],
    ]
    limit = len(prompts[0])
    assert list(dataset([path], limit, template=TEMPLATE).kept) == [0, 2] and limit < len(prompts[1])

    for batched in (False, True):
        replies = [generation([*tokenizer.encode("2"), tokenizer.eos_token_id]) for _ in range(3)]
        engine = ScriptedEngine(replies)
        generator = generator_of("chatml", engine, max_turns=1, batched=batched)
        generator.chat.template = TEMPLATE
        items = found.collate_fn([found[number] for number in range(3)])
        extras = [item["env_extras"] | {"steps": [say(done=True)]} for item in items]
        asyncio.run(generator.generate(batch_of([item["prompt"] for item in items], extras), disable_tqdm=True))
        assert [engine.prompts[f"{number}_0"] for number in range(3)] == [[prompt] for prompt in prompts]


def test_a_column_that_holds_no_tools_is_the_environments(tmp_path):
    rows = [{"prompt": [USER], "tools": tools} for tools in (["search"], {"search": 1}, "search", "", None)]
    found, said = with_said(save(rows, tmp_path / "data.jsonl"), template=TEMPLATE)
    assert [found[number][2]["tools"] for number in range(5)] == [row["tools"] for row in rows]
    assert said == ["data: only the environment gets the column 'tools', which describes no tools (3 of 5 rows)"]
    _, said = with_said(save([{"prompt": [USER], "tools": [SPEC]}], tmp_path / "x.jsonl"))
    assert said == ["data: the chat template leaves out the tools (1 of 1 rows)"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tool_calls_of_a_prompt(tmp_path, suffix):
    """As in supervised rows: arguments are objects, without the keys of other calls that Arrow adds."""
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"a": 1}, {"b": "x"})]
    rows = [{"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]} for call in calls]
    found, said = with_said(save(rows, tmp_path / f"data{suffix}"), template=TEMPLATE)
    assert [found[n][0][1]["tool_calls"] for n in range(2)] == [[call] for call in calls]
    assert len(said) == (suffix == ".parquet")
    text = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    rows = [{"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [text]}]}]
    found, _ = with_said(save(rows, tmp_path / f"text{suffix}"), template=TEMPLATE)
    assert found[0][0][1]["tool_calls"] == [calls[0]]
    text["function"]["arguments"] = '{"a": '
    with pytest.raises(
        DataError, match=r"row 0: prompt has an invalid tool call: message 1, tool call 0: arguments is"
    ):
        with_said(save(rows, tmp_path / f"bad{suffix}"), template=TEMPLATE)


def test_keys_of_messages_that_nothing_reads(tmp_path):
    """Named once with their count; the columns are the environment's."""
    rows = [{"prompt": [USER | {"name": "me", "weight": 1}], "level": 3}] * 2 + [{"prompt": [USER], "level": 1}]
    path = save(rows, tmp_path / "data.jsonl")
    found, said = with_said(path)
    assert said == ["data: nothing reads the key 'name' of messages (2 of 3 rows)"] and found[0][2] == {"level": 3}
    with pytest.raises(DataError, match=r"row 0: nothing reads the key 'name' of messages: .*data.strict_rows=false"):
        with_said(path, strict=True)
    history = [USER, {"role": "assistant", "content": "2", "reasoning": "one and one"}, USER]
    reads = TEMPLATE.replace("{{ m.content or '' }}", "{{ m.reasoning_content or '' }}{{ m.content or '' }}")
    found, said = with_said(save([{"prompt": history}], tmp_path / "x.jsonl"), template=reads)
    assert found[0][0][1] == {"role": "assistant", "content": "2", "reasoning_content": "one and one"} and not said
    assert with_said(tmp_path / "x.jsonl")[1] == ["data: nothing reads the key 'reasoning' of messages (1 of 1 rows)"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_that_a_file_lacks_is_empty_in_all_its_rows(tmp_path, suffix):
    """Also when none of the columns that are asked for exists."""
    from skyrl_megatron.data.row_files import load_source

    path = save([{"prompt": [USER], "reward_model": {"ground_truth": "1"}}] * 3, tmp_path / f"data{suffix}")
    found, said = with_said(path)
    assert found.rows_without_reward_spec("mine") == {"mine": 3} and found.env_classes("mine") == {"mine"}
    assert said == ["data: the column 'reward_model' is not 'reward_spec', which environments read: rename it"]
    rows = load_source(path)
    assert [row.get("level") for row in rows.each(["level"])] == [None] * 3
    assert [len(batch) for batch in rows.batches([])] == [3]
    assert found.sampled_rows.column("prompt") == [[USER]] * 3


def test_a_map_is_refused_with_its_fix(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.map_(pa.string(), pa.int64())
    pq.write_table(pa.table({"arguments": pa.array([[("a", 1)]], kind)}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"map<string, int64.*write a map as JSON text, or the rows as JSONL"):
        dataset([str(tmp_path / "data.parquet")])
