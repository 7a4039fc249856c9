"""A gateway on vLLM's serving code and a tokenizer with tools, whose engine plays back scripted answers.

The engine is a fake on purpose: it answers with tool calls, which a tiny model never writes, and it knows what it
sampled. A real engine is in test_gateway_engine.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ (message.content or '').split('</think>')[-1] }}"
    "{% else %}{{ message.content or '' }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tools; earlier answers lose their thinking, as in the templates of reasoning models."""
NAMES = ("add", "look_up")


def write_folder(folder: Path) -> Path:
    """A model folder without weights: configuration, tokenizer, the template above."""
    from transformers import AutoConfig, AutoTokenizer

    from tests.support.tiny_models import _SIZES, TINY, write_tokenizer

    sizes = {
        **_SIZES,
        **TINY["qwen3"],
        "vocab_size": 600,
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 8192,
    }
    AutoConfig.for_model("qwen3", **sizes).save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    set_template(folder)
    return folder


def set_template(folder: Path) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))


class Scripted:
    """A sampling client. ``say``: texts of the next answers; random ones when it is empty."""

    def __init__(self, tokenizer, seed: int = 0) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.say: list[str] = []
        self.sampled: list[tuple[list[int], list[int], dict]] = []
        """Prompt, continuation, sampling parameters of each."""
        self.delay = 0.0
        self.fail: Exception | None = None
        self.lost: set[str] = set()
        """Sessions for which no engine is left."""

    async def generate(self, prompts, sampling, sessions=None, adapters=None):
        from skyrl_megatron.errors import EngineError

        await asyncio.sleep(self.delay)
        if self.fail is not None:
            raise self.fail
        if sessions and self.lost & set(sessions):
            raise EngineError("none left")
        each = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling
        return [self._one(list(prompt), dict(keys)) for prompt, keys in zip(prompts, each, strict=True)]

    def _one(self, prompt, keys):
        from skyrl_megatron.inference.protocol import Generation

        text = self.say.pop(0) if self.say else random_answer(self.rng)
        ids = [*self.tokens_of(text), self.tokenizer.eos_token_id]
        reason = "stop"
        if (limit := keys.get("max_tokens")) is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        logprobs = [-self.rng.random() for _ in ids]
        self.sampled.append((prompt, ids, keys))
        return Generation(ids, logprobs, reason, [("3", 0, len(ids))])

    def tokens_of(self, text):
        """Token ids that are not those the tokenizer would choose: the first ones are single bytes."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        at, added = self.rng.randrange(len(ids) + 1), self.tokenizer.get_added_vocab().values()
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        split = [
            [id] if id in added else self.tokenizer.convert_tokens_to_ids(list(piece))
            for id, piece in zip(ids, pieces, strict=True)
        ]
        return [*(token for each in split[:at] for token in each), *ids[at:]]


def random_answer(rng):
    text = f"<think>{rng.choice(['hm', 'well, so'])}</think>" if rng.random() < 0.4 else ""
    text += rng.choice(["It is 7.", "What is 3 + 4? It is 7.", "", "a  b\n c "])
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        arguments = {"a": rng.randrange(99), "b": [rng.choice(["x", "ü"]), {"d": 1.5, "c": None}]}
        text += "\n<tool_call>\n" + json.dumps({"name": rng.choice(NAMES), "arguments": arguments}) + "\n</tool_call>"
    return text or "Yes."


class Setting:
    """A gateway on a loop of its own thread."""

    def __init__(self, folder: Path, log: Path, wire=None, **options) -> None:
        from transformers import AutoTokenizer

        from tests.support.engines import LoopThread

        self.own_loop = "loop" not in options
        self.loop = options.pop("loop", None) or LoopThread()
        self.folder = folder
        self.client = options.pop("client", None) or Scripted(AutoTokenizer.from_pretrained(folder))
        self.wire = wire or self.loop(make_wire(folder), 300)
        self.options = {"secret": "s", "model": "policy", "sampling": {"temperature": 1.0, "logprobs": 0}} | options
        self.log, self.names = log, 0
        self.start()

    def start(self) -> None:
        from skyrl_megatron_agents.gateway import Gateway

        async def made():
            gateway = Gateway(self.client, self.wire, self.log, **self.options)
            await gateway.start()
            return gateway

        self.gateway = self.loop(made())

    def open(self, name=None, **options):
        self.names += 1
        given = name or f"t{self.names}"

        async def opened():
            return self.gateway.open(given, **options)

        return self.loop(opened())

    def close(self) -> None:
        self.loop(self.gateway.stop())
        if self.own_loop:
            self.loop.close()


async def make_wire(folder, **options):
    from skyrl_megatron.inference.vllm.wire_app import WireApp

    return await WireApp.create(
        str(folder), "policy", **{"max_model_len": 4000, "tool_call_parser": "hermes"} | options
    )
