"""Preferences as training data of ``skyrl-megatron dpo`` and ``skyrl-megatron reward``.

A pair is ``{prompt: chat messages, chosen: chat messages, rejected: chat messages, tools, …}``. Without ``prompt``, or
if it is text, ``chosen`` and ``rejected`` are whole conversations, and the messages that both begin with are the
prompt. A pair for a reward model may have a ``margin``. A labelled answer, for the loss ``kto``, is ``{prompt,
completion, label, tools, …}``. The names are those of TRL.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_megatron.config.schema.generator import DPOConfig, RewardConfig, SFTConfig
from skyrl_megatron.data.packing import TOGETHER
from skyrl_megatron.data.prompts import as_rendered, messages_problem
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.chat_rows import (
    MESSAGES,
    TOOLS,
    ChatRows,
    Taught,
    conversation_problem,
    has_image,
    taught_batch,
)
from skyrl_megatron.types import TrainingBatch

PROMPT, CHOSEN, REJECTED, MARGIN = "prompt", "chosen", "rejected", "margin"
COMPLETION, LABEL = "completion", "label"


def rows_class(settings: SFTConfig) -> type[ChatRows]:
    """Return the class that reads the rows of a run."""
    if isinstance(settings, RewardConfig):
        return ScoredRows
    if not isinstance(settings, DPOConfig):
        return ChatRows
    return PairRows if settings.paired else LabelledRows


class PairRows(ChatRows):
    """Pairs of answers. An item has ``sequences`` and in ``sides`` 1 for each of the better answer and -1 for each of
    the other one."""

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no pair of two different answers; "" if it is one."""
        return pair_problem(row)

    def _problem(self, row: Mapping[str, Any]) -> tuple[str, str]:
        found = super()._problem(row)
        if not found[0] and len(set(map(str, self._answers(row)))) == 1:
            return "the tokens of chosen and rejected are equal", ""
        return found

    def _item(self, item: int) -> dict[str, Any]:
        chosen, rejected = self._answers(self.rows[int(self.kept[item])])
        return {"sequences": [*chosen, *rejected], "sides": [1] * len(chosen) + [-1] * len(rejected)}

    def named_sequences(self, item: int) -> list[tuple[str, Taught]]:
        """Return the sequences of an item, named ``chosen`` or ``rejected``."""
        answers = zip((CHOSEN, REJECTED), self._answers(self.rows[int(self.kept[item])]), strict=True)
        return [(name, sequence) for name, answer in answers for sequence in answer]

    def _sequences(self, row: Mapping[str, Any]) -> list[Taught]:
        return [sequence for answer in self._answers(row) for sequence in answer]

    def _answers(self, row: Mapping[str, Any]) -> list[list[Taught]]:
        prompt, *answers = split_pair(row)
        return [self._taught([*prompt, *answer], row.get(TOOLS), len(prompt)) for answer in answers]


class ScoredRows(PairRows):
    """Pairs for a reward model. A sequence is that of an answer's last turn with one more token, whose value is the
    score: a value is that of the state before a token (``runtime/critic.py``), here after the token that ends the
    answer. An item has the ``margin`` of its pair too."""

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no pair of two different answers, or has a margin that is no number; "" if neither."""
        margin = row.get(MARGIN)
        if margin is not None and not (type(margin) in (int, float) and math.isfinite(margin)):
            return f"{MARGIN} is {margin!r:.80}, it must be a finite number"
        return pair_problem(row)

    def _item(self, item: int) -> dict[str, Any]:
        return {**super()._item(item), "margin": float(self.rows[int(self.kept[item])].get(MARGIN) or 0.0)}

    def named_sequences(self, item: int) -> list[tuple[str, Taught]]:
        """Return the two answers as the model reads them; the token at which it is scored is marked as trained."""
        named = super().named_sequences(item)
        # The value of the added token is that of the state after the end token, and the token itself is never read.
        return [(name, (prompt, ids[:-1], [*mask[:-2], 1])) for name, (prompt, ids, mask) in named]

    def _answers(self, row: Mapping[str, Any]) -> list[list[Taught]]:
        end = self.chat.end_token
        last = [answer[-1] for answer in super()._answers(row)]
        return [[(prompt, [*response, end], [*[0] * len(response), 1])] for prompt, response, _ in last]


class LabelledRows(ChatRows):
    """Single answers with a label. An item has ``sequences``, ``sides`` (1 if the answer is good, else -1), and in
    ``others`` the answer of the row before to the prompt of this one, cut at ``max_length``: the data of the KL
    divergence of ``kto``."""

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no answer with a label; "" if it is one."""
        for name in (PROMPT, COMPLETION):
            if problem := _list_problem(row, name):
                return problem
        if not isinstance(row.get(LABEL), bool):
            return f"{LABEL} is {row.get(LABEL)!r:.80}, it must be true or false"
        if row[COMPLETION][0]["role"] != "assistant":
            return f"{COMPLETION} begins with {row[COMPLETION][0]['role']!r}, not with the assistant"
        return _answer_problem(row, COMPLETION, [*row[PROMPT], *row[COMPLETION]])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self) < 2 and kwargs.get("enough") is None and kwargs.get("only") is None:
            raise DataError(f"{', '.join(self.names)}: dpo.loss=kto needs two rows, whose answers it exchanges")

    def _item(self, item: int) -> dict[str, Any]:
        row, before = (self.rows[int(self.kept[place])] for place in (item, item - 1))
        sequences = self._sequences(row)
        others = self._taught([*row[PROMPT], *before[COMPLETION]], row.get(TOOLS), len(row[PROMPT]))
        limit = self.settings.max_length
        cut = [(prompt, *(part[: limit - len(prompt)] for part in rest)) for prompt, *rest in others]
        return {"sequences": sequences, "sides": [1 if row[LABEL] else -1] * len(sequences), "others": cut}

    def named_sequences(self, item: int) -> list[tuple[str, Taught]]:
        """Return the sequences of an item, named by the label of the answer."""
        row = self.rows[int(self.kept[item])]
        return [("good answer" if row[LABEL] else "bad answer", sequence) for sequence in self._sequences(row)]

    def _sequences(self, row: Mapping[str, Any]) -> list[Taught]:
        return self._taught([*row[PROMPT], *row[COMPLETION]], row.get(TOOLS), len(row[PROMPT]))


