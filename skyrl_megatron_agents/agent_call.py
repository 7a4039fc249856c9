"""One request of an agent, in the view of vLLM's serving code, which asks it for tokens (``splicing.Exchange``)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_megatron.config.rules.passthrough_keys import MASKS, WEIGHTS
from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.sampling_params import request_seed
from skyrl_megatron_agents.graph import Match, SampledCall
from skyrl_megatron_agents.open_trajectory import OpenTrajectory


class AgentCall:
    """A request while it is answered. ``fields``: as the client sent it. ``counts``: whether it is one of
    ``count_tokens``, which samples nothing."""

    def __init__(
        self,
        gateway: Any,
        trajectory: OpenTrajectory,
        fields: Mapping[str, Any] | None = None,
        *,
        counts: bool = False,
    ) -> None:
        self.gateway, self.trajectory, self.fields, self.counts = gateway, trajectory, fields or {}, counts
        self.match = Match(None, 0, 0, b"", None)
        self.prompt_ids: list[int] = []
        self.generations: list[Generation] = []
        self.text: str | None = None
        self.text_only = False
        self.too_long_message = ""
        self.failure: Exception | None = None
        self.seconds = 0.0
        """Seconds of sampling."""
        self._has_turn = False

    async def take_turn(self) -> None:
        """Wait until no other request of the trajectory is converted or written."""
        await self.trajectory.preparing.acquire()
        self._has_turn = True

    def end_turn(self) -> None:
        """Let another request of the trajectory be converted or written."""
        if self._has_turn:
            self._has_turn = False
            self.trajectory.preparing.release()

    def prefix_of(self, messages: Sequence[Mapping[str, Any]], scope: Any) -> Any:
        """Return the tokens of the longest path that the messages begin with."""
        from skyrl_megatron.inference.vllm.splicing import Prefix

        self.match = match = self.trajectory.graph.match(messages, scope)
        if match.unmatched is not None and not self.trajectory.first_unmatched:
            self.trajectory.first_unmatched = found = self.trajectory.graph.difference(match)
            counts = self.gateway.counts
            counts.first_unmatched = counts.first_unmatched or f"{self.trajectory.name}: {found}"
        return None if match.parent is None else Prefix(match.parent.ids, match.first, match.used)

    def prefix_of_text(self, prompt: Any) -> Any:
        """Return the tokens of the longest prompt and answer that a prompt begins with."""
        from skyrl_megatron.inference.vllm.splicing import Prefix

        if not isinstance(prompt, str):
            parent = self.trajectory.graph.continued(prompt)
            length = 0 if parent is None else parent.start + len(parent.generation.token_ids)
        else:
            self.text = prompt
            fits = [(len(text), call) for text, call in self.trajectory.texts if prompt.startswith(text)]
            length, parent = max(fits, key=lambda fit: fit[0], default=(0, None))
        self.match = Match(parent, 0, length, b"", None)
        return None if parent is None else Prefix(parent.ids, 0, length)

    async def sample(self, prompt_ids: list[int], sampling: dict[str, Any], count: int) -> list[Generation]:
        """Sample with the run's engines. Raises RequestError where a limit of the trajectory is reached."""
        started = time.perf_counter()
        if over := self.trajectory.count_samples(count):
            self.failure = RequestError(over)
            raise self.failure
        changes = [name for name in (*MASKS, *WEIGHTS) if self.trajectory.trained and sampling.get(name)]
        if _GRAMMAR in changes and _GRAMMAR not in self.gateway.may_set and self._is_of_optional_calls(sampling):
            sampling = {name: value for name, value in sampling.items() if name != _GRAMMAR}
            changes.remove(_GRAMMAR)
            self.gateway.note_once(f"trajectory {self.trajectory.name}: {_WITHOUT_GRAMMAR}")
        if refused := [name for name in changes if name not in self.gateway.may_set]:
            self.trajectory.refused = _unaccounted(refused[0])
            self.gateway.note_once(f"a request of trajectory {self.trajectory.name}: {self.trajectory.refused}")
            self.failure = RequestError(self.trajectory.refused)
            raise self.failure
        parent = self.match.parent
        exact = parent is None or prompt_ids[: len(parent.ids)] == parent.ids
        if not exact:
            self.match = replace(self.match, parent=None, first=0, used=0, said=())
        self.text_only = not exact or self.match.unmatched is not None
        self.trajectory.in_flight += count
        self.end_turn()
        try:
            requests = self._requests(prompt_ids, sampling, count)
            named: dict[str, Any] = {}
            if self.gateway.adapters:
                named["adapters"] = [self.trajectory.adapter] * count
            generations = await self.gateway.client.generate(
                [prompt_ids] * count, requests, [self.trajectory.name] * count, **named
            )
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.seconds = time.perf_counter() - started
            self.trajectory.in_flight -= count
        await self.take_turn()
        self.prompt_ids, self.generations = prompt_ids, list(generations)
        self.trajectory.tokens += sum(len(generation.token_ids) for generation in self.generations)
        if changes and any(
            generation.support is None or name in WEIGHTS for generation in generations for name in changes
        ):
            self.gateway.name_changes(changes, self.trajectory.name)
        return self.generations

    def _is_of_optional_calls(self, sampling: Mapping[str, Any]) -> bool:
        """Return whether a grammar is vLLM's of tool calls that an answer may have: of strict tools, of at most one
        call, or by default of a parser."""
        choice = self.fields.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        asked = any(self.fields.get(name) for name in ("response_format", "structured_outputs"))
        return kind in (None, "auto") and bool(self.fields.get("tools")) and not asked and _TAG in sampling[_GRAMMAR]

    def _requests(self, prompt_ids: list[int], asked: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the sampling parameters of each sample."""
        run, parent = self.trajectory.sampling, self.match.parent
        limits = [value for value in (run.get("max_tokens"), asked.get("max_tokens")) if value is not None]
        merged = {**run, **asked, **({"max_tokens": min(limits)} if limits else {})}
        if (routed := _routed(parent)) > 0:
            merged["routed_experts_prompt_start"] = routed
        if self.trajectory.seeds is None:
            return [merged] * count
        seed, uid, repetition, step = self.trajectory.seeds
        turn = 0 if parent is None else len(parent.path())
        tokens = hashlib.blake2b(np.asarray(prompt_ids, np.int32).tobytes(), digest_size=16).digest()
        requests = []
        for _ in range(count):
            number = self.trajectory.samples[turn, tokens]
            self.trajectory.samples[turn, tokens] += 1
            name = f"{uid}/turn-{turn}" if turn else uid
            name = f"{name}/sample-{number}" if number else name
            requests.append({**merged, "seed": request_seed(seed, name, repetition, step)})
        return requests

    def too_long(self, message: str) -> None:
        """Note a prompt that does not fit into the context."""
        self.too_long_message = message
        if not self.counts:
            self.trajectory.too_long = message


_GRAMMAR, _TAG = "structured_outputs", "structural_tag"
_WITHOUT_GRAMMAR = (
    "vLLM's grammar of tool calls is left out where samples are trained on, as their log-probs do not account for it; "
    "set generator.sampling_params.top_k to have it"
)


def _unaccounted(name: str) -> str:
    fix = "" if name in WEIGHTS else "set generator.sampling_params.top_k, so that engines return the tokens left, "
    return (
        f"{name} changes the distribution that tokens are sampled from, and what is trained on does not account for "
        f"it: {fix}remove it, or set generator.unaccounted_sampling=warn"
    )


def _routed(parent: SampledCall | None) -> int:
    """Return the number of first tokens whose routed experts are known, if the engines return them."""
    if parent is None or parent.generation.routed_experts is None:
        return 0
    return parent.start + len(parent.generation.token_ids) - 1
