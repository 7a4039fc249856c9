"""A teacher at an OpenAI-compatible endpoint: log-probs of given tokens, and its top-k tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from skyrl_megatron.errors import EngineError

MAX_CONCURRENT = 64
"""Limit of concurrent requests to the server."""
TRIES = 3


class RemoteTeacher:
    """The vLLM server at ``url``, queried by ``POST /v1/completions`` with ``prompt_logprobs``.

    The environment variable ``TEACHER_API_KEY`` is sent as bearer token. ``timeout_s``: timeout of a request.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url, self._timeout_s, self._model = url.rstrip("/"), timeout_s, ""
        key = os.environ.get("TEACHER_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def score(self, rows: Sequence[Sequence[int]], starts: Sequence[int], k: int) -> list[np.ndarray]:
        """Return for each row of token ids an array [tokens from its start, 1 + 2k] float32.

        Its columns are the token's log-prob (nats, temperature 1), the log-probs of the ``k`` likeliest tokens, and
        their ids. ``starts``: at least 1. Raises EngineError if the server cannot be reached or returns no log-probs
        of prompts.
        """
        limits = httpx.Limits(max_connections=MAX_CONCURRENT)
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, limits=limits) as http:
            if not self._model:
                listed = await self._ask(http, "GET", "/v1/models")
                self._model = str(listed["data"][0]["id"])
            concurrent = asyncio.Semaphore(MAX_CONCURRENT)

            async def one(ids: Sequence[int], start: int) -> np.ndarray:
                async with concurrent:
                    return await self._row(http, ids, start, k)

            return list(await asyncio.gather(*(one(ids, start) for ids, start in zip(rows, starts, strict=True))))

    async def _row(self, http: httpx.AsyncClient, ids: Sequence[int], start: int, k: int) -> np.ndarray:
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        answer = await self._ask(http, "POST", "/v1/completions", body)
        prompt_logprobs = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        if not prompt_logprobs or len(prompt_logprobs) != len(ids):
            raise EngineError(
                f"the teacher at {self.url} returns no log-probs of prompts: serve it with vLLM, which supports "
                "prompt_logprobs, or set trainer.teacher.models to a folder"
            )
        out = np.zeros((len(ids) - start, 1 + 2 * k), np.float32)
        for row, position in enumerate(range(start, len(ids))):
            logprobs = {int(token): float(entry["logprob"]) for token, entry in prompt_logprobs[position].items()}
            best = sorted(logprobs, key=lambda token: -logprobs[token])[:k]
            if ids[position] not in logprobs or len(best) < k:
                raise EngineError(
                    f"the teacher at {self.url} returns {len(logprobs)} log-probs per position, but {k} and that of "
                    f"the token are needed: start it with --max-logprobs {k} or more, and with the policy's tokenizer"
                )
            out[row] = [logprobs[ids[position]], *(logprobs[token] for token in best), *best]
        return out

    async def _ask(self, http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
        problem = ""
        for _ in range(TRIES):
            try:
                response = await http.request(method, self.url + path, json=body)
                if response.status_code < 300:
                    return response.json()
                problem = f"{response.status_code} {response.text[:300]}"
                if response.status_code < 500:
                    break
            except (httpx.HTTPError, ValueError) as error:
                problem = repr(error)
        raise EngineError(f"the teacher at {self.url}{path}: {problem}; check trainer.teacher.models")
