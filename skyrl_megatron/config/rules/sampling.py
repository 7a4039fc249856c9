"""Which distribution tokens are sampled from, and whether the trainer can take its softmax over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.generator import SamplingParams
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

KEY = "generator.inference_engine.return_sampling_support"
_CHANGING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens")


def truncations(params: SamplingParams) -> list[str]:
    """Return the settings with which tokens are not sampled from softmax(logits / temperature)."""
    return [
        f"{name}={value}"
        for name, value, changes in (
            ("top_p", params.top_p, params.top_p < 1),
            ("top_k", params.top_k, params.top_k > 0),
            ("min_p", params.min_p, params.min_p > 0),
            ("repetition_penalty", params.repetition_penalty, params.repetition_penalty != 1),
        )
        if changes
    ]


def support_travels(cfg: SkyRLTrainConfig) -> bool:
    """Return whether engines return what training's tokens are sampled from, for the trainer's softmax.

    Never where that is the whole vocabulary; if not configured: where nothing is in the way.
    """
    if not truncations(cfg.generator.sampling_params):
        return False
    wanted = cfg.generator.inference_engine.return_sampling_support
    return not any(_obstacles(cfg)) if wanted is None else wanted


def support_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what is in the way of a support that is asked for."""
    if cfg.generator.inference_engine.return_sampling_support:
        for obstacle in _obstacles(cfg):
            yield Problem(KEY, True, f"{obstacle}: change that, or set false here")


def _obstacles(cfg: SkyRLTrainConfig) -> Iterator[str]:
    engine, params = cfg.generator.inference_engine, cfg.generator.sampling_params
    if not engine.run_engines_locally or engine.backend != "vllm":
        yield "comes from vLLM engines that this run starts alone (run_engines_locally, backend)"
    if engine.enable_registry:
        yield "comes from engines that this run starts alone, and with enable_registry others join"
    if engine.enable_http_endpoint:
        yield "engines that return it take no request without top_k, which clients of enable_http_endpoint send"
    if params.logprobs is None:
        yield "is of use with log-probs of the engine alone, and generator.sampling_params.logprobs=null"
    more = params.additional_kwargs or {}
    changed = [f"additional_kwargs.{name}={more[name]}" for name in _CHANGING if more.get(name)]
    if params.repetition_penalty != 1:
        changed.append(f"repetition_penalty={params.repetition_penalty}")
    for setting in changed:
        yield f"the probability of a token is not that of the softmax, with generator.sampling_params.{setting}"
