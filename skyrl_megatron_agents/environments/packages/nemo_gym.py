"""``nemo-gym:URL``: a resources server of NeMo-Gym (https://github.com/NVIDIA-NeMo/Gym), which verifies one answer.

:func:`rows` makes rows from a file of the package: ``extra_info.row`` is a line of it. The server is asked as the
package's agents ask it: ``/seed_session``, then ``/verify`` with the answer as an object of the Responses API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_megatron_agents.environments.packages import MOST_BYTES

TIMEOUT_S = 600.0
"""Time in seconds of one answer in all."""


def rows(file: str | Path, url: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of a JSONL file of the package, for the server at ``url``."""
    for line in Path(file).read_text().splitlines():
        if line.strip():
            asked = json.loads(line)["responses_create_params"]
            said = asked["input"]
            prompt = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
            if asked.get("instructions"):
                prompt.insert(0, {"role": "system", "content": asked["instructions"]})
            yield {"prompt": prompt, "env_class": f"nemo-gym:{url}", "extra_info": {"row": line}}


class NeMoGym(BaseTextEnv):
    """One task. The reward is the server's."""

    replayable = False  # a server may keep a session

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, name: str) -> None:
        super().__init__(env_config, extras)
        line = (self.extras.get("extra_info") or {}).get("row")
        if not line:
            raise ValueError(f"nemo-gym:{name} needs a line of its file as extra_info.row, the row has none")
        self.row = json.loads(line)
        self.url = name

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Ask the server to verify the answer. Raises httpx.HTTPError if it does not, TimeoutError after
        :data:`TIMEOUT_S` in all, and ValueError for an answer of more than :data:`MOST_BYTES`."""
        said = {"type": "output_text", "text": action, "annotations": []}
        message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [said]}
        response = {
            "id": "resp_0",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
        verdict = asyncio.run(self._verified({**self.row, "response": response}))
        rest = {name: value for name, value in verdict.items() if name not in (*self.row, "response", "reward")}
        return BaseTextEnvStepOutput(observations=[], reward=float(verdict["reward"]), done=True, metadata=rest)

    async def _verified(self, answered: dict[str, Any]) -> dict[str, Any]:
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, headers={"accept-encoding": "identity"}) as client,
        ):
            await _posted(client, "/seed_session", self.row)
            content = json.loads(await _posted(client, "/verify", answered))
        if not isinstance(content, dict) or type(content.get("reward")) not in (int, float):
            raise ValueError(f"{self.url}/verify answered without a number as reward: {content!r:.200}")
        return content


async def _posted(client: httpx.AsyncClient, path: str, content: Any) -> bytes:
    """Return the body of an answer. Its size is looked at while it arrives."""
    body = bytearray()
    async with client.stream("POST", path, json=content) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"{answer.url} answered with more than {MOST_BYTES:,} bytes")
    return bytes(body)
