"""Chat templates with the structure of model families, tokenizers of their special tokens, and what a model samples.

The templates are written for these tests: they keep how a family begins and ends messages, thinking and tool calls.
``said`` and ``stop`` of a family are the oracle, written by hand from the family's format, without a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family's format."""

    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    """First the tokenizer's end-of-sequence token, then those of ``generation_config.json``."""
    said: Callable[[dict[str, Any]], str]
    """What the model samples for a message, without the stop token."""
    stop: Callable[[dict[str, Any]], str]
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    calls: int = 2
    """The most tool calls of a message."""
    thinks: str = "sometimes"
    """Whether messages think: never, sometimes, always."""
    system: bool = True
    text_of_calls: bool = True
    """Whether the template writes the text of a message with tool calls."""
    spaces: bool = False
    """Whether the tokenizer is one of sentencepiece, which writes spaces as ``▁``."""


def arguments_of(call):
    return json.dumps(call["function"]["arguments"])


def joined(calls, form):
    return "".join(form.replace("NAME", c["function"]["name"]).replace("ARGS", arguments_of(c)) for c in calls or [])


def thought(message):
    return message.get("reasoning_content") or ""


CALL_LOOP = "{% for c in m.tool_calls or [] %}"
ARGS = "{{ c.function.arguments | tojson }}"
LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

GLM = (
    "[gMASK]<sop>" + LAST_USER + "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|assistant|>' }}"
    "{% if loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '\n<think>' + m.reasoning_content.strip() + '</think>' }}"
    "{% else %}{{ '\n<think></think>' }}{% endif %}"
    "{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    + CALL_LOOP
    + "{{ '\n<tool_call>' + c.function.name + '\n' }}"
    + ARGS
    + "{{ '\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def glm_said(m):
    text = f"\n<think>{thought(m).strip()}</think>"
    text += f"\n{m['content'].strip()}" if m["content"].strip() else ""
    return text + joined(m.get("tool_calls"), "\n<tool_call>NAME\nARGS\n</tool_call>")


HARMONY = (  # thinking is kept in the last answer, and in calls until a final answer follows
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set ns = namespace(final=false) %}"
    "{% for later in messages[loop.index:] %}{% if later.role == 'assistant' and not later.tool_calls %}"
    "{% set ns.final = true %}{% endif %}{% endfor %}"
    "{% if m.reasoning_content and not ns.final and (m.tool_calls or (loop.last and not add_generation_prompt)) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    "{{ '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}"
    + ARGS
    + "{{ '<|call|>' }}{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def harmony_said(m):
    text = f"<|channel|>analysis<|message|>{thought(m)}<|end|><|start|>assistant" if thought(m) else ""
    if m.get("tool_calls"):
        return text + joined(m["tool_calls"], " to=functions.NAME<|channel|>commentary json<|message|>ARGS")
    return f"{text}<|channel|>final<|message|>{m['content']}"


CHATML_CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
CHATML_TURNS = (
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_CALLS = (
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}' + ARGS + "{{ '}\n</tool_call>' }}"
)
QWEN25 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{% if m.content or not m.tool_calls %}{{ '\n' + m.content }}{% endif %}"
    + CALL_LOOP
    + "{{ '\n' }}"
    + CHATML_CALLS
    + "{% endfor %}{{ '<|im_end|>\n' }}"
    + CHATML_TURNS
)
QWEN3 = (
    LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% set t = m.reasoning_content or '' %}{% if loop.index0 > ns.last and (loop.last or t) %}"
    "{{ '<think>\n' + t.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    + CALL_LOOP
    + "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    + CHATML_CALLS
    + "{% endfor %}{{ '<|im_end|>\n' }}"
    + CHATML_TURNS
)


def qwen25_said(m):
    calls = joined(m.get("tool_calls"), "\n" + CHATML_CALL)
    return m["content"] + calls if m["content"] else calls[1:]


def qwen3_said(m):
    calls = joined(m.get("tool_calls"), "\n" + CHATML_CALL)
    text = f"<think>\n{thought(m).strip(chr(10))}\n</think>\n\n" + m["content"].lstrip("\n")
    return text + (calls if m["content"] else calls[1:])


MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}"
    '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}' + ARGS + "{{ '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama3_said(m):
    return joined(m.get("tool_calls"), '{"name": "NAME", "parameters": ARGS}') or m["content"].strip()


DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' if not ns.tool }}{% set ns.tool = true %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% else %}{% if not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}{% set ns.tool = false %}"
    "{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
    + CALL_LOOP
    + "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}"
    + ARGS
    + "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def deepseek_said(m):
    calls = joined(m.get("tool_calls"), "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>")
    return m["content"] + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


DEEPSEEK_V2 = (  # an answer begins with a space, which the generation prompt has not
    "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
KIMI = (
    "{% for m in messages %}{% set kind = 'system' if m.role == 'tool' else m.role %}"
    "{{ '<|im_' + kind + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}"
    + CALL_LOOP
    + "{{ '<|tool_call_begin|>' + c.function.name + '<|tool_call_argument_begin|>' }}"
    + ARGS
    + "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)


def kimi_said(m):
    calls = joined(m.get("tool_calls"), "<|tool_call_begin|>NAME<|tool_call_argument_begin|>ARGS<|tool_call_end|>")
    return m["content"] + (f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else "")


MINIMAX = (
    "]~!b[" + LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}{{ ']~b]ai\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content }}{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}"
    + CALL_LOOP
    + "{{ '<invoke name=\"' + c.function.name + '\">' }}"
    + ARGS
    + "{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}"
    "{{ '\n<response>' + m.content + '</response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\n' }}{% endif %}"
    "{% else %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)


def minimax_said(m):
    calls = joined(m.get("tool_calls"), '<invoke name="NAME">ARGS</invoke>\n')
    calls = f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    return f"{thought(m)}\n</think>\n\n{m['content']}{calls}"


HUNYUAN = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<hy_begin>' + m.content + '<hy_3>' }}"
    "{% elif m.role == 'assistant' %}{{ '<hy_assistant>' + m.content + '<hy_2>' }}"
    "{% else %}{{ '<hy_user>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<hy_assistant>' }}{% endif %}"
)
HUNYUAN_3 = (  # an answer is ended only before a message that follows it
    "<hy_begin>{% for m in messages %}{% if m.role == 'assistant' %}{{ '<hy_assistant>' + m.content }}"
    "{{ '<hy_end>' if not loop.last }}{% else %}{{ '<hy_' + ('3' if m.role == 'system' else 'user') + '>' }}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<hy_assistant>' }}{% endif %}"
)


def content(m):
    return str(m["content"])


def always(token):
    return lambda m: token


def glm_stop(m):
    return "<|observation|>" if m.get("tool_calls") else "<|user|>"


def harmony_stop(m):
    return "<|call|>" if m.get("tool_calls") else "<|return|>"


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK_TOKENS = tuple(
    f"<｜{name}｜>"
    for name in (
        "end▁of▁sentence begin▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin"
        " tool▁call▁end tool▁sep tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end"
    ).split()
)
FAMILIES = {
    "glm": Family(
        GLM,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        glm_said,
        glm_stop,
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "harmony": Family(
        HARMONY,
        ("<|return|>", "<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        harmony_said,
        harmony_stop,
        calls=1,
        text_of_calls=False,
    ),
    "qwen2.5": Family(
        QWEN25, CHATML, ("<|im_end|>", "<|endoftext|>"), qwen25_said, always("<|im_end|>"), thinks="never"
    ),
    "qwen2.5 base": Family(QWEN25, CHATML, ("<|endoftext|>",), qwen25_said, always("<|im_end|>"), thinks="never"),
    "qwen3": Family(
        QWEN3,
        CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        qwen3_said,
        always("<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>"),
        ("</s>",),
        lambda m: f" {m['content']}",
        always("</s>"),
        calls=0,
        thinks="never",
        system=False,
        spaces=True,
    ),
    "llama3": Family(
        LLAMA3,
        tuple("<|end_of_text|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>".split()),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        llama3_said,
        always("<|eot_id|>"),
        calls=1,
        text_of_calls=False,
        thinks="never",
    ),
    "deepseek": Family(
        DEEPSEEK,
        DEEPSEEK_TOKENS,
        DEEPSEEK_TOKENS[:1],
        deepseek_said,
        always(DEEPSEEK_TOKENS[0]),
        thinks="never",
    ),
    "deepseek v2": Family(
        DEEPSEEK_V2,
        DEEPSEEK_TOKENS[:2],
        DEEPSEEK_TOKENS[:1],
        lambda m: f" {m['content']}",
        always(DEEPSEEK_TOKENS[0]),
        calls=0,
        thinks="never",
    ),
    "kimi": Family(
        KIMI,
        tuple(
            "[EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>"
            " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>".split()
        ),
        ("[EOS]", "<|im_end|>"),
        kimi_said,
        always("<|im_end|>"),
        thinks="never",
    ),
    "minimax": Family(
        MINIMAX,
        ("[e~[", "]~b]", "]~!b["),
        ("[e~[",),
        minimax_said,
        always("[e~["),
        ("<think>", "</think>"),
        thinks="always",
    ),
    "hunyuan": Family(
        HUNYUAN,
        ("<hy_eos>", "<hy_begin>", "<hy_2>", "<hy_3>", "<hy_user>", "<hy_assistant>"),
        ("<hy_eos>", "<hy_2>"),
        content,
        always("<hy_2>"),
        calls=0,
        thinks="never",
    ),
    "hunyuan 3": Family(
        HUNYUAN_3,
        ("<hy_end>", "<hy_begin>", "<hy_3>", "<hy_user>", "<hy_assistant>"),
        ("<hy_end>",),
        content,
        always("<hy_end>"),
        calls=0,
        thinks="never",
    ),
}


@cache
def _bytes() -> str:
    """A byte-level tokenizer in which line breaks join, as in Qwen and Llama-3, also over the ends of messages."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?[^\s]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        [f"user\n\n the answer\n is {a}   of\n\n\n{b}." for a in range(9) for b in "ab"], trainer
    )
    return tokenizer.to_str()


@cache
def _pieces(legacy: bool) -> str:
    """A tokenizer of sentencepiece, which joins a space and what follows it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = [chr(n) for n in range(33, 127)]
    joined_ = [("▁", letter) for letter in (*letters, "▁")] + [("t", "h"), ("th", "e"), ("▁", "the"), ("4", "4")]
    vocabulary = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *letters, *(a + b for a, b in joined_)]
    numbers = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=joined_, byte_fallback=True, unk_token="<unk>"))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str()


@cache
def family_tokenizer(name: str, *, legacy: bool = True):
    """A small tokenizer with the special tokens and the template of a family. ``legacy``: of sentencepiece tokenizers,
    whether a space is also put before the text after a special token."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    inner = Tokenizer.from_str(_pieces(legacy) if family.spaces else _bytes())
    if name in ("llama3", "deepseek v2"):
        inner.post_processor = processors.ByteLevel(trim_offsets=True)  # the spans of tokens leave their spaces out
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=family.stops[0],
        pad_token=family.specials[-1],
        additional_special_tokens=list(family.specials),
    )
    made.chat_template = family.template
    return made


def family_format(name: str, **options: Any):
    """The chat format of a family, with the stop tokens of its generation_config.json."""
    from skyrl_megatron.rollout.templates import ChatFormat

    tokenizer = family_tokenizer(name, **options)
    return ChatFormat(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(FAMILIES[name].stops)))


def spelled(tokenizer, ids):
    """The text of tokens, with every space that is in them."""
    if tokenizer.eos_token != "</s>":
        return tokenizer.decode(ids)
    names = tokenizer.convert_ids_to_tokens(ids)
    parts = [bytes([int(n[3:5], 16)]) if n.startswith("<0x") else n.replace("▁", " ").encode() for n in names]
    return b"".join(parts).decode()
