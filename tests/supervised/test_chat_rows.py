"""Conversations as supervised training data: which tokens are trained, and what is no conversation."""

import json

import pytest

from tests.supervised.both_ways import rows_both_ways

USER, ANSWER = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
DROPS_THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('=')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.tiny_model import write_embedded_model

    return load_tokenizer(write_embedded_model(tmp_path_factory.mktemp("model") / "model"))


def taught(tokenizer, messages, template=None, **options):
    """(whole text, trained text) of each sequence."""
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    found = []
    for prompt, response, mask in trained_sequences(ChatFormat(tokenizer, template), messages, **options):
        assert len(response) == len(mask)
        trained = [token for token, one in zip(response, mask, strict=True) if one]
        found.append((tokenizer.decode([*prompt, *response]), tokenizer.decode(trained)))
    return found


def test_every_answer_is_trained_with_its_end_token(tokenizer):
    messages = [USER, ANSWER, {"role": "user", "content": "and 2?"}, {"role": "assistant", "content": "4"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert taught(tokenizer, messages) == [(whole, "2<|end|>4<|end|>")]
    assert taught(tokenizer, messages, trained=[False, False, False, True]) == [(whole, "4<|end|>")]


def test_a_template_with_text_after_the_end_token(tokenizer):
    """ChatML's newline between messages follows the end token, and is not trained."""
    from skyrl_megatron.rollout.templates import BUILT_IN

    template = BUILT_IN["qwen3_with_thinking"].replace("<|im_end|>", "<|end|>").replace("<|im_start|>", "<|system|>")
    messages = [USER, ANSWER, {"role": "user", "content": "and 2?"}, {"role": "assistant", "content": "4"}]
    ((whole, trained),) = taught(tokenizer, messages, template)
    assert trained == "2<|end|>4<|end|>"
    assert whole + "\n" == tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)


def test_a_template_that_drops_thinking_gives_a_sequence_per_answer(tokenizer):
    """Each answer is trained in the prompt that the model gets at that turn, and with its own thinking."""
    thought = {"role": "assistant", "content": "1+1=2"}
    messages = [USER, thought, {"role": "user", "content": "and 2?"}, {"role": "assistant", "content": "2+2=4"}]
    first, second = taught(tokenizer, messages, DROPS_THINKING)
    assert first == ("<|user|>1+1=?<|end|><|assistant|>1+1=2<|end|>", "1+1=2<|end|>")
    before = "<|user|>1+1=?<|end|><|assistant|>2<|end|><|user|>and 2?<|end|><|assistant|>"
    assert second == (before + "2+2=4<|end|>", "2+2=4<|end|>")


def test_a_template_without_an_end_token_gets_one(tokenizer):
    bare = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}{% endif %}"
    assert taught(tokenizer, [USER, ANSWER], bare) == [("1+1=? 2 <|end|>", "2 <|end|>")]


def test_a_template_that_does_not_continue_its_generation_prompt(tokenizer):
    from skyrl_megatron.errors import DataError

    other = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}think{% endif %}"
    with pytest.raises(
        DataError, match=r"does not begin the answer with its generation prompt .*, or set generator\.chat_"
    ):
        taught(tokenizer, [USER, ANSWER], other)


def test_tools_reach_the_template(tokenizer):
    template = "{% for t in tools or [] %}{{ t['name'] }}!{% endfor %}" + DROPS_THINKING
    ((whole, trained),) = taught(tokenizer, [USER, ANSWER], template, tools=[{"name": "add"}])
    assert whole.startswith("add!<|user|>") and trained == "2<|end|>"


IMAGE = {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what?"}]}
BAD = {
    "no column 'messages'; the columns are prompt": {"prompt": [USER]},
    "messages is empty": {"messages": []},
    "no message of the assistant": {"messages": [USER]},
    "the conversation ends with 'user'": {"messages": [USER, ANSWER, USER]},
    "messages has an image": {"messages": [IMAGE, ANSWER]},
    "the roles are out of order: 'assistant' comes first": {"messages": [ANSWER]},
    "the roles are out of order: 'assistant' comes after 'assistant'": {"messages": [USER, ANSWER, ANSWER]},
    "the roles are out of order: 'system' comes after 'user'": {
        "messages": [USER, {"role": "system", "content": "?"}, ANSWER]
    },
    "the roles are out of order: 'bot' comes after 'user'": {"messages": [USER, {"role": "bot", "content": "?"}]},
    "tools is '{1: ', it must be a list": {"messages": [USER, ANSWER], "tools": "{1: "},
    "longer than sft.max_length=64": {"messages": [USER, ANSWER | {"content": "2" * 70}]},
}


def rows_of(folder, tokenizer, lines, **settings):
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.chat_rows import ChatRows

    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = []
    chosen = SFTConfig(max_length=64, **settings)
    return rows_both_ways(ChatRows, [str(path)], ChatFormat(tokenizer), chosen, said.append), said


@pytest.mark.parametrize("problem", BAD)
def test_a_row_that_cannot_be_trained(tokenizer, tmp_path, problem):
    """One error with file and row; or it is skipped and counted, and the others keep their uids."""
    from skyrl_megatron.errors import DataError

    lines = [{"messages": [USER, ANSWER]}, BAD[problem], {"messages": [USER, ANSWER]}]
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, tokenizer, lines)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl, row 1: {problem}"), error.value
    assert "sft.invalid_rows=skip" in str(error.value)
    rows, said = rows_of(tmp_path, tokenizer, lines, invalid_rows="skip")
    assert [rows[place]["uid"] for place in range(len(rows))] == ["0", "2"]
    assert len(said) == 1 and said[0].startswith(f"data: skipped 1 of 3 rows: {problem}"[:60])


def test_nothing_is_left(tokenizer, tmp_path):
    from skyrl_megatron.errors import DataError

    with pytest.raises(DataError, match="none of 1 rows can be trained"):
        rows_of(tmp_path, tokenizer, [{"messages": [USER]}], invalid_rows="skip")


def test_parquet_rows_are_those_of_jsonl(tokenizer, tmp_path):
    """Arrow adds null fields to messages, and tools are JSON text."""
    import pandas

    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.chat_rows import ChatRows

    lines = [
        {"messages": [USER | {"name": "me"}, ANSWER], "tools": json.dumps([{"name": "add"}])},
        {"messages": [USER, ANSWER], "tools": None},
    ]
    pandas.DataFrame(lines).to_parquet(tmp_path / "rows.parquet")
    parquet = ChatRows([str(tmp_path / "rows.parquet")], ChatFormat(tokenizer), SFTConfig())
    jsonl, _ = rows_of(tmp_path, tokenizer, lines)
    assert [parquet[row]["sequences"] for row in range(2)] == [jsonl[row]["sequences"] for row in range(2)]
