"""What is trained of a conversation: what the template writes, and of it what the model has to sample."""

import json
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_families import FAMILIES, family_format, family_tokenizer, spelled


def user(text):
    return {"role": "user", "content": text}


def answer(text, thinking="", calls=0, name="f"):
    listed = [
        {"id": f"f:{n}", "type": "function", "function": {"name": name, "arguments": {"a": n}}} for n in range(calls)
    ]
    message = {"role": "assistant", "content": text}
    return message | ({"reasoning_content": thinking} if thinking else {}) | ({"tool_calls": listed} if calls else {})


def tool(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"f:{number}"}


def ends(tokenizer, ids):
    """The number of bytes of a text up to the end of each of its tokens."""
    added = tokenizer.get_added_vocab()
    names = tokenizer.convert_ids_to_tokens(ids)
    return accumulate(len(n.encode()) if n in added else 1 if n.startswith("<0x") else len(n) for n in names)


def shown(chat, messages, **options):
    """(text, [trained text of each run of trained tokens]) of each sequence."""
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    found = []
    for prompt, response, mask in trained_sequences(chat, messages, **options):
        assert len(response) == len(mask) and mask[0] == 1
        runs, before = [], 0
        for token, one in zip(response, mask, strict=True):
            if one and not before:
                runs.append([])
            if one:
                runs[-1].append(token)
            before = one
        found.append((spelled(chat.tokenizer, [*prompt, *response]), [spelled(chat.tokenizer, run) for run in runs]))
    return found


def test_an_answer_that_the_next_message_ends_is_trained_to_stop_there():
    """GLM: <|user|> after an answer, <|observation|> after a call, both tokens at which the model stops."""
    chat = family_format("glm")
    rows = [user("1+1=?"), answer("2"), user("2+2=?"), answer("4")]
    whole = chat.tokenizer.apply_chat_template(rows, tokenize=False)
    assert shown(chat, rows) == [
        (whole + "<|user|>", ["\n<think></think>\n2<|user|>", "\n<think></think>\n4<|user|>"])
    ]
    rows = [user("1+1=?"), answer("", calls=1), tool("2"), answer("It is 2.")]
    whole = chat.tokenizer.apply_chat_template(rows, tokenize=False)
    call = '\n<think></think>\n<tool_call>f\n{"a": 0}\n</tool_call><|observation|>'
    assert shown(chat, rows) == [(whole + "<|user|>", [call, "\n<think></think>\nIt is 2.<|user|>"])]
    assert shown(chat, rows[:2])[0][1] == [call], "at the end of a row too"


def test_a_format_whose_answers_are_several_messages():
    """gpt-oss: thinking and answer are trained up to <|return|>, a call up to <|call|>; history has <|end|>."""
    chat = family_format("harmony")
    final = "<|channel|>final<|message|>"
    thinking = "<|channel|>analysis<|message|>one more<|end|><|start|>assistant"
    ((_, trained),) = shown(chat, [user("1+1=?"), answer("2", "one more")])
    assert trained == [f"{thinking}{final}2<|return|>"]
    first, second = shown(chat, [user("1+1=?"), answer("2"), user("2+2=?"), answer("4")])
    assert first[1] == [f"{final}2<|return|>"] and second[1] == [f"{final}4<|return|>"]
    assert f"{final}2<|end|><|start|>user" in second[0]
    ((text, trained),) = shown(chat, [user("1+1=?"), answer("", calls=1), tool("2"), answer("It is 2.")])
    assert trained == [
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 0}<|call|>',
        f"{final}It is 2.<|return|>",
    ]
    assert "<|call|><|start|>functions.f" in text


def test_an_answer_whose_rendering_rewrites_its_own_prompt():
    """gpt-oss drops the thinking of a call when the final answer follows, but the engine's prompt still has it."""
    chat = family_format("harmony")
    rows = [user("1+1=?"), answer("", "I add", calls=1), tool("2"), answer("It is 2.", "so")]
    assert not chat.text(rows).startswith(chat.text(rows[:3], generation_prompt=True))
    ((text, trained),) = shown(chat, rows)
    thinking = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    call = ' to=functions.f<|channel|>commentary json<|message|>{"a": 0}<|call|>'
    last = thinking.format("so") + "<|channel|>final<|message|>It is 2.<|return|>"
    assert trained == [thinking.format("I add") + call, last]
    assert text == chat.text(rows[:3], generation_prompt=True) + last


