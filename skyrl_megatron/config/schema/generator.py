"""Rollouts: sampling, turns, chat templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, Count, Fraction, NonNegative, OneOf, Positive
from skyrl_megatron.config.schema.base import BaseConfig
from skyrl_megatron.config.schema.inference import InferenceEngineConfig


@dataclass
class SamplingParams(BaseConfig):
    """How tokens are drawn."""

    max_generate_length: Count = 1024
    """Tokens generated per turn."""
    repetition_penalty: Positive = 1.0
    """Above 1 discourages tokens already seen."""
    temperature: NonNegative = 1.0
    """0 is greedy; training needs more than 0."""
    top_p: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    """Draw from the smallest set of tokens with this probability."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this share of the likeliest."""
    top_k: Annotated[int, Bounds(1, also=(-1, 0))] = -1
    """Draw from the so many likeliest tokens; -1 or 0: all."""
    logprobs: Annotated[int | None, Bounds(0, 1)] = 1
    """Return the sampled token's log-probability; 0 and 1 mean the same, None returns none."""
    stop: list[str] | None = None
    """Strings that end a generation."""
    additional_kwargs: dict[str, Any] | None = None
    """Further fields of vLLM's `SamplingParams`."""


@dataclass
class ChatTemplateConfig(BaseConfig):
    """Chat template other than the tokenizer's own."""

    source: Annotated[str, OneOf("name", "file")] = "name"
    """Whether `name_or_path` is a built-in name or a Jinja file."""
    name_or_path: str | None = None
    """The template. None: the tokenizer's."""


@dataclass
class GeneratorConfig(BaseConfig):
    """How prompts become trajectories."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The engines."""
    n_samples_per_prompt: Count = 5
    """Responses sampled of each prompt."""
    batched: bool = False
    """Generate single-turn responses in one call instead of one agent loop each."""
    max_turns: Count = 1
    """Turns of the policy in one trajectory."""
    max_input_length: Count | None = None
    """Tokens of context that a turn may start from. None: `trainer.max_prompt_length`, as a single turn
    requires."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tokenizer.apply_chat_template`."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling in training."""
    use_conversation_multi_turn: bool = True
    """Each turn and observation is a chat message of its own; false: all continue one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the end-of-sequence token to a turn that ended at a stop string."""
    eval_sampling_params: SamplingParams | None = None
    """Sampling in evaluation. None: greedy. Its `max_generate_length`, if not given, is the training one."""
    eval_n_samples_per_prompt: Count = 1
    """Responses per prompt in evaluation."""
    zero_reward_on_non_stop: bool = False
    """Responses that were cut off get reward 0."""
    apply_overlong_filtering: bool = False
    """Responses that were cut off are masked out of the loss (DAPO, arXiv:2503.14476)."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling of the engines. None: `trainer.rope_scaling`."""
    rope_theta: Positive | None = None
    """Base of the engines' rotary frequencies. None: `trainer.rope_theta`."""
    step_wise_trajectories: bool = False
    """Each turn becomes a training sequence of its own, with the trajectory's advantage."""
    merge_stepwise_output: bool = False
    """Join turns of `step_wise_trajectories` whose prompt begins with the turn before, prompt and response."""
    name: str = "skyrl_gym"
    """The generator: `skyrl_gym`, or one that a plugin registered."""
