"""An engine that plays back scripted tokens, tokenizers of four chat styles, and an environment that talks back.

The engine is a fake on purpose: token-exact expectations need to know what was sampled. Generation by a real engine is
tested in tests/inference and tests/job.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig
from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.inference.protocol import Generation

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
    " <s> </s> [INST] [/INST]"
).split()

CHATML = (  # Qwen2.5: a default system prompt, a line break behind every end token
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # users and assistants must take turns
    "<s>{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
QWEN3 = (  # thinking stays in the last answer only, which has at least an empty thought
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] != 'assistant' %}{{ message['content'] }}"
    "{% elif not loop.last %}{{ message['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% elif '</think>' in message['content'] %}{{ message['content'] }}"
    "{% else %}<think>\n\n</think>\n\n{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STYLES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "qwen3": (QWEN3, "<|im_end|>"),
}


@lru_cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the answer is wrong, try again. system user assistant You are helpful. What is plus minus\n\n#### "
    tokenizer.train_from_iterator((f"{words} {a} + {b} = {a + b}" for a in range(30) for b in range(30)), trainer)
    return tokenizer.to_str()


@lru_cache
def tokenizer_of(style: str):
    """A byte-level BPE tokenizer with the chat template and the end token of a style."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    template, end = STYLES[style]
    others = [token for token in SPECIAL if token not in (end, "<|endoftext|>")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token=end,
        pad_token="<|endoftext|>",
        additional_special_tokens=others,
    )
    tokenizer.add_tokens(["<think>", "</think>"])  # tokens of their own that stay when special ones are left out
    tokenizer.chat_template = template
    return tokenizer


class ScriptedEngine:
    """Answers the n-th request of a session with the n-th generation of its script; ``prompts`` records requests."""

    def __init__(self, script, delay=0.0):
        self.script, self.delay = script, delay
        self.turns: dict[str, int] = {}
        self.prompts: dict[str, list[list[int]]] = {}
        self.calls: list[list[str]] = []
        self.sampling: list[dict] = []
        self.adapters: list[str] = []

    async def generate(self, prompt_token_ids, sampling_params, session_ids=None, adapters=None):
        self.adapters += adapters or []
        await asyncio.sleep(self.delay)
        self.calls.append(list(session_ids))
        each = [sampling_params] * len(session_ids) if isinstance(sampling_params, dict) else list(sampling_params)
        self.sampling += each
        made = []
        for prompt, session in zip(prompt_token_ids, session_ids, strict=True):
            turn = self.turns[session] = self.turns.get(session, -1) + 1
            self.prompts.setdefault(session, []).append(list(prompt))
            script = self.script(session) if callable(self.script) else self.script
            made.append(script[turn])
        return made


def generation(ids, finish="stop", logprobs=None, versions=(), routes=None):
    """A generation whose log-probs are −1, −2, … unless given."""
    logprobs = [-float(i + 1) for i in range(len(ids))] if logprobs is None else logprobs
    return Generation(list(ids), logprobs, finish, list(versions), routes)


class TalkingEnv(BaseTextEnv):
    """Plays ``extras["steps"]``: one step output, or exception to raise, a turn; ``extras["log"]`` sees its calls."""

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, {key: value for key, value in extras.items() if key != "log"})
        self.log = extras.get("log", [])

    def __deepcopy__(self, memo):
        raise AssertionError("environments are not copied")

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.log.append(action)
        step = self.extras["steps"][self.turns]
        self.turns += 1
        if isinstance(step, Exception):
            raise step
        return step

    def close(self):
        self.log.append("closed")

    def get_metrics(self):
        return {"turns": self.turns}


class Log(list):
    """A list that stays itself when it is copied, so that a test sees what an environment wrote."""

    def __deepcopy__(self, memo):
        return self


register("talking", TalkingEnv)


def say(text="", reward=0.0, done=False, role="user", **more):
    """A step output with one observation, or none."""
    observations = [{"role": role, "content": text}] if text else []
    return {"observations": observations, "reward": reward, "done": done, "metadata": {}, **more}


def generator_of(style, engine, *, tokenizer=None, gym=None, cls=None, options=None, **config):
    """The real generator with a scripted engine."""
    from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator

    config = {"max_turns": 4, "max_input_length": 512, **config}
    cfg = GeneratorConfig.from_dict_config(config)
    gym = SkyRLGymConfig.from_dict_config(gym or {"max_env_workers": 4, "env_timeout": 20})
    return (cls or SkyRLGymGenerator)(cfg, gym, engine, tokenizer or tokenizer_of(style), **(options or {}))


def batch_of(prompts, extras, env_class="talking", **more):
    """Generator input with one sample a prompt."""
    from skyrl_megatron.rollout.interface import TrajectoryID

    return {
        "prompts": prompts,
        "env_classes": [env_class] * len(prompts),
        "env_extras": extras,
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(str(i), 0) for i in range(len(prompts))],
        "batch_metadata": None,
        **more,
    }


def run(generator, prompt, steps, **more):
    """One trajectory with the steps of its environment; returns the output."""
    extras = {"steps": steps, **more.pop("extras", {})}
    return asyncio.run(generator.generate(batch_of([prompt], [extras], **more), disable_tqdm=True))
