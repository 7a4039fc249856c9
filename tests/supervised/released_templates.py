"""Chat templates as public packages ship them, each with a tokenizer of its special tokens, and conversations.

The packages are in ``.venv-templates`` (``launch/requirements/templates.sh``). A tokenizer has one token for each byte
and each special token, so that no token reaches over the end of a message.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / ".venv-templates"
PACKAGES, TRL, LLAMA_CPP = FOLDER / "packages", FOLDER / "packages/trl/chat_templates", FOLDER / "llama.cpp"
SPECIAL = re.compile(
    r"<\|[A-Za-z_0-9]+\|>|<｜[^｜<>{}]+｜>|\[gMASK\]|<sop>|</?think>|</?tool_call>|</?tool_response>|</?arg_key>"
    r"|</?arg_value>|\]~!b\[|\]~b\]|\[e~\[|</?minimax:tool_call>|\[/?INST\]|\[TOOL_CALLS\]|</?s>"
    r"|\[/?AVAILABLE_TOOLS\]|\[/?TOOL_RESULTS\]"
)
CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
VISION = (
    "<tool_response>",
    "</tool_response>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
LLAMA = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|begin_of_text|>")
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
HARMONY = ("<|return|>", "<|call|>", "<|endoftext|>")
HY_PARTS = ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
HY = tuple(f"<{slash}{name}:opensource>" for name in HY_PARTS for slash in ("", "/"))
HY += ("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_pad:opensource｜>", "<｜hy_User:opensource｜>")
HY += ("<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>", "<tool_sep:opensource>")
DEEPSEEK = "<｜end▁of▁sentence｜>"
BEGINNINGS = ("<|begin_of_text|>", "<s>", "<｜begin▁of▁sentence｜>")


@dataclass(frozen=True)
class Released:
    """A template as it is released."""

    path: Path
    stops: tuple[str, ...]
    """``eos_token_id`` of the released generation_config.json; the first is the tokenizer's."""
    others: tuple[str, ...] = ()
    """Special tokens that the template does not spell."""
    renderer: str = ""
    """Class of the package ``renderers`` that configures its renderer of the family."""
    training: str = ""
    """The template of TRL that marks the answers of this one."""
    kwargs: dict[str, Any] = field(default_factory=dict)


RELEASED = {
    "qwen2.5": Released(TRL / "qwen2_5.jinja", CHATML[:2], training="qwen2_5_training"),
    "qwen3": Released(TRL / "qwen3.jinja", CHATML[:2], CHATML + VISION, "Qwen3RendererConfig", "qwen3_training"),
    "qwen3-2507": Released(TRL / "qwen3_instruct_2507.jinja", CHATML[:2], training="qwen3_instruct_2507_training"),
    "qwen3.5": Released(
        TRL / "qwen3_5_think.jinja", CHATML[:2], CHATML + VISION, "Qwen35RendererConfig", "qwen3_5_think_training"
    ),
    "qwen3.6": Released(
        TRL / "qwen3_6.jinja", CHATML[:2], CHATML + VISION, "Qwen36RendererConfig", "qwen3_6_training"
    ),
    "qwen3-coder": Released(LLAMA_CPP / "Qwen3-Coder.jinja", CHATML[:2]),
    "llama-3": Released(TRL / "llama3.jinja", LLAMA[:3], LLAMA, training="llama3_training"),
    "llama-3.1": Released(LLAMA_CPP / "meta-llama-Llama-3.1-8B-Instruct.jinja", LLAMA[:3], LLAMA),
    "mistral-nemo": Released(LLAMA_CPP / "mistralai-Mistral-Nemo-Instruct-2407.jinja", ("</s>",), BEGINNINGS),
    "deepseek-r1": Released(TRL / "deepseekv3.jinja", (DEEPSEEK,), BEGINNINGS, training="deepseekv3_training"),
    "deepseek-v3.1": Released(LLAMA_CPP / "deepseek-ai-DeepSeek-V3.1.jinja", (DEEPSEEK,), BEGINNINGS),
    "deepseek-v3.2": Released(LLAMA_CPP / "deepseek-ai-DeepSeek-V3.2.jinja", (DEEPSEEK,), BEGINNINGS),
    "deepseek-v3.2, thinking": Released(
        LLAMA_CPP / "deepseek-ai-DeepSeek-V3.2.jinja", (DEEPSEEK,), BEGINNINGS, kwargs={"enable_thinking": True}
    ),
    "mimo": Released(LLAMA_CPP / "MiMo-VL.jinja", CHATML[:2]),
    "glm-4.5": Released(
        TRL / "glm4moe.jinja", GLM, ("<think>", "</think>"), "GLM45RendererConfig", "glm4moe_training"
    ),
    "glm-4.6": Released(LLAMA_CPP / "GLM-4.6.jinja", GLM, ("<think>", "</think>")),
    "glm-4.7-flash": Released(LLAMA_CPP / "GLM-4.7-Flash.jinja", GLM, ("<think>", "</think>")),
    "glm-4.7-flash, no thinking": Released(
        LLAMA_CPP / "GLM-4.7-Flash.jinja", GLM, ("<think>", "</think>"), kwargs={"enable_thinking": False}
    ),
    "gpt-oss": Released(LLAMA_CPP / "openai-gpt-oss-120b.jinja", HARMONY, training="gptoss_training"),
    "kimi-k2": Released(LLAMA_CPP / "moonshotai-Kimi-K2.jinja", ("<|im_end|>",), (), "KimiK2RendererConfig"),
    "kimi-k2-thinking": Released(LLAMA_CPP / "Kimi-K2-Thinking.jinja", ("<|im_end|>",)),
    "minimax-m2": Released(LLAMA_CPP / "MiniMax-M2.jinja", ("[e~[",), (), "MiniMaxM2RendererConfig"),
    "hy3": Released(LLAMA_CPP / "tencent-Hy3.jinja", ("<｜hy_eos:opensource｜>",), HY, "Hy3RendererConfig"),
    "hy3, thinking": Released(
        LLAMA_CPP / "tencent-Hy3.jinja", ("<｜hy_eos:opensource｜>",), HY, kwargs={"reasoning_effort": "high"}
    ),
    "solar-open": Released(LLAMA_CPP / "upstage-Solar-Open-100B.jinja", ("<|end|>", "<|calls|>", "<|flush|>")),
    "phi-3.5": Released(TRL / "phi3_5.jinja", ("<|endoftext|>", "<|end|>", "<|assistant|>")),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(number: int = 0, city: str = "Oslo") -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"functions.weather:{number}", "type": "function", "function": function}


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"functions.weather:{number}", "name": "weather"}


