"""Asking a run's registry, from the side of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from skyrl_megatron.errors import LaunchError

ANSWER_S = 30.0
JOIN_S = 1800.0
"""A run asks the engine before it takes it in."""
LEAVE_S = 1800.0
"""Requests in flight may finish, and a sync under way ends."""
AGAIN_S = 1.0


class FleetClient:
    """The registry at ``url``; ``source`` says where the token is from. ``patience_s``: how long it may not answer."""

    def __init__(self, url: str, token: str, source: str, patience_s: float) -> None:
        self.url, self.source, self.patience_s = url.rstrip("/"), source, patience_s
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"})

    def check(self, model: Mapping[str, Any], versions: Mapping[str, str], stop: Callable[[], bool]) -> dict[str, Any]:
        """Return what the run asks of an engine. Raises LaunchError for one that cannot join."""
        return self._patiently("/engines/check", {"model": model, "versions": versions}, ANSWER_S, stop)

    def join(self, offer: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Any]:
        """Join; returns the engine's name, its state and ``heartbeat_s``. Raises LaunchError as :meth:`check`."""
        return self._patiently("/engines", offer, JOIN_S, stop)

    def heartbeat(self, name: str) -> dict[str, Any] | None:
        """Give a sign of life; returns the engine's state, None where the run does not know the engine. Raises
        ConnectionError when there is no answer."""
        return self._asked("PUT", f"/engines/{name}", None, ANSWER_S)

    def leave(self, name: str) -> dict[str, Any] | None:
        """Leave; returns when nothing needs the engine any more. As :meth:`heartbeat`."""
        return self._asked("DELETE", f"/engines/{name}", None, LEAVE_S)

    def _patiently(self, path: str, body: Any, timeout_s: float, stop: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer = self._asked("POST", path, body, timeout_s)
                assert answer is not None
                return answer
            except ConnectionError as error:
                if time.monotonic() > deadline or stop():
                    raise LaunchError(
                        f"--registry={self.url}: no answer for {self.patience_s:g} s ({error}): is the run up, with "
                        "generator.inference_engine.enable_registry=true and a registry_host that this host reaches?"
                    ) from error
                time.sleep(AGAIN_S)

    def _asked(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer; None for an engine that the run does not know."""
        try:
            response = self._http.request(method, self.url + path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if response.status_code == 401:
            raise LaunchError(f"{self.source}: the run at {self.url} has another token")
        if response.status_code == 404 and method != "POST":
            return None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code < 300 and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise LaunchError(str(answer["error"].get("message")))
        raise LaunchError(f"--registry={self.url}: answers {response.status_code}, which no registry of a run does")
