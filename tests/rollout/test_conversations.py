"""Tokens and masks of multi-turn trajectories, compared with the chat template applied to the same conversation."""

import numpy as np
import pytest

from tests.rollout.scripted import Log, ScriptedEngine, generation, generator_of, run, say, tokenizer_of

QUESTION = [{"role": "user", "content": "What is 7 + 8?"}]
ANSWERS = ["the answer is 14", "It is 16.", "#### 15"]
REPLIES = ["wrong, try again.", "the answer is wrong"]
STEPS = [say(REPLIES[0], 0.25), say(REPLIES[1], -0.5), say(reward=1.0, done=True)]


def conversation(answers, replies=REPLIES):
    messages = list(QUESTION)
    for answer, reply in zip(answers, [*replies, None], strict=False):
        messages.append({"role": "assistant", "content": answer})
        if reply:
            messages.append({"role": "user", "content": reply})
    return messages


def expected(tokenizer, messages, answers, template=None):
    """(ids, mask) of a rendered conversation up to the last end token, tokenized as one text. The mask is 1 on tokens
    inside an answer or its end token, by their place in the text."""
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    text = text[: text.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)]
    spans, at = [], 0
    for answer in answers:
        at = text.index(answer + tokenizer.eos_token, at)
        spans.append((at, at + len(answer) + len(tokenizer.eos_token)))
        at = spans[-1][1]
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start < end <= b for a, b in spans)) for start, end in whole["offset_mapping"]]
    return whole["input_ids"], mask


def script(tokenizer, answers):
    return [generation([*tokenizer.encode(a, add_special_tokens=False), tokenizer.eos_token_id]) for a in answers]


