"""Question answering with a search engine (Search-R1, arXiv:2503.09516).

The policy writes ``<search>query</search>`` to search and ``<answer>…</answer>`` to answer. Both end tags must be stop
strings (``generator.sampling_params.stop``).
"""

from __future__ import annotations

import json
import logging
import re
import string
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from skyrl_megatron.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    ToolGroup,
    check_end_tags,
    require_ground_truth,
    tool,
)

logger = logging.getLogger(__name__)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
MAX_ANSWERS = 10
"""An episode with more answers than this counts as guessing and gets a quarter of the reward."""


def normalize(text: str) -> str:
    """Lowercase the text and remove punctuation, articles and extra white space (SQuAD normalisation)."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def score(transcript: str, targets: str | Iterable[str]) -> float:
    """Return 1 if the last answer is one of ``targets`` (¼ after more than ten answers), else 0."""
    answers = _ANSWER.findall(transcript)
    wanted = {normalize(target) for target in ([targets] if isinstance(targets, str) else targets)}
    if not answers or normalize(answers[-1]) not in wanted:
        return 0.0
    tags = max(transcript.count("<answer>"), transcript.count("</answer>"))
    return 0.25 if tags > MAX_ANSWERS else 1.0


class SearchToolGroup(ToolGroup):
    """The tool ``search``: POSTs ``{queries, topk, return_scores}`` to the retriever.

    The retriever returns ``{"result": [[{"document": {"contents": …}}, …]]}``. All environments of a process share the
    connections.
    """

    RETRIES = 4
    FIRST_PAUSE_S = 0.5
    _clients: dict[str, httpx.Client] = {}  # noqa: RUF012 - shared on purpose
    _lock = threading.Lock()

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: float = 30.0,
        log_requests: bool = False,
    ) -> None:
        self.search_url, self.topk, self.timeout, self.log_requests = search_url, topk, timeout, log_requests
        super().__init__("SearchToolGroup")

    @tool
    def search(self, query: str | None) -> str:
        """Return passages as ``{"result": "Doc 1: …"}``, "" without a query. Raises RuntimeError with the URL."""
        if query is None:
            return ""
        if self.log_requests:
            logger.info("search %s: %r", self.search_url, query)
        response = self._ask({"queries": [query.strip()], "topk": self.topk, "return_scores": True})
        listings = [
            "".join(f"Doc {i}: {hit['document']['contents'].strip()}\n" for i, hit in enumerate(hits, start=1))
            for hits in response.get("result") or []
        ]
        return json.dumps({"result": "\n---\n".join(listings) if listings else "No search results found."})

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        deadline, pause = time.monotonic() + self.timeout, self.FIRST_PAUSE_S
        for attempt in range(1 + self.RETRIES):
            try:
                left = max(deadline - time.monotonic(), 0.01)
                response = self._client().post(self.search_url, json=body, timeout=left)
                response.raise_for_status()
                answer: dict[str, Any] = response.json()
                return answer
            except (httpx.HTTPError, ValueError) as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if refused or attempt == self.RETRIES or time.monotonic() + pause > deadline:
                    raise RuntimeError(f"search at {self.search_url} failed: {error}") from error
                time.sleep(pause)
                pause *= 2
        raise AssertionError("unreachable")

    def _client(self) -> httpx.Client:
        with self._lock:
            return self._clients.setdefault(self.search_url, httpx.Client())


class SearchEnv(BaseTextEnv):
    """Multi-turn search. The last turn gets :func:`score` against ``reward_spec.ground_truth.target`` as reward.

    If a search fails, its error is the observation.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        truth = require_ground_truth(self)
        self.targets = truth["target"] if isinstance(truth, Mapping) else truth
        self.max_turns = self.extras.get("max_turns", 2)
        tools = SearchToolGroup(env_config.search_url, env_config.topk, env_config.timeout, env_config.log_requests)
        self.init_tool_groups([tools])
        self.history: ConversationType = []

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Search, or grade the answer. Raises ValueError if text follows an end tag."""
        check_end_tags(action, ("</search>", "</answer>"))
        self.turns += 1
        self.history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<answer>" in action and "</answer>" in action):
            reward = score("".join(message["content"] for message in self.history), self.targets)
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        query = _SEARCH.search(action)
        words = query[1] if query else None
        try:
            passages = self._execute_tool("SearchToolGroup", "search", [words])
            observation = {"role": "user", "content": f"\n<information>{passages}</information>\n"}
        except RuntimeError as error:
            observation = {"role": "user", "content": str(error)}
        self.history.append(observation)
        metadata = {"tool_group": "SearchToolGroup", "tool_name": "search", "tool_input": [words]}
        return {"observations": [observation], "reward": 0.0, "done": False, "metadata": metadata}
