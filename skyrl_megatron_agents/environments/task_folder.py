"""Tasks that an agent works on in a sandbox: a folder with a text, files and hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.config.schema.generator import TaskEnvConfig
from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_megatron_agents.task import read_task


class TaskFolder(BaseTextEnv):
    """The task in the folder that the row's column ``task`` names. Its tests give the reward, 1 or 0 as a rule.

    ``env_config``: what it may ask for (``environment.skyrl_gym.task``). Raises ValueError for a row without a folder,
    and DataError for a folder that is no task
    (:func:`~skyrl_megatron_agents.task.read_task`).
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        if not self.extras.get("task"):
            raise ValueError(
                "TaskFolder needs a folder, but the row has no column task: add it, with the path of the folder"
            )
        bounds = env_config if isinstance(env_config, TaskEnvConfig) else None
        self.task = read_task(Path(self.extras["task"]), bounds)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Raise ValueError: text solves no task."""
        raise ValueError("a task is worked on by an agent: set generator.name=agent and generator.agent.command")