def row(output, index=0):
    ids = np.concatenate([output["prompt_token_ids"][index], output["response_ids"][index]]).tolist()
    mask = [0] * len(output["prompt_token_ids"][index]) + output["loss_masks"][index].tolist()
    return ids, mask


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral"])
def test_a_trajectory_is_the_templates_conversation(style):
    tokenizer = tokenizer_of(style)
    engine = ScriptedEngine(script(tokenizer, ANSWERS))
    output = run(generator_of(style, engine), QUESTION, STEPS)

    ids, mask = row(output)
    assert (ids, mask) == expected(tokenizer, conversation(ANSWERS), ANSWERS)
    for turn, prompt in enumerate(engine.prompts["0_0"]):
        messages = conversation(ANSWERS[:turn], REPLIES[:turn])
        assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    # Rewards stand on the last token of their turn, log-probs on sampled tokens.
    ends = [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
    offset = len(ids) - len(output["response_ids"][0])
    assert [output["rewards"][0][end - offset] for end in ends] == [0.25, -0.5, 1.0]
    assert sum(map(abs, output["rewards"][0])) == 1.75
    sampled = np.flatnonzero(mask[offset:])
    assert output["rollout_logprobs"][0][sampled].tolist() == [x for g in engine.script for x in g.logprobs]
    assert not output["rollout_logprobs"][0][[i for i, m in enumerate(mask[offset:]) if not m]].any()
    assert output["stop_reasons"] == ["stop"]


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral", "qwen3"])
def test_sampled_ids_are_never_tokenized_again(style):
    """Byte by byte, tokens that the tokenizer itself would never choose: they stay; all others are as before."""
    tokenizer = tokenizer_of(style)
    canonical = script(tokenizer, ANSWERS)
    odd = [
        generation([t for c in a for t in tokenizer.encode(c, add_special_tokens=False)] + [tokenizer.eos_token_id])
        for a in ANSWERS
    ]
    assert all(len(a.token_ids) > len(b.token_ids) for a, b in zip(odd, canonical, strict=True))
    assert [tokenizer.decode(g.token_ids[:-1]) for g in odd] == ANSWERS
    ids, mask = row(run(generator_of(style, ScriptedEngine(odd)), QUESTION, STEPS))
    plain, plain_mask = row(run(generator_of(style, ScriptedEngine(canonical)), QUESTION, STEPS))
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [t for g in odd for t in g.token_ids]
    others = [i for i, m in zip(plain, plain_mask, strict=True) if not m]
    assert [i for i, m in zip(ids, mask, strict=True) if not m] == others
    assert tokenizer.decode(ids) == tokenizer.decode(plain)


THOUGHTS = [f"<think>\nstep {i}\n</think>\n\n{answer}" for i, answer in enumerate(ANSWERS)]
KEEPS_THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def test_thinking_that_was_sampled_stays_in_one_sequence():
    """The template would drop earlier thinking; the policy went on from it, so it stays."""
    tokenizer = tokenizer_of("qwen3")
    output = run(generator_of("qwen3", ScriptedEngine(script(tokenizer, THOUGHTS))), QUESTION, STEPS)
    assert row(output) == expected(tokenizer, conversation(THOUGHTS), THOUGHTS, KEEPS_THINKING)


def test_stepwise_rows_are_the_templates_conversations():
    """Each turn starts from the template's own rendering, which drops earlier thinking."""
    tokenizer = tokenizer_of("qwen3")
    engine = ScriptedEngine(script(tokenizer, THOUGHTS))
    output = run(generator_of("qwen3", engine, step_wise_trajectories=True), QUESTION, STEPS)
    assert len(output["response_ids"]) == 3 and output["is_last_step"] == [False, False, True]
    for turn in range(3):
        messages = conversation(THOUGHTS[: turn + 1], REPLIES[:turn])
        ids, mask = row(output, turn)
        assert (ids, mask) == expected(tokenizer, messages, THOUGHTS[turn : turn + 1])
        assert "step 0" not in tokenizer.decode(ids) or turn == 0
        assert output["rewards"][turn] == [0.0] * (len(output["response_ids"][turn]) - 1) + [STEPS[turn]["reward"]]
        assert output["rollout_logprobs"][turn].tolist() == engine.script[turn].logprobs
    assert len({id.to_string() for id in output["trajectory_ids"]}) == 1


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral"])
def test_stepwise_rows_that_continue_each_other_join_to_one(style):
    """Where the template drops nothing, joined step-wise rows are the row of the ordinary way."""
    tokenizer = tokenizer_of(style)
    whole = run(generator_of(style, ScriptedEngine(script(tokenizer, ANSWERS))), QUESTION, STEPS)
    engine = ScriptedEngine(script(tokenizer, ANSWERS))
    settings = {"step_wise_trajectories": True, "merge_stepwise_output": True}
    joined = run(generator_of(style, engine, **settings), QUESTION, STEPS)
    assert row(joined) == row(whole)
    assert joined["rewards"] == whole["rewards"] and joined["is_last_step"] == [True]
    assert joined["rollout_logprobs"][0].tolist() == whole["rollout_logprobs"][0].tolist()
    # Dropped thinking breaks the continuation: nothing is joined.
    engine = ScriptedEngine(script(tokenizer_of("qwen3"), THOUGHTS))
    assert len(run(generator_of("qwen3", engine, **settings), QUESTION, STEPS)["response_ids"]) == 3


@pytest.mark.parametrize("name", ["qwen3_without_thinking", "qwen3_with_thinking"])
def test_templates_that_mark_answers_tokenize_anew(name, tmp_path):
    from skyrl_megatron.rollout.templates import BUILT_IN

    tokenizer = tokenizer_of("qwen3")
    if name == "qwen3_with_thinking":  # from a file
        (tmp_path / "chat.jinja").write_text(BUILT_IN[name])
        template = {"source": "file", "name_or_path": str(tmp_path / "chat.jinja")}
    else:
        template = {"name_or_path": name}
    engine = ScriptedEngine(script(tokenizer, THOUGHTS))
    settings = {"chat_template": template, "sampling_params": {"logprobs": None}}
    output = run(generator_of("qwen3", engine, **settings), QUESTION, STEPS)

    kept = [*ANSWERS[:2], THOUGHTS[2]] if name == "qwen3_without_thinking" else THOUGHTS
    ids, mask = expected(tokenizer, conversation(kept), kept, KEEPS_THINKING)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert row(output) == (ids + newline, [*mask, 0])
    if name == "qwen3_without_thinking":  # the same text as the model's own template, which has no marks
        assert tokenizer.decode(ids + newline) == tokenizer.apply_chat_template(conversation(THOUGHTS), tokenize=False)
    assert output["rollout_logprobs"] is None
    rewards = output["rewards"][0]
    assert [r for r in rewards if r] == [0.25, -0.5, 1.0] and all(
        output["loss_masks"][0][i] for i, r in enumerate(rewards) if r
    )


def test_arguments_reach_the_template():
    from copy import copy

    tokenizer = copy(tokenizer_of("chatml"))
    empty = "{% if add_generation_prompt and no_think %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template + empty
    engine = ScriptedEngine(script(tokenizer, ANSWERS[:2]))
    steps = [say(REPLIES[0]), say(done=True)]
    settings = {"tokenizer": tokenizer, "chat_template_kwargs": {"no_think": True}}
    run(generator_of("chatml", engine, **settings), QUESTION, steps)
    assert all(tokenizer.decode(p).endswith("<think>\n\n</think>\n\n") for p in engine.prompts["0_0"])


# ------------------------------------------------------- all turns in one assistant message
def one_message(turns, observations, **config):
    """(output, prompts) with turns of ``(ids, finish)``; observations are texts between them."""
    engine = ScriptedEngine([generation(ids, finish) for ids, finish in turns])
    steps = [say(text, reward=0.3) for text in observations] + [say(reward=1.7, done=True)]
    settings = {"use_conversation_multi_turn": False, **config}
    return run(generator_of("chatml", engine, **settings), QUESTION, steps), engine.prompts["0_0"]


def test_only_end_tokens_inside_a_message_are_removed():
    tokenizer = tokenizer_of("chatml")
    end, text = tokenizer.eos_token_id, tokenizer.encode("wrong", add_special_tokens=False)
    output, prompts = one_message([([300, 301, end], "stop"), ([302, end], "stop")], ["wrong"])
    assert prompts[1] == [*prompts[0], 300, 301, *text]
    assert output["response_ids"][0].tolist() == [300, 301, *text, 302, end]
    assert output["loss_masks"][0].tolist() == [1, 1, *[0] * len(text), 1, 1]
    assert output["rollout_logprobs"][0].tolist() == [-1, -2, *[0] * len(text), -1, -2]
    assert output["rewards"][0] == [0, 0.3, *[0] * len(text), 0, 1.7]


@pytest.mark.parametrize(
    "ids, finish, response, mask",
    [
        ([300], "stop", [300, "end"], [1, 0]),  # ended by a stop string: the end token was not sampled
        ([300], "length", [300], [1]),
        (["end"], "stop", ["end"], [1]),
        ([], "length", ["end"], [0]),  # no row is empty
        ([], "stop", ["end"], [0]),
    ],
)
def test_end_of_the_last_turn_in_one_message(ids, finish, response, mask):
    end = tokenizer_of("chatml").eos_token_id
    put = [end if i == "end" else i for i in ids]
    output, _ = one_message([(put, finish)], [])
    assert output["response_ids"][0].tolist() == [end if i == "end" else i for i in response]
    assert output["loss_masks"][0].tolist() == mask
    assert output["rewards"][0][-1] == 1.7 and output["stop_reasons"] == [finish]


def test_context_limit_in_one_message_restores_no_end_token():
    tokenizer = tokenizer_of("chatml")
    length = len(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"])
    turns = [([300, tokenizer.eos_token_id], "stop")] * 2
    output, prompts = one_message(turns, ["wrong"], max_input_length=length + 1)
    assert len(prompts) == 1 and output["response_ids"][0].tolist() == [300]
    assert output["rewards"] == [[0.3]] and output["stop_reasons"] == ["length"]


# ------------------------------------------------------- where turns end
BETWEEN = "\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n"


def turn_after(ids, finish="stop", *, second=(300,), **config):
    """(second prompt, output) where the first turn is ``ids``."""
    tokenizer = tokenizer_of("chatml")
    engine = ScriptedEngine([generation(ids, finish), generation([*second, tokenizer.eos_token_id])])
    output = run(generator_of("chatml", engine, **config), QUESTION, [say("wrong", 0.5), say(reward=1.0, done=True)])
    return engine.prompts["0_0"], output


@pytest.mark.parametrize("append", [True, False])
def test_end_token_after_a_stop_string(append):
    """The engine ends in the middle of a token that reaches beyond the stop string; the environment reads up to it."""
    tokenizer = tokenizer_of("chatml")
    ids = tokenizer.encode("a </search>\n", add_special_tokens=False)
    engine = ScriptedEngine([generation(ids), generation(ids)])
    config = {
        "sampling_params": {"stop": ["</search>", "</answer>"]},
        "append_eos_token_after_stop_str_in_multi_turn": append,
    }
    log = Log()
    steps = [say("wrong", 0.5), say(reward=1.0, done=True)]
    output = run(generator_of("chatml", engine, **config), QUESTION, steps, extras={"log": log})
    assert log == ["a </search>", "a </search>", "closed"]
    first, second = engine.prompts["0_0"]
    between = tokenizer.encode(
        "\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    end = [tokenizer.eos_token_id] if append else []
    assert second == first + ids + end + between
    assert output["response_ids"][0].tolist() == ids + end + between + ids + end
    ones, zeros = [1] * len(ids), [0] * (len(end) + len(between))
    assert output["loss_masks"][0].tolist() == ones + zeros + ones + [0] * len(end)
    assert output["rewards"][0][len(ids + end) - 1] == 0.5 and output["rewards"][0][-1] == 1.0
    assert engine.sampling[0]["stop"] == ["</search>", "</answer>"]


def test_a_turn_that_was_cut_off_gets_its_end_token_unsampled():
    """Otherwise the next message would stand in the middle of an answer."""
    tokenizer = tokenizer_of("chatml")
    prompts, output = turn_after([300, 301], "length")
    added = tokenizer.encode("<|im_end|>" + BETWEEN, add_special_tokens=False)
    assert prompts[1] == [*prompts[0], 300, 301, *added]
    assert output["loss_masks"][0].tolist() == [1, 1, *[0] * len(added), 1, 1]
    assert output["rewards"][0][1] == 0.5


def test_without_an_observation_only_the_next_answer_begins():
    tokenizer = tokenizer_of("chatml")
    end = tokenizer.eos_token_id
    engine = ScriptedEngine([generation([300, end]), generation([301, end])])
    run(generator_of("chatml", engine), QUESTION, [say(), say(done=True)])
    first, second = engine.prompts["0_0"]
    assert tokenizer.decode(second) == tokenizer.decode([*first, 300, end]) + "\n<|im_start|>assistant\n"


def test_text_that_the_environment_rewrites_is_not_trained_on():
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.rollout import episode

    tokenizer = tokenizer_of("chatml")
    engine = ScriptedEngine([generation([300, tokenizer.eos_token_id]), generation([301, tokenizer.eos_token_id])])
    steps = [say("wrong", 0.5, postprocessed_action="try again"), say(reward=1.0, done=True)]
    episode._warned.discard("talking")
    with pytest.warns(SkyRLMegatronWarning, match="rewrites the policy's text"):
        output = run(generator_of("chatml", engine), QUESTION, steps)
    rewritten = tokenizer.encode("try again", add_special_tokens=False)
    response, mask = output["response_ids"][0].tolist(), output["loss_masks"][0].tolist()
    assert response[: len(rewritten)] == rewritten and 300 not in response
    assert mask == [0] * (len(mask) - 2) + [1, 1] and output["rewards"][0][len(rewritten) - 1] == 0.5
    assert output["rollout_logprobs"][0].tolist()[:-2] == [0.0] * (len(mask) - 2)


@pytest.mark.parametrize("left_out", [False, True])
def test_versions_and_routes_are_carried_through(left_out):
    """Routes of a token are those of the turn that computed it first; the last sampled one was not computed. Engines
    are asked for none that an earlier turn brought, and may leave these out."""
    tokenizer = tokenizer_of("chatml")
    end = tokenizer.eos_token_id
    p = len(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"])
    gap = len(
        tokenizer.encode("\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    )
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, (p + 2, 3, 2), dtype=np.uint8)  # prompt + 3 sampled − 1
    second = rng.integers(0, 8, (p + 3 + gap + 1, 3, 2), dtype=np.uint8)  # + 2 sampled − 1
    script = [
        generation([300, 301, end], versions=[("4", 0, 3)], routes=first),
        generation([302, end], versions=[("4", 0, 1), ("5", 1, 2)], routes=second[p + 2 :] if left_out else second),
    ]
    engine = ScriptedEngine(script)
    output = run(generator_of("chatml", engine), QUESTION, [say("wrong"), say(done=True)])
    assert [keys.get("routed_experts_prompt_start") for keys in engine.sampling] == [None, p + 2]
    assert output["rollout_versions"] == [[("4", 0, 3), ("4", 3 + gap, 4 + gap), ("5", 4 + gap, 5 + gap)]]
    routes = output["rollout_expert_indices"][0]
    assert routes.shape == (p + 4 + gap, 3, 2) and routes.dtype == np.uint8
    np.testing.assert_array_equal(routes[: p + 2], first)
    np.testing.assert_array_equal(routes[p + 2 :], second[p + 2 :])


# ------------------------------------------------------- families whose answers end in several ways
SAID = "4"
NEXT = {
    # (family, sampled stop token or None, role of the next message): the text between the answer and the message
    ("glm", "<|user|>", "user"): "<|user|>\n",
    ("glm", "<|observation|>", "tool"): "<|observation|>\n<tool_response>\n",
    ("glm", "<|observation|>", "user"): "<|observation|><|user|>\n",
    ("glm", "<|endoftext|>", "user"): "<|endoftext|><|user|>\n",
    ("harmony", "<|return|>", "user"): "<|return|><|start|>user<|message|>",
    ("harmony", "<|call|>", "tool"): "<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>",
    ("qwen2.5", "<|im_end|>", "tool"): "<|im_end|>\n<|im_start|>user\n<tool_response>\n",
    ("qwen2.5", "<|endoftext|>", "user"): "<|endoftext|>\n<|im_start|>user\n",
    ("qwen2.5 base", "<|im_end|>", "user"): "<|im_end|>\n<|im_start|>user\n",
    ("mistral", "</s>", "user"): "</s>[INST] ",
    ("llama3", "<|eom_id|>", "tool"): "<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n",
    (
        "deepseek",
        "<｜end▁of▁sentence｜>",
        "tool",
    ): "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>",
    ("kimi", "<|im_end|>", "user"): "<|im_end|><|im_user|>user<|im_middle|>",
    ("minimax", "[e~[", "tool"): "[e~[\n]~b]tool\n<response>",
    ("hunyuan", "<hy_2>", "user"): "<hy_2><hy_user>",
    ("hunyuan 3", "<hy_end>", "user"): "<hy_end><hy_user>",
}
CUT = {  # no stop token was sampled, so that of the template follows, unsampled
    ("glm", "user"): "<|user|>\n",
    ("glm", "tool"): "<|observation|>\n<tool_response>\n",
    ("harmony", "user"): "<|end|><|start|>user<|message|>",
    ("qwen2.5", "user"): "<|im_end|>\n<|im_start|>user\n",
    ("hunyuan 3", "user"): "<hy_end><hy_user>",
}


def next_turn(name, sampled_stop, role, *, at_stop_string, kind="ChatConversation", **options):
    """(format, prompt of the second turn, row of two turns) of a conversation of a family."""
    from skyrl_megatron.rollout import conversation as conversations
    from tests.support.chat_families import family_format

    chat = family_format(name, legacy=False)
    talk = getattr(conversations, kind)(chat, [{"role": "user", "content": "the"}], **options)
    ids = chat.encoder.continued(SAID)
    ids += [chat.tokenizer.convert_tokens_to_ids(sampled_stop)] if sampled_stop else []
    talk.add_turn(generation(ids), SAID + (sampled_stop or ""), 0.5, at_stop_string=at_stop_string)
    message = {"role": role, "content": "of", "tool_call_id": "f:0"}
    talk.add_observations([message], at_stop_string=at_stop_string)
    prompt = list(talk.next_prompt())
    talk.add_turn(generation([0]), "", 1.0, at_stop_string=False)
    return chat, prompt, talk.sequences("stop")[-1]


@pytest.mark.parametrize("name, stop, role", NEXT)
def test_a_sampled_stop_token_is_not_written_again(name, stop, role):
    from tests.support.chat_families import spelled

    chat, prompt, row = next_turn(name, stop, role, at_stop_string=False)
    assert SAID + NEXT[name, stop, role] + "of" in spelled(chat.tokenizer, prompt)
    sampled = len(chat.encoder.continued(SAID)) + 1
    assert row.loss_mask.tolist() == [1] * sampled + [0] * (len(row.loss_mask) - sampled - 1) + [1]
    assert row.reward[sampled - 1] == 0.5


def test_what_was_sampled_is_left_out_of_what_follows():
    """Also several tokens: Cohere's answers end with two, at the second of which the model stops."""
    from skyrl_megatron.data.encoding import after_stop

    assert after_stop([1, 2, 3], [9, 1, 2], None) == after_stop([1, 2, 3], [9, 1, 2], 1) == [3]
    assert after_stop([2, 3], [9, 2, 2], None) == [3]
    assert after_stop([5, 6], [9, 1], 5) == [6], "the closing token, of which the stop token takes the place"
    assert after_stop([5, 6], [9, 1], None) == after_stop([5, 6], [5, 1], 6) == [5, 6]
    assert after_stop([], [1], None) == []


@pytest.mark.parametrize("role, stop", [("user", "<|user|>"), ("tool", "<|observation|>")])
def test_a_stop_token_that_only_the_run_names_is_not_written_again(role, stop):
    """The model folder has no generation_config.json; the engine stops there by ``stop_token_ids`` of the request."""
    from skyrl_megatron.rollout.conversation import ChatConversation
    from skyrl_megatron.rollout.templates import ChatFormat
    from tests.support.chat_families import family_tokenizer

    chat = ChatFormat(family_tokenizer("glm"))
    talk = ChatConversation(chat, [{"role": "user", "content": "the"}])
    talk.add_turn(generation(chat.encoder.whole(SAID + stop)), SAID, 0.5, at_stop_string=False)
    talk.add_observations([{"role": role, "content": "of"}], at_stop_string=False)
    assert SAID + NEXT["glm", stop, role] + "of" in chat.tokenizer.decode(talk.next_prompt())


@pytest.mark.parametrize("at_stop_string, append", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name, role", CUT)
def test_a_turn_without_a_stop_token_gets_that_of_the_next_message(name, role, at_stop_string, append):
    """Without the option, a token that only closes the answer is left out; one that begins the message stays."""
    from tests.support.chat_families import spelled

    options = {"at_stop_string": at_stop_string, "append_end_token": append}
    chat, prompt, row = next_turn(name, None, role, **options)
    between = CUT[name, role]
    if not append and name != "glm":
        between = between[between.index(">") + 1 :]
    assert SAID + between + "of" in spelled(chat.tokenizer, prompt)
    assert row.loss_mask.sum() == len(chat.encoder.continued(SAID)) + 1


@pytest.mark.parametrize("kind", ["StepwiseConversation", "OneMessageConversation"])
def test_stop_tokens_of_the_other_forms(kind):
    """A text that holds its stop token is a message without it; in one message none stays between turns."""
    chat, prompt, _ = next_turn("glm", "<|observation|>", "tool", at_stop_string=False, kind=kind)
    text = chat.tokenizer.decode(prompt)
    if kind == "StepwiseConversation":
        assert text.endswith("4<|observation|>\n<tool_response>\nof\n</tool_response><|assistant|>")
    else:
        assert text.endswith("<|assistant|>4of")


@pytest.mark.parametrize("legacy", [True, False])
def test_texts_between_turns_continue_the_sequence(legacy):
    """No space before them by a tokenizer that puts one before each text."""
    from tests.support.chat_families import family_format, spelled

    chat = family_format("mistral", legacy=legacy)
    messages = [{"role": "user", "content": text} for text in ("4", " of", "the")]
    assert spelled(chat.tokenizer, chat.observation(messages)) == "4 ofthe"
    first, answer = {"role": "user", "content": "4"}, {"role": "assistant", "content": "4"}
    after = chat.after_answer([first])
    assert chat.prompt([first, answer, first])[-len(after) :] == after and len(after) > 5


def test_an_observation_that_the_template_leaves_out_is_an_error():
    """It would be an empty turn, and the policy would answer to nothing."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from tests.support.chat_families import family_tokenizer

    plain = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatFormat(family_tokenizer("qwen2.5"), plain)
    assert "4" in chat.tokenizer.decode(chat.after_answer([{"role": "user", "content": "4"}]))
    with pytest.raises(DataError, match="leaves out an observation of the role 'tool'"):
        chat.after_answer([{"role": "tool", "content": "4"}])