def split_pair(row: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages (prompt, better answer, other answer) of a pair."""
    chosen, rejected = ([as_rendered(message) for message in row[name]] for name in (CHOSEN, REJECTED))
    if isinstance(row.get(PROMPT), list):
        return [as_rendered(message) for message in row[PROMPT]], chosen, rejected
    same = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    same = min(len(chosen), len(rejected)) if same is None else same
    return chosen[:same], chosen[same:], rejected[same:]


def pair_problem(row: Mapping[str, Any]) -> str:
    """Return why a row is no pair of two different answers to one prompt; "" if it is one."""
    for name in (CHOSEN, REJECTED, *([PROMPT] if isinstance(row.get(PROMPT), list) else [])):
        if problem := _list_problem(row, name):
            return problem
    prompt, *answers = split_pair(row)
    if answers[0] == answers[1]:
        return f"{CHOSEN} and {REJECTED} are equal"
    for name, answer in zip((CHOSEN, REJECTED), answers, strict=True):
        if problem := _answer_problem(row, name, [*prompt, *answer]):
            return problem
        if all(message["role"] != "assistant" for message in answer):
            return f"{name} has no message of the assistant after those of the prompt"
    return ""


def _list_problem(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return f"no {name!r}; the columns are {', '.join(row)}"
    if has_image(row[name]):
        return f"{name} has an image, but only text is trained"
    problem = messages_problem(row[name])
    return f"{name} {problem}" if problem else ""


def _answer_problem(row: Mapping[str, Any], name: str, messages: list[Any]) -> str:
    """Return the problem of the conversation ``messages``, which the column ``name`` completes."""
    problem = conversation_problem({MESSAGES: messages, TOOLS: row.get(TOOLS), "images": row.get("images")})
    return f"{name}: {problem}" if problem else ""


def preference_batch(rows: Sequence[Mapping[str, Any]]) -> TrainingBatch:
    """Return the sequences of ``rows``, items of :class:`PairRows` or :class:`LabelledRows`, as a batch.

    Its ``preferences`` still have 0 for the reference. The sequences of a row have a uid of their own, also if the row
    occurs several times.
    """
    seen: Counter[str] = Counter()
    sequences: list[Taught] = []
    sides: list[tuple[float, float]] = []
    uids: list[str] = []
    for row in rows:
        uid = f"{row['uid']}#{seen[row['uid']]}" if seen[row["uid"]] else row["uid"]
        seen[row["uid"]] += 1
        sequences += row["sequences"]
        sides += [(side, row.get("margin", 0.0)) for side in row["sides"]]
        uids += [uid] * len(row["sequences"])
    batch = taught_batch(sequences, uids)
    batch.preferences = torch.zeros(len(uids), 3, dtype=torch.float64)
    batch.preferences[:, [0, 2]] = torch.tensor(sides, dtype=torch.float64)
    batch.metadata[TOGETHER] = True
    return batch


def other_answers(rows: Sequence[Mapping[str, Any]]) -> TrainingBatch:
    """Return the sequences of the KL divergence of ``kto``: those in ``others`` of the items ``rows``."""
    sequences = [sequence for row in rows for sequence in row["others"]]
    return taught_batch(sequences, [str(place) for place, row in enumerate(rows) for _ in row["others"]])
