"""Every parser of thinking: a streamed answer of a later turn is the one that is not streamed."""

from __future__ import annotations

import json

import pytest

from skyrl_megatron_agents.answers import CHAT, events, messages_of
from tests.agents.test_gateway import post
from tests.agents.wires import TEMPLATE, Setting, make_wire, set_template, write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TOKENS = [
    "<think>", "</think>", "<seed:think>", "</seed:think>", "<mm:think>", "</mm:think>", "<response>", "</response>",
    "<tool_call>", "</tool_call>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<minimax:tool_call>",
    "</minimax:tool_call>", "｜DSML｜", "<|channel>", "<channel|>", "<|turn>", "<turn|>",
]  # fmt: skip
"""Special tokens of the families."""
WHOLE = "<think>Hidden.</think>"
OPENED = "Hidden.</think>"
FAMILIES = {
    "deepseek_r1": (WHOLE, OPENED),
    "deepseek_v4": (OPENED,),
    "ernie45": ("Hidden.\n</think>\n\n",),
    "glm45": (WHOLE, OPENED),
    "holo2": (WHOLE,),
    "kimi_k2": (WHOLE, OPENED),
    "ling3": (WHOLE,),
    "mimo": (WHOLE, OPENED),
    "minicpmv": (WHOLE,),
    "minimax_m2": (OPENED,),
    "minimax_m3": ("<mm:think>Hidden.</mm:think>",),
    "nemotron_v3": (WHOLE, OPENED),
    "qwen3": (WHOLE, OPENED),
    "seed_oss": ("<seed:think>Hidden.</seed:think>",),
    "step3": (OPENED,),
    "step3p5": (OPENED,),
    "hy_v4": (WHOLE,),
}
"""Parser → what its family samples before the text: with the beginning of thinking, or after a template that opens
it."""
QUICK = ("deepseek_r1", "deepseek_v4", "ernie45", "kimi_k2", "minimax_m2", "qwen3", "step3", "seed_oss")
CASES = [
    pytest.param(name, form, marks=() if name in QUICK else pytest.mark.full_matrix)
    for name, forms in FAMILIES.items()
    for form in forms
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(TOKENS)
    tokenizer.save_pretrained(folder)
    set_template(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(tokenizer)}))
    made = Setting(folder, tmp_path_factory.mktemp("log"))
    yield made
    made.close()


def answered(answer, stream):
    """Thinking, text and tool calls of an answer, as a client reads them."""
    content_type, body = answer.headers["content-type"], answer.content
    (message,) = messages_of(CHAT, content_type, body)
    if stream:
        deltas = [choice["delta"] for event in events(body) for choice in event.get("choices") or ()]
        thinking = "".join(delta.get("reasoning") or "" for delta in deltas)
    else:
        thinking = message.get("reasoning") or ""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return thinking.strip(), (message["content"] or "").strip(), calls


@pytest.mark.parametrize(("parser", "form"), CASES)
def test_streamed_thinking_of_later_turns_is_thinking(setting, tmp_path, parser, form):
    opens = "" if form.startswith("<") else "<think>\n"
    template = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", f"<|im_start|>assistant\n{opens}{{% endif %}}")
    wire = setting.loop(make_wire(setting.folder, reasoning_parser=parser, chat_template=template), 300)
    made = Setting(setting.folder, tmp_path / "log", wire, client=setting.client, loop=setting.loop)
    try:
        found = {}
        for stream in (False, True):
            trajectory = made.open()
            history = [{"role": "user", "content": "What ends thinking? </think>"}]  # of a user, not of the policy
            for turn in range(3):
                setting.client.say = [f"{form}Said {turn}.{CALL if turn else ''}"]
                body = {"model": "policy", "messages": history, "tools": [TOOL], "stream": stream}
                answer = post(trajectory, CHAT, body)
                assert answer.status_code == 200, answer.text
                thinking, text, calls = answered(answer, stream)
                found.setdefault(turn, []).append((thinking, text, calls))
                written = [{"name": name, "arguments": json.dumps(given)} for name, given in calls]
                said = [{"type": "function", "id": f"c{turn}", "function": each} for each in written]
                history += [{"role": "assistant", "content": text, **({"tool_calls": said} if said else {})}]
                history += [{"role": "user", "content": "More."}]
            assert [call.parent for call in trajectory.graph.calls] == [None, *trajectory.graph.calls[:2]]
        for turn, (whole, streamed) in found.items():
            assert whole == streamed == ("Hidden.", f"Said {turn}.", [("add", {"a": [1, 2]})] if turn else [])
    finally:
        made.close()


def test_all_parsers_that_vllm_has_can_be_loaded():
    """But those that need a package that vLLM itself does not require, which they name."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    missing = {}
    for manager, load in (
        (ReasoningParserManager, ReasoningParserManager.get_reasoning_parser),
        (ToolParserManager, ToolParserManager.get_tool_parser),
    ):
        names = manager.list_registered()
        assert len(names) > 30
        for name in names:
            try:
                load(name)
            except ImportError as error:
                missing[name] = str(error)
    assert all("cohere_melody" in why for why in missing.values()), missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reasoning_parser": "hf"}, "reasoning_parser=hf"),
        ({"reasoning_parser": "mistral"}, "reasoning_parser=mistral"),
        ({"reasoning_parser": "cohere_command3"}, "cohere_melody"),
        ({"reasoning_parser": "unknown"}, "use one of"),
        ({"tool_call_parser": "unknown"}, "use one of"),
    ],
)
def test_a_parser_that_does_not_fit_is_one_error(setting, options, words):
    from skyrl_megatron.errors import EngineError

    with pytest.raises(EngineError, match=words):
        setting.loop(make_wire(setting.folder, **options), 300)
