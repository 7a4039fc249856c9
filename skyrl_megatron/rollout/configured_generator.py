"""What the generators of the package are made from: the run's settings, its engines and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.envs.env_pool import EnvPool
from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorInterface, SamplingClient, TrajectoryID
from skyrl_megatron.rollout.templates import ChatFormat, load_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig


class ConfiguredGenerator(GeneratorInterface):
    """A generator of a run.

    ``seed``: requests are seeded, so that runs are reproducible. ``nonfinite``: ``error``, or ``skip`` to mask
    trajectories with a NaN or infinite reward. ``adapters``: names of the policy's adapters, if there are several.
    The extra ``adapter`` of a prompt selects one.

    The constructor raises ConfigError for conflicting settings and DataError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: SamplingClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int | None = None,
        nonfinite: str = "error",
        adapters: Sequence[str] = (),
    ) -> None:
        self.adapters = tuple(adapters)
        self.generator_cfg, self.skyrl_gym_cfg = generator_cfg, skyrl_gym_cfg
        self.inference_engine_client, self.tokenizer = inference_engine_client, tokenizer
        self.seed, self.nonfinite = seed, nonfinite
        template = load_template(generator_cfg.chat_template)
        self.chat = ChatFormat(tokenizer, template, generator_cfg.chat_template_kwargs)
        self.pool = EnvPool(skyrl_gym_cfg.max_env_workers, skyrl_gym_cfg.env_timeout)


def ids_of(batch: GeneratorInput) -> list[TrajectoryID]:
    """Return the id of each trajectory of a batch; new ones if it has none."""
    return batch.get("trajectory_ids") or [TrajectoryID(uuid4().hex, 0) for _ in batch["prompts"]]


def adapter_of(extras: Mapping[str, Any]) -> str:
    """Return the name of a prompt's adapter; "" if it names none."""
    return str(extras.get(ADAPTER_KEY) or "")
