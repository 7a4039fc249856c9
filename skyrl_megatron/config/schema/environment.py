"""Environments that score responses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skyrl_megatron.config.fields import Count, Positive
from skyrl_megatron.config.schema.base import BaseConfig


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """Environment `text2sql`."""

    db_path: str = field(default_factory=lambda: os.path.expanduser("~/data/sql_data"))
    """Folder of the SQLite databases, opened read-only."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """Environment `search`."""

    log_requests: bool = False
    """Log each query."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """The retriever."""
    topk: Count = 3
    """Passages per query."""
    timeout: Positive = 30.0
    """Seconds that a query may take."""


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Environment `gsm8k_llm_judge`."""

    model: str = "gpt-4o-mini"
    """Model that judges."""
    base_url: str | None = None
    """OpenAI-compatible endpoint. None: the `openai` client's own choice (`OPENAI_BASE_URL`)."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Environments that come with the package."""

    max_env_workers: Count = 32
    """Environments that run at the same time."""
    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """SQL."""
    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """A model as judge."""
    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Search."""
    env_timeout: Positive = 600.0
    """Seconds that one call of an environment may take. A trajectory whose environment takes longer is masked and
    counted."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """The environment."""

    env_class: str = "gsm8k"
    """Environment of prompts that do not name their own."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings of the environments."""
