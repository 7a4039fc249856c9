"""Preferences as training data of ``skyrl-megatron dpo`` and ``skyrl-megatron reward``.

A pair is ``{prompt: chat messages, chosen: chat messages, rejected: chat messages, tools, …}``. Without ``prompt``, or
if it is text, ``chosen`` and ``rejected`` are whole conversations, and the messages that both begin with are the
prompt. Answers that repeat the prompt lose it. A pair for a reward model may have a ``margin``. A labelled answer, for
the loss ``kto``, is ``{prompt, completion, label, tools, …}``. The names are those of TRL.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from skyrl_megatron.config.schema.supervised import DPOConfig, RewardConfig, SFTConfig
from skyrl_megatron.data.message_form import Said
from skyrl_megatron.data.messages import as_rendered, flag_of, is_finite_number, messages_problem
from skyrl_megatron.data.splitting import TOGETHER
from skyrl_megatron.errors import DataError
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_supervised.chat_rows import (
    MARK_BYTES,
    MESSAGES,
    NOT_TRAINED,
    TOOLS,
    ChatRows,
    conversation_problem,
    cut,
    has_image,
    taught_batch,
)
from skyrl_megatron_supervised.trained_answers import TrainedSequence, tokens_of

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

    COLUMNS = (PROMPT, CHOSEN, REJECTED)
    LEFT_OUT = (NOT_TRAINED,)  # one answer of a pair alone cannot be left out

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no pair of two different answers; "" if it is one."""
        return pair_problem(row)

    def _item(self, item: int) -> dict[str, Any]:
        chosen, rejected = self.groups(item)
        return {"sequences": [*chosen, *rejected], "sides": [1] * len(chosen) + [-1] * len(rejected)}

    def named_sequences(self, item: int) -> list[tuple[str, TrainedSequence]]:
        """Return the sequences of an item, named ``chosen`` or ``rejected``."""
        answers = zip((CHOSEN, REJECTED), self.groups(item), strict=True)
        return [(name, sequence) for name, answer in answers for sequence in answer]

    def _conversations(self, row: Mapping[str, Any]) -> list[tuple[Sequence[Mapping[str, Any]], Any, int]]:
        prompt, *answers = split_pair(row)
        return [([*prompt, *answer], row.get(TOOLS), len(prompt)) for answer in answers]

    def _taught(self, groups: list[list[TrainedSequence]]) -> list[list[TrainedSequence]]:
        if groups and groups[0] == groups[1]:
            raise DataError("the tokens of chosen and rejected are equal")
        return groups


class ScoredRows(PairRows):
    """Pairs for a reward model. A sequence is that of an answer's last turn with one more token, whose value is the
    score: a value is that of the state before a token (``runtime/critic.py``), here after the token that ends the
    answer. An item has the ``margin`` of its pair too."""

    OTHERS = (MARGIN,)
    can_be_cut = False

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no pair of two different answers, or has a margin that is no number; "" if neither."""
        margin = row.get(MARGIN)
        if margin is not None and not is_finite_number(margin):
            return f"{MARGIN} is {margin!r:.80}, it must be a finite number"
        return pair_problem(row)

    def _item(self, item: int) -> dict[str, Any]:
        return {**super()._item(item), "margin": float(self.rows[int(self.kept[item])].get(MARGIN) or 0.0)}

    def named_sequences(self, item: int) -> list[tuple[str, TrainedSequence]]:
        """Return the two answers as the model reads them; the token at which it is scored is marked as trained."""
        named = super().named_sequences(item)
        # The value of the added token is that of the state after the end token, and the token itself is never read.
        return [(name, (prompt, ids[:-1], [*mask[:-2], 1])) for name, (prompt, ids, mask) in named]

    def _conversations(self, row: Mapping[str, Any]) -> list[tuple[Sequence[Mapping[str, Any]], Any, int]]:
        for name in (CHOSEN, REJECTED):
            if flag_of(row[name][-1], f"the last message of {name}: ") is False:
                raise DataError(f"the last message of {name} is not trained by its flag, but it is what gets a score")
        return super()._conversations(row)

    def _taught(self, groups: list[list[TrainedSequence]]) -> list[list[TrainedSequence]]:
        end = self.chat.end_token
        last = [group[-1] for group in groups]
        return super()._taught(
            [[(prompt, [*response, end], [*[0] * len(response), 1])] for prompt, response, _ in last]
        )


class LabelledRows(ChatRows):
    """Single answers with a label. An item has ``sequences``, ``sides`` (1 if the answer is good, else -1), and in
    ``others`` the answer of another row to the prompt of this one, cut at ``max_length``: the data of the KL
    divergence of ``kto``. The other row is the nearest one with another prompt, of two the one before; the last row is
    before the first one."""

    COLUMNS = (PROMPT, COMPLETION)
    OTHERS = (LABEL,)
    has_marks = True

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row is no answer with a label; "" if it is one."""
        for name in (PROMPT, COMPLETION):
            if problem := _list_problem(row, name):
                return problem
        if not isinstance(row.get(LABEL), bool):
            return f"{LABEL} is {row.get(LABEL)!r:.80}, it must be true or false"
        try:
            answer = _without_prompt(row[PROMPT], row[COMPLETION], COMPLETION)
        except DataError as error:
            return str(error)
        if answer[0]["role"] != "assistant":
            return f"{COMPLETION} begins with {answer[0]['role']!r}, not with the assistant"
        return _answer_problem(row, COMPLETION, [*row[PROMPT], *answer])

    def require_enough(self, say: Callable[[str], None]) -> None:
        """Raise DataError if too few rows are kept; say if their answers cannot be exchanged."""
        super().require_enough(say)
        if len(self) < 2:
            raise DataError(f"{', '.join(self.names)}: dpo.loss=kto needs two rows, whose answers it exchanges")
        if len(set(self.marks)) < 2:
            say(
                f"data: all {len(self)} rows have the same prompt: the KL divergence of dpo.loss=kto, which is that of"
                " answers to other prompts, is an estimate from answers to this one"
            )

    def mark(self, row: Mapping[str, Any]) -> bytes:
        """Return a hash of the prompt."""
        text = json.dumps([as_rendered(message) for message in row[PROMPT]], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=MARK_BYTES).digest()

    @cached_property
    def _exchanged(self) -> np.ndarray:
        """[n] int64: for each row the nearest one with another prompt."""
        return nearest_others(self.marks)

    def _item(self, item: int) -> dict[str, Any]:
        row, other = self._row(item), self._row(int(self._exchanged[item]))
        (sequences,) = self.groups(item)
        answer = _without_prompt(other[PROMPT], other[COMPLETION], COMPLETION)
        texts = self._texts([*row[PROMPT], *answer], row.get(TOOLS), len(row[PROMPT]), Said())
        written = [one.text for one in texts]
        encodings = self._words.encodings(written) if self._words else [None] * len(texts)
        made = [tokens_of(self.chat, *one) for one in zip(texts, encodings, strict=True)]
        ((others,), _) = cut([made], self.settings.max_length)
        return {"sequences": sequences, "sides": [1 if row[LABEL] else -1] * len(sequences), "others": others}

    def named_sequences(self, item: int) -> list[tuple[str, TrainedSequence]]:
        """Return the sequences of an item, named by the label of the answer."""
        name = "good answer" if self._row(item)[LABEL] else "bad answer"
        return [(name, sequence) for sequence in self.groups(item)[0]]

    def _conversations(self, row: Mapping[str, Any]) -> list[tuple[Sequence[Mapping[str, Any]], Any, int]]:
        answer = _without_prompt(row[PROMPT], row[COMPLETION], COMPLETION)
        return [([*row[PROMPT], *answer], row.get(TOOLS), len(row[PROMPT]))]


