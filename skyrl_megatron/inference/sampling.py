"""From the configuration's sampling section to what a request carries, and the seeds of reproducible runs."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.rules.sampling import support_travels, truncations
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.config.schema.generator import SamplingParams
from skyrl_megatron.errors import SkyRLMegatronWarning


def engine_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return keys of vLLM's ``SamplingParams``. ``logprobs`` 0 and 1 both mean the sampled token's alone."""
    sampling: dict[str, Any] = {
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "logprobs": None if params.logprobs is None else 0,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
        sampling["include_stop_str_in_output"] = True
    return sampling | dict(params.additional_kwargs or {})


def warn_of_truncation(cfg: SkyRLTrainConfig) -> None:
    """Give one SkyRLMegatronWarning when a ratio of trainer and engine probabilities is asked for, and the engine
    samples from a distribution that neither of them computes."""
    changed = truncations(cfg.generator.sampling_params)
    corrects = correction_enabled(cfg.trainer.algorithm.off_policy_correction)
    if changed and corrects and not support_travels(cfg):
        warnings.warn(
            f"generator.sampling_params {', '.join(changed)}: log-probs are those of softmax(logits / temperature), "
            "not of the truncated distribution that tokens are sampled from; trainer.algorithm.off_policy_correction "
            "corrects for differing weights and numerics, not for the truncation",
            SkyRLMegatronWarning,
            stacklevel=2,
        )


def request_seed(seed: int, uid: str, repetition: int, step: int) -> int:
    """Return the seed of one sample: the same in every run, another for each prompt, repetition, step and seed."""
    text = f"{seed}:{step}:{repetition}:{uid}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
