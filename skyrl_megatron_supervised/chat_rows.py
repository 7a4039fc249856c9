"""Conversations as training data of ``skyrl-megatron sft``.

A row is ``{messages: chat messages, tools, …}``. ``tools`` is optional: a list, or its JSON text. The assistant's
messages are trained (:meth:`~skyrl_megatron.rollout.templates.ChatFormat.trained_sequences`), except those that a flag
leaves out (:data:`~skyrl_megatron.data.messages.FLAGS`). Nothing of a row is dropped in silence: a column or a key
that nothing reads is named with its count, and what the chat template would leave out of an answer is an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from skyrl_megatron.config.schema.evaluation import data_set_names
from skyrl_megatron.config.schema.supervised import SFTConfig
from skyrl_megatron.data.batch import collate
from skyrl_megatron.data.message_form import MessageForm
from skyrl_megatron.data.messages import BARE_TOOLS, FLAGS, flag_of, messages_problem, read_tools, trained_messages
from skyrl_megatron.data.row_files import JoinedRows, Rows, load_source
from skyrl_megatron.data.row_shapes import format_of, format_of_messages, in_messages
from skyrl_megatron.data.samplers import SampledRows
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron.rollout.trained_answers import TrainedSequence
from skyrl_megatron.types import TrainingBatch

logger = logging.getLogger(__name__)

MESSAGES, TOOLS = "messages", "tools"
DECLARED = frozenset((TOOLS, "images", "extra_info", *FLAGS))
"""Columns that every command knows, in addition to those of its messages."""
NOT_TRAINED, NO_ANSWER_TRAINED = "the row is not trained", "no message of the assistant is trained"
PRECEDING = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Role → the roles that may come before it; None: it may be the first."""
IMAGES = ("image", "image_url", "video", "audio")