def nearest_others(prompts: Sequence[bytes]) -> np.ndarray:
    """Return for each row the nearest one with another prompt, of two the one before, [n] int64; the row before if
    there is one prompt only. The rows are a ring: the last one is before the first."""
    n = len(prompts)
    new = np.asarray([prompts[row] != prompts[row - 1] for row in range(n)])
    starts = np.flatnonzero(new)
    if not len(starts):
        return (np.arange(n) - 1) % n
    ring = np.concatenate([starts - n, starts, starts + n])
    rows = np.arange(n)
    at = np.searchsorted(ring, rows, side="right")
    before, after = ring[at - 1] - 1, ring[at]
    return np.where(rows - before <= after - rows, before, after) % n


def _without_prompt(prompt: Sequence[Any], answer: Sequence[Any], name: str) -> list[Any]:
    """Return the messages of an answer without the prompt, if it begins with the whole prompt. Raises DataError if it
    begins with another prompt."""
    begin = list(map(as_rendered, answer[: len(prompt)]))
    if begin == list(map(as_rendered, prompt)):
        if len(answer) == len(prompt):
            raise DataError(f"{name} has no message of the assistant after those of the prompt")
        return list(answer[len(prompt) :])
    if begin[0]["role"] in ("user", "system", "developer"):
        raise DataError(
            f"{name} begins with {begin[0]['role']!r}, not with the assistant: it may repeat the prompt only if it"
            " begins with exactly the messages of prompt"
        )
    return list(answer)


def split_pair(row: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages (prompt, better answer, other answer) of a pair."""
    chosen, rejected = ([as_rendered(message) for message in row[name]] for name in (CHOSEN, REJECTED))
    if isinstance(row.get(PROMPT), list):
        prompt = [as_rendered(message) for message in row[PROMPT]]
        return prompt, _without_prompt(prompt, chosen, CHOSEN), _without_prompt(prompt, rejected, REJECTED)
    same = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    same = min(len(chosen), len(rejected)) if same is None else same
    asked = row.get(PROMPT)
    if isinstance(asked, str) and asked and asked not in [message.get("content") for message in chosen[:same]]:
        raise DataError(
            f"the text of {PROMPT} is in no message that {CHOSEN} and {REJECTED} share: write it into both, or drop it"
        )
    return chosen[:same], chosen[same:], rejected[same:]


def pair_problem(row: Mapping[str, Any]) -> str:
    """Return why a row is no pair of two different answers to one prompt; "" if it is one."""
    for name in (CHOSEN, REJECTED, *([PROMPT] if isinstance(row.get(PROMPT), list) else [])):
        if problem := _list_problem(row, name):
            return problem
    try:
        prompt, *answers = split_pair(row)
    except DataError as error:
        return str(error)
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
    sequences: list[TrainedSequence] = []
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
