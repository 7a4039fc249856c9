"""Conversations as training data of ``skyrl-megatron sft``.

A row is ``{messages: chat messages, tools, …}``. ``tools`` is optional: a list, or its JSON text. The assistant's
messages are trained (:meth:`~skyrl_megatron.rollout.templates.ChatFormat.taught`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skyrl_megatron.config.schema.evaluation import data_set_names
from skyrl_megatron.config.schema.generator import SFTConfig
from skyrl_megatron.data.batch import collate
from skyrl_megatron.data.prompts import as_rendered, messages_problem
from skyrl_megatron.data.row_files import JoinedRows, load_source
from skyrl_megatron.data.samplers import SampledRows
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron.types import TrainingBatch

logger = logging.getLogger(__name__)

MESSAGES, TOOLS = "messages", "tools"
PRECEDING = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Role → the roles that may come before it; None: it may be the first."""
IMAGES = ("image", "image_url", "video", "audio")

type Taught = tuple[list[int], list[int], list[int]]
"""(prompt, response, mask) of a sequence."""


class ChatRows:
    """The conversations of one or several data sets, tokenized on demand.

    ``datasets``: as in ``data.train_data``. The constructor reads and tokenizes every row once. An item is
    ``{uid, sequences, source, name}``: the row number over all data sets, the row's sequences, its data set, and the
    name of that in metrics.
    ``enough``: stop after this many rows and keep only these (None: read all).

    Raises DataError for data sets that cannot be read, and, unless ``settings.invalid_rows`` is ``skip``, for a row
    that cannot be trained, with file and row.
    """

    def __init__(
        self,
        datasets: Sequence[str],
        chat: ChatFormat,
        settings: SFTConfig,
        *,
        enough: int | None = None,
        hub_commits: Mapping[str, str] | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        if not datasets:
            raise DataError("no data set is given: set data.train_data")
        self.names, self.chat, self.settings = list(datasets), chat, settings
        self.short_names = data_set_names(self.names)
        self.rows = JoinedRows([load_source(name, 1, hub_commits or {}, say) for name in datasets])
        self.skipped: Counter[str] = Counter()
        """Problem → number of rows that were skipped because of it."""
        self.kept = self._valid_rows(enough)
        for problem, count in self.skipped.items():
            say(f"data: skipped {count} of {len(self.rows)} rows: {problem}")
        if not len(self.kept):
            raise DataError(f"{', '.join(self.names)}: none of {len(self.rows)} rows can be trained")

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        number = int(self.kept[item])
        source = self.names[int(np.searchsorted(self.rows.ends, number, side="right"))]
        return {"uid": str(number), "source": source, "name": self.short_names[source], **self._item(item)}

    @property
    def sampled_rows(self) -> SampledRows:
        """What a sampler knows of the rows."""
        return SampledRows(self.rows, self.names, self.kept, limit=f"{self.settings.SECTION}.invalid_rows=skip")

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size and content hash of each file."""
        return self.rows.fingerprint

    def _valid_rows(self, enough: int | None) -> np.ndarray:
        kept: list[int] = []
        for number, row in enumerate(self.rows):
            if enough is not None and len(kept) >= enough:
                break
            kind, details = self._problem(row)
            if not kind:
                kept.append(number)
            elif self.settings.invalid_rows == "skip":
                self.skipped[kind] += 1
            else:
                raise DataError(
                    f"{self.rows.place(number)}: {kind}{details}: correct or remove the row, or set "
                    f"{self.settings.SECTION}.invalid_rows=skip"
                )
        return np.asarray(kept, np.int64)

    def _problem(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return why a row cannot be trained, as (kind, details); ("", "") if it can."""
        if kind := self.row_problem(row):
            return kind, ""
        try:
            longest = max(len(prompt) + len(response) for prompt, response, _ in self._sequences(row))
        except DataError as error:
            return str(error), ""
        if longest > self.settings.max_length:
            kind = f"longer than {self.settings.SECTION}.max_length={self.settings.max_length}"
            return kind, f" ({longest} tokens)"
        return "", ""

    def _item(self, item: int) -> dict[str, Any]:
        """Return what an item has in addition to uid and source."""
        return {"sequences": self._sequences(self.rows[int(self.kept[item])])}

    def _sequences(self, row: Mapping[str, Any]) -> list[Taught]:
        """Return all sequences of a row."""
        return self._taught(row[MESSAGES], row.get(TOOLS))

    def _taught(self, messages: Sequence[Mapping[str, Any]], tools: Any, start: int = 0) -> list[Taught]:
        """Return the sequences that teach the assistant's messages from the message ``start`` on."""
        if isinstance(tools, str):
            tools = json.loads(tools)
        rendered = [as_rendered(message) for message in messages]
        return self.chat.taught(rendered, last=self.settings.turns == "last", tools=tools, start=start)

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row has the wrong form; "" if it has the right one."""
        return conversation_problem(row)


def conversation_problem(row: Mapping[str, Any]) -> str:
    """Return why a row is no conversation that ends with the assistant; "" if it is one."""
    messages, tools = row.get(MESSAGES), row.get(TOOLS)
    if messages is None:
        return f"no column {MESSAGES!r}; the columns are {', '.join(row)}"
    if row.get("images") or has_image(messages):
        return f"{MESSAGES} has an image, but only text is trained"
    if problem := messages_problem(messages):
        return f"{MESSAGES} {problem}"
    roles = [message["role"] for message in messages]
    for before, role in zip([None, *roles], roles, strict=False):
        if before not in PRECEDING.get(role, ()):
            where = "first" if before is None else f"after {before!r}"
            return f"the roles are out of order: {role!r} comes {where}"
    if "assistant" not in roles:
        return "no message of the assistant"
    if roles[-1] != "assistant":
        return f"the conversation ends with {roles[-1]!r}, not with the assistant"
    try:
        listed = json.loads(tools) if isinstance(tools, str) and tools else tools or []
    except ValueError:
        listed = None
    return "" if isinstance(listed, list) else f"{TOOLS} is {tools!r:.80}, it must be a list or its JSON text"


def has_image(messages: Any) -> bool:
    """Return whether a message has an image, a video or sound."""
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts)


def taught_batch(sequences: Sequence[Taught], uids: Sequence[str]) -> TrainingBatch:
    """Return the batch of sequences. ``uids``: the row of each one; those of a row are adjacent."""
    prompts, responses, masks = zip(*sequences, strict=True)
    batch = collate(prompts, responses, uids=uids, rewards=[0.0] * len(uids), loss_masks=masks)
    batch.advantages = batch.returns = torch.zeros_like(batch.response_mask)
    return batch