SUM, MORE = user("1+1=?"), user("2+2=?")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "an answer": [{"role": "system", "content": "Be brief."}, SUM, answer("2")],
    "two answers": [SUM, answer("2"), MORE, answer("4")],
    "white space": [SUM, answer("  2\n"), MORE, answer("\n4")],
    "no text": [SUM, answer("")],
    "thinking": [SUM, answer("2", reasoning_content="one more than 1")],
    "thinking twice": [SUM, answer("2", reasoning_content="one more"), MORE, answer("4", reasoning_content="double")],
    "thinking, for harmony": [SUM, answer("2", thinking="one more"), MORE, answer("4", thinking="double")],
    "a call": [user("Oslo?"), answer("", tool_calls=[call()]), result("rain"), answer("It rains.")],
    "a call with text": [user("Oslo?"), answer("I look.", tool_calls=[call()]), result("rain"), answer("It rains.")],
    "a call with thinking": [
        user("Oslo?"),
        answer("", reasoning_content="look", tool_calls=[call()]),
        result("rain"),
        answer("It rains.", reasoning_content="so"),
    ],
    "a call with thinking, for harmony": [
        user("Oslo?"),
        answer("", thinking="look", tool_calls=[call()]),
        result("rain"),
        answer("It rains.", thinking="so"),
    ],
    "parallel calls": [
        user("Both?"),
        answer("", tool_calls=[call(), call(1, "Rome")]),
        result("rain"),
        result("sun", 1),
        answer("Done."),
    ],
    "a call, later a user": [
        user("Oslo?"),
        answer("", tool_calls=[call()]),
        result("rain"),
        answer("It rains."),
        user("Thanks"),
        answer("Welcome."),
    ],
}


def tokenizer_of(released: Released) -> Any:
    """Return a tokenizer of bytes and special tokens, with the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = released.path.read_text()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = dict.fromkeys([*released.stops, *released.others, *SPECIAL.findall(template)])
    begins = [name for name in BEGINNINGS if name in names and "bos_token" in template]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    special = {"eos_token": released.stops[0], "pad_token": released.stops[-1], "bos_token": (begins or [None])[0]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = template
    return tokenizer


def renderer_of(released: Released, tokenizer: Any) -> Any:
    """Return the renderer of the family in the package ``renderers``; None if it has none."""
    if not released.renderer:
        return None
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    from renderers import base, configs

    return base.create_renderer(tokenizer, getattr(configs, released.renderer)())
