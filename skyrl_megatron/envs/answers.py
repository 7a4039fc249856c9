"""Rows without an answer: for environments of this project they are an error, for others a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_megatron.envs.base_text_env import spec
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning


def is_built_in(environment: Callable[..., Any]) -> bool:
    """Return whether the class of an environment is of this project: the core, or a package around it."""
    package = getattr(environment, "__module__", "").partition(".")[0]
    return package == "skyrl_megatron" or package.startswith("skyrl_megatron_")


def names_built_in(env_class: str) -> bool | None:
    """Return whether the environment registered as ``env_class`` is of this project; None if it cannot be loaded."""
    try:
        return is_built_in(spec(env_class).load())
    except DataError:
        return None


def warn_of_missing_answers(name: str, counts: Mapping[str, int], rows: int) -> None:
    """Warn of rows without ``reward_spec`` for environments of users, which may find their answers elsewhere.

    ``name``: the data set. ``counts``: environment → number of rows without ``reward_spec``. ``rows``: of all.
    """
    for env_class, count in counts.items():
        if count and names_built_in(env_class) is False:
            warnings.warn(
                f"{name}: {count} of {rows} rows have no reward_spec, so environment {env_class} cannot compute their "
                "reward from an answer in the row",
                SkyRLMegatronWarning,
                stacklevel=1,
            )