class ChatRows:
    """The conversations of one or several data sets, tokenized on demand.

    ``datasets``: as in ``data.train_data``. The constructor reads and tokenizes every row once. An item is
    ``{uid, sequences, source, name}``: the row number over all data sets, the row's sequences, its data set, and the
    name of that in metrics.
    ``enough``: stop after this many rows and keep only these (None: read all). ``only``: read this row alone.

    Raises DataError for data sets that cannot be read, for a row ``only`` that does not exist, and, unless
    ``settings.invalid_rows`` is ``skip``, for a row that cannot be trained, with file and row.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (MESSAGES,)
    """Columns with chat messages."""
    OTHERS: ClassVar[tuple[str, ...]] = ()
    """Other columns of the command."""
    LEFT_OUT: ClassVar[tuple[str, ...]] = (NOT_TRAINED, NO_ANSWER_TRAINED)
    """Beginnings of the problems that are no mistakes: the row says that it is not trained, which is obeyed."""

    def __init__(
        self,
        datasets: Sequence[str],
        chat: ChatFormat,
        settings: SFTConfig,
        *,
        enough: int | None = None,
        only: int | None = None,
        hub_commits: Mapping[str, str] | None = None,
        say: Callable[[str], None] = logger.info,
        declared: Sequence[str] = (),
    ) -> None:
        if not datasets:
            raise DataError("no data set is given: set data.train_data")
        self.names, self.chat, self.settings = list(datasets), chat, settings
        self.short_names = data_set_names(self.names)
        self.rows = JoinedRows([load_source(name, 1, hub_commits or {}, say) for name in datasets])
        self.form = MessageForm(
            chat.tokenizer, chat.template, chat.kwargs, thinking=settings.thinking, section=settings.SECTION
        )
        self.declared = DECLARED.union(self.COLUMNS, self.OTHERS, declared)
        self.skipped: Counter[str] = Counter()
        """Problem → number of rows that were skipped because of it."""
        self.notes: Counter[str] = Counter()
        """What was left out of rows or changed, as text → number of rows."""
        self.kept = self._valid_rows(enough) if only is None else self._one_row(only)
        for problem, count in self.skipped.items():
            say(f"data: skipped {count} of {len(self.rows)} rows: {problem}")
        for note, count in self.notes.items():
            say(f"data: {note} ({count} of {len(self.rows)} rows)")
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
            kind, details = self._problem(number, row)
            if not kind:
                kept.append(number)
            elif self.settings.invalid_rows == "skip" or kind.startswith(self.LEFT_OUT):
                self.skipped[kind] += 1
            else:
                raise DataError(
                    f"{self.rows.place(number)}: {kind}{details}: correct or remove the row, or set "
                    f"{self.settings.SECTION}.invalid_rows=skip"
                )
        return np.asarray(kept, np.int64)

    def _one_row(self, number: int) -> np.ndarray:
        require_row(self.rows, number)
        kind, details = self._problem(number, self.rows[number])
        if kind:
            fix = (
                "its own flag says so, and training leaves it out"
                if kind.startswith(self.LEFT_OUT)
                else "correct the row"
            )
            raise DataError(f"{self.rows.place(number)}: {kind}{details}: {fix}")
        return np.asarray([number], np.int64)

    def _problem(self, number: int, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return why a row cannot be trained, as (kind, details); ("", "") if it can."""
        row, notes, kind, details = self.checked(self.rows, number, row, self.settings)
        if kind:
            return kind, details
        self.form.unread.clear()
        self.form.notes.clear()
        try:
            longest = max(len(prompt) + len(response) for prompt, response, _ in self._sequences(row))
        except DataError as error:
            return str(error), ""
        if longest > self.settings.max_length:
            kind = f"longer than {self.settings.SECTION}.max_length={self.settings.max_length}"
            return kind, f" ({longest} tokens)"
        unread = [f"the column {name!r}" for name in row if name not in self.declared and row[name] is not None]
        unread += [f"the key {name!r} of messages" for name in sorted(self.form.unread)]
        if unread and self.settings.strict_rows:
            return f"nothing reads {unread[0]}", f" ({self.settings.SECTION}.strict_rows)"
        self.notes.update([*(f"nothing reads {name}" for name in unread), *notes, *sorted(self.form.notes)])
        return "", ""

    @classmethod
    def checked(
        cls, rows: Rows, number: int, row: Mapping[str, Any], settings: SFTConfig
    ) -> tuple[dict[str, Any], list[str], str, str]:
        """Return a row with chat messages, what was left out of it, and why it has the wrong form, as (kind, details);
        ("", "") if it has the right one. ``row``: as in the file."""
        try:
            read, notes = cls._read(rows, number, row, settings)
            kind = f"{NOT_TRAINED} ({_set_flag(read)})" if flag_of(read, "") is False else cls.row_problem(read)
        except DataError as error:
            return dict(row), [], str(error), ""
        if not kind:
            return read, notes, "", ""
        seems = format_of_messages(read.get(cls.COLUMNS[0])) or format_of_messages(read.get(cls.COLUMNS[-1]))
        if read.get(cls.COLUMNS[-1]) is None:
            seems = seems or format_of(read)
        hint = f"; {settings.SECTION}.format={seems} reads such rows" if seems and seems != settings.format else ""
        return read, notes, kind, hint

    @classmethod
    def _read(
        cls, rows: Rows, number: int, row: Mapping[str, Any], settings: SFTConfig
    ) -> tuple[dict[str, Any], list[str]]:
        """Return a row with chat messages, and what was left out of it."""
        columns = (*cls.COLUMNS, "conversations", TOOLS, "functions")
        written, nulls = rows.as_written(number, dict(row), columns)
        notes = ["null fields that the columns' types add to tool calls and tools are left out"] if nulls else []
        return in_messages(written, settings.format, cls.COLUMNS), notes

    def _row(self, item: int) -> dict[str, Any]:
        """Return the row of an item, with chat messages."""
        number = int(self.kept[item])
        return self._read(self.rows, number, self.rows[number], self.settings)[0]

    def named_sequences(self, item: int) -> list[tuple[str, TrainedSequence]]:
        """Return the sequences of an item, each with the name that its answer has in the row."""
        return [("answer", sequence) for sequence in self._sequences(self._row(item))]

    def _item(self, item: int) -> dict[str, Any]:
        """Return what an item has in addition to uid and source."""
        return {"sequences": self._sequences(self._row(item))}

    def _sequences(self, row: Mapping[str, Any]) -> list[TrainedSequence]:
        """Return all sequences of a row."""
        return self._trained_sequences(row[MESSAGES], row.get(TOOLS))

    def _trained_sequences(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, start: int = 0
    ) -> list[TrainedSequence]:
        """Return the sequences that teach the assistant's messages from the message ``start`` on."""
        trained = trained_messages(messages, start, last=self.settings.turns == "last")
        if not any(trained):
            raise DataError(f"{NO_ANSWER_TRAINED}: the flags of the messages leave out all")
        if (declared := read_tools(tools)) and not self.form.writes_tools:
            self.form.notes.add("the chat template leaves out the tools")
        if any("function" not in tool for tool in declared):
            self.form.notes.add(BARE_TOOLS)
        return self.chat.trained_sequences(self.form.fitted(messages), trained=trained, tools=declared)

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row has the wrong form; "" if it has the right one."""
        return conversation_problem(row)


def _set_flag(row: Mapping[str, Any]) -> str:
    return next(f"{name} is {row[name]!r}" for name in FLAGS if row.get(name) is not None)


def require_row(rows: JoinedRows, number: int) -> None:
    """Raise DataError unless there is a row ``number``, counted from 0 over all data sets."""
    if number >= len(rows):
        raise DataError(f"row {number}: the data have {len(rows)} rows, numbered from 0 to {len(rows) - 1}")


def conversation_problem(row: Mapping[str, Any]) -> str:
    """Return why a row is no conversation that ends with the assistant; "" if it is one."""
    messages = row.get(MESSAGES)
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
        trained_messages(messages)
        read_tools(row.get(TOOLS))
    except DataError as error:
        return str(error)
    return ""


def has_image(messages: Any) -> bool:
    """Return whether a message has an image, a video or sound."""
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts)


def taught_batch(sequences: Sequence[TrainedSequence], uids: Sequence[str]) -> TrainingBatch:
    """Return the batch of sequences. ``uids``: the row of each one; those of a row are adjacent."""
    prompts, responses, masks = zip(*sequences, strict=True)
    batch = collate(prompts, responses, uids=uids, rewards=[0.0] * len(uids), loss_masks=masks)
    batch.advantages = batch.returns = torch.zeros(len(batch.response_mask))
    return batch