def test_an_answer_that_does_not_follow_its_prompt_is_an_error():
    """Thinking models: the prompt opens a thought, which an answer without thinking has not."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    chat = family_format("minimax")
    with pytest.raises(DataError, match=r"message 1: .* does not begin the answer with its generation prompt"):
        trained_sequences(chat, [user("1"), answer("2")])


def test_a_call_that_the_template_leaves_out_is_an_error():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    for name, calls in (("harmony", 2), ("mistral", 1)):
        with pytest.raises(DataError, match=rf"message 1: .* does not write 1 of {calls} calls of 'look_up'"):
            trained_sequences(family_format(name), [user("1"), answer("", calls=calls, name="look_up")])


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_that_puts_a_space_before_each_text(legacy):
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    chat = family_format("mistral", legacy=legacy)
    rows = [user("1+1"), answer("4"), user("2+2"), answer(" 44 the")]
    whole = chat.tokenizer.encode(chat.tokenizer.apply_chat_template(rows, tokenize=False), add_special_tokens=False)
    ((prompt, response, mask),) = trained_sequences(chat, rows)
    assert [*prompt, *response] == whole
    trained = chat.tokenizer.convert_ids_to_tokens([t for t, one in zip(response, mask, strict=True) if one])
    assert "".join(trained) == "▁4</s>▁▁44▁the</s>" and trained[0] == "▁4"


def test_an_end_token_that_only_a_following_message_brings_stands_once():
    chat = family_format("hunyuan 3")
    rows = [user("1+1"), answer("2"), user("2+2"), answer("4")]
    ((text, trained),) = shown(chat, rows)
    assert trained == ["2<hy_end>", "4<hy_end>"] and text.count("<hy_end>") == 2
    assert text == chat.tokenizer.apply_chat_template(rows, tokenize=False) + "<hy_end>"


def test_a_token_over_the_end_of_the_prompt_is_what_the_model_would_sample():
    """Two line breaks are one token, but the prompt has the first of them, and the model samples the second."""
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    chat = family_format("qwen2.5")
    encode = chat.encoder.whole
    rows = [user("1+1"), answer("\n2"), user("2+2"), answer("\n\n4")]
    assert encode("a\n\nb") != [*encode("a\n"), *encode("\nb")]
    ((prompt, response, mask),) = trained_sequences(chat, rows)
    assert prompt == chat.prompt(rows[:1])
    trained = [token for token, one in zip(response, mask, strict=True) if one]
    assert trained == [*encode("\n2<|im_end|>"), *encode("\n\n4<|im_end|>")]
    assert chat.tokenizer.decode([*prompt, *response]) + "\n" == chat.text(rows)


def test_a_stop_token_inside_an_answer_is_an_error_with_the_message():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    chat = family_format("qwen2.5")
    with pytest.raises(
        DataError, match=r"message 3: its text continues with ' c<\|im_end\|>.n' after <\|im_end\|>, at w"
    ):
        trained_sequences(chat, [user("a"), answer("b"), user("a"), answer("b<|im_end|> c")])
    chat = family_format("glm")
    with pytest.raises(DataError, match=r"message 1: its text continues with '!' after <\|user\|>"):
        trained_sequences(chat, [user("a"), answer("b<|user|>!")])


def test_a_template_without_answers_cannot_be_trained():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    chat = ChatFormat(family_tokenizer("qwen2.5"), "{{ messages[0].content }}")
    with pytest.raises(DataError, match="omits assistant messages"):
        trained_sequences(chat, [user("a"), answer("b")])


TEXTS = st.text(st.sampled_from("the of 4\n .é汉"), min_size=1, max_size=8)
THOUGHTS = st.text(st.sampled_from("the of 4"), min_size=1, max_size=8).map(lambda text: text.strip() or "the")


@st.composite
def conversations(draw, family):
    """(messages, whether each is trained)"""
    messages = [{"role": "system", "content": "the"}] if family.system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2)) if family.calls else 0):
            count = draw(st.integers(1, family.calls))
            beside = TEXTS | st.just("") if family.text_of_calls else st.just("")
            messages.append(answer(draw(beside), draw(thoughts(family)), count))
            messages += [tool(draw(TEXTS), number) for number in range(count)]
        messages.append(answer(draw(TEXTS), draw(thoughts(family))))
    flags = [draw(st.integers(0, 3)) > 0 and message["role"] == "assistant" for message in messages]
    return messages, [*flags[:-1], True]


def thoughts(family):
    return {"never": st.just(""), "always": THOUGHTS, "sometimes": st.just("") | THOUGHTS}[family.thinks]


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations_are_what_the_template_writes(name):
    """The text of every sequence is the beginning of the template's own, with at most a stop token after it; the
    prompt is that of the engine; trained are exactly the answers, as a model of the family samples them."""
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    family = FAMILIES[name]
    chat = family_format(name, legacy=False)
    encode = chat.encoder.whole

    @settings(derandomize=True, max_examples=25, deadline=None, database=None)
    @given(conversations(family))
    def check(drawn):
        messages, trained = drawn
        sequences = shown(chat, messages, trained=trained)
        said = [family.said(m) + family.stop(m) for m, one in zip(messages, trained, strict=True) if one]
        assert [run for _, runs in sequences for run in runs] == said
        written = [chat.text(messages[:n], generation_prompt=p) for n in range(1, len(messages) + 1) for p in (0, 1)]
        numbers = iter([number for number, one in enumerate(trained) if one])
        for (text, runs), (prompt, response, _) in zip(
            sequences, trained_sequences(chat, messages, trained=trained), strict=True
        ):
            first, *_ = [next(numbers) for _ in runs]
            begin = chat.text(messages[:first], generation_prompt=True)
            assert spelled(chat.tokenizer, prompt) == begin
            bare = text.removesuffix(next(stop for stop in (*family.stops, "<|im_end|>") if text.endswith(stop)))
            assert any(text == whole + runs[-1] for whole in written)
            if name != "harmony":  # which rewrites the prompt of an answer in the text that holds the answer
                assert any(whole.startswith(text) or whole == bare for whole in written)
            bounds, at = [], len(begin)
            for run in runs:
                bounds += [text.index(run, at), text.index(run, at) + len(run)]
                at = bounds[-1]
            if {len(text[:bound].encode()) for bound in bounds} <= set(ends(chat.tokenizer, encode(text))):
                assert [*prompt, *response] == encode(text)
            else:
                assert prompt == encode(begin) or len(runs) > 1

    check()


def test_a_template_that_ends_answers_with_none_of_the_models_stops():
    """Without a generation_config.json, GLM's answers end with what the template writes after them."""
    from skyrl_megatron.rollout.templates import ChatFormat

    tokenizer = family_tokenizer("glm")
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode(chat.stop_token_ids) == "<|endoftext|>"
    messages = [user("1+1=?"), answer("", calls=1), tool("4"), answer("2"), user("and?"), answer("4")]
    ((_, runs),) = shown(chat, messages)
    assert [text.rpartition("<|")[2] for text in runs] == ["observation|>", "user|>", "user|>"]


