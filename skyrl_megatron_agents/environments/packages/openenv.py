"""``openenv:URL``: an environment that an OpenEnv server offers (https://github.com/meta-pytorch/OpenEnv).

The row's ``extra_info`` may have ``action``, the field of the action that gets the policy's text (default
``message``), and ``reset``, the arguments of the server's ``reset`` as JSON.

A server has as many episodes at once as its ``max_concurrent_envs``, by default one. Further ones wait for a place, as
long as ``environment.skyrl_gym.env_timeout``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType, Message
from skyrl_megatron.envs.env_pool import EnvBusy
from skyrl_megatron_agents.environments.packages import MOST_BYTES, import_package

clients = import_package("openenv.core.generic_client", "openenv")
closed = import_package("websockets.exceptions", "openenv")
FULL = "CAPACITY_REACHED"
"""In the error of a server that has no place for another episode."""
TOO_BIG = 1009
"""Code with which a WebSocket is closed because of a message that is too large (RFC 6455)."""
HIDDEN = ("done", "reward", "metadata")
"""Fields of an observation that the policy does not see."""


class OpenEnv(BaseTextEnv):
    """One episode of the server. What ``reset`` shows follows the prompt, what ``step`` shows is the next message:
    the text of an observation with one field, JSON of others."""

    replayable = False  # the server may draw anew at each reset

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, name: str) -> None:
        super().__init__(env_config, extras)
        made = self.extras.get("extra_info") or {}
        self.action, self.arguments = made.get("action") or "message", json.loads(made.get("reset") or "{}")
        self.name = name
        self.client = self._client()

    def _client(self) -> Any:
        """Return a client that ends the connection of an answer above :data:`MOST_BYTES`, which it does not read."""
        return clients.GenericEnvClient(base_url=self.name, max_message_size_mb=MOST_BYTES / (1 << 20)).sync()

    def _asked(self, ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return ask(*args, **options)
        except closed.ConnectionClosedError as error:
            if error.sent is not None and error.sent.code == TOO_BIG:
                raise ValueError(f"openenv:{self.name} answered with more than {MOST_BYTES:,} bytes") from error
            raise

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Begin an episode of the server. Raises its errors, EnvBusy if it has no place for another episode,
        ConnectionError if it does not answer, and ValueError, as :meth:`step`, for an answer of more than
        :data:`~skyrl_megatron_agents.environments.packages.MOST_BYTES`."""
        self.client.connect()
        try:
            shown = self._asked(self.client.reset, **self.arguments).observation
        except (RuntimeError, closed.ConnectionClosedOK) as error:  # closed before this side has asked for anything
            if isinstance(error, RuntimeError) and FULL not in str(error):
                raise
            self.client.close()  # the server closes the connection of an episode that it refuses
            self.client = self._client()
            raise EnvBusy(
                f"openenv:{self.name}: {error}; start the server with a larger max_concurrent_envs"
            ) from error
        return [*prompt, *_shown(shown)], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Send the text as an action."""
        self.turns += 1
        result = self._asked(self.client.step, {self.action: action})
        done = bool(result.done) or self.turns >= self.max_turns
        observations = [] if done else _shown(result.observation)
        reward = float(result.reward or 0.0)
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata=result.observation)

    def close(self) -> None:
        """End the episode and its connection."""
        self.client.close()


def _shown(observation: Mapping[str, Any]) -> list[Message]:
    fields = {name: value for name, value in observation.items() if name not in HIDDEN and value not in (None, "")}
    if not fields:
        return []
    (first, *others) = fields.values()
    text = first if not others and isinstance(first, str) else json.dumps(fields, ensure_ascii=False)
    return [{"role": "user", "content": text}]