def test_text_around_thinking_that_a_template_drops_is_an_error():
    """As Qwen3's, which writes what is in the first pair of marks and after the last one."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if '</think>' in m.content %}"
        "{{ '<think>\\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') }}"
        "{{ '\\n</think>\\n\\n' }}{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = ChatFormat(family_tokenizer("qwen3"), template)
    ((_, runs),) = shown(chat, [user("q"), answer("<think>\nx\n</think>\n\nend")])
    assert runs == ["<think>\nx\n</think>\n\nend<|im_end|>"]
    for content, lost in (
        ("before<think>\nx\n</think>\n\nend", "before"),
        ("<think>a</think>middle</think>c", "middle"),
    ):
        with pytest.raises(DataError, match=f"message 1: the chat template does not write the text '{lost}'"):
            trained_sequences(chat, [user("q"), answer(content)])


def test_stop_ids_that_the_tokenizer_lacks_are_no_text():
    from skyrl_megatron.rollout.templates import ChatFormat

    tokenizer = family_tokenizer("qwen2.5")
    chat = ChatFormat(tokenizer, stop_token_ids=[tokenizer.eos_token_id, len(tokenizer) + 20])
    ((_, runs),) = shown(chat, [user("q"), answer("None of these")])
    assert runs == ["None of these<|im_end|>"]


@pytest.mark.parametrize("listed", [-1, [-1]])
def test_no_stop_token_is_written_as_minus_one(tmp_path, listed):
    from skyrl_megatron.data.tokenizer import load_tokenizer, stop_tokens_of

    family_tokenizer("qwen2.5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = load_tokenizer(tmp_path)
    assert stop_tokens_of(tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("listed", [258.0, 99999999999, {"a": 1}, ["<|im_end|>"]])
def test_a_stop_token_that_is_no_id_is_one_error(tmp_path, listed):
    from skyrl_megatron.data.tokenizer import load_tokenizer, stop_tokens_of
    from skyrl_megatron.errors import ModelLoadError

    family_tokenizer("qwen2.5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(ModelLoadError, match=r"eos_token_id|the stop tokens cannot be read"):
        stop_tokens_of(load_tokenizer(tmp_path))
