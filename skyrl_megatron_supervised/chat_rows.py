"""Conversations as training data of ``skyrl-megatron sft``.

A row is ``{messages: chat messages, tools, …}``. ``tools`` is optional: a list, or its JSON text. The assistant's
messages are trained (:mod:`.trained_answers`), except those that a flag
leaves out (:data:`~skyrl_megatron.data.messages.FLAGS`). Nothing of a row is dropped in silence: a column or a key
that nothing reads is named with its count, and what the chat template would leave out of an answer is an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch

from skyrl_megatron.config.schema.evaluation import data_set_names
from skyrl_megatron.config.schema.supervised import SFTConfig
from skyrl_megatron.data.batch import collate
from skyrl_megatron.data.message_form import MessageForm, Said
from skyrl_megatron.data.messages import BARE_TOOLS, FLAGS, flag_of, messages_problem, read_tools, trained_messages
from skyrl_megatron.data.row_files import JoinedRows, Rows, load_source
from skyrl_megatron.data.row_shapes import format_of, format_of_messages, in_messages
from skyrl_megatron.data.samplers import SampledRows
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron.types import TrainingBatch
from skyrl_megatron_supervised.trained_answers import RenderedSequence, TrainedSequence, rendered_sequences, tokens_of
from skyrl_megatron_supervised.word_memo import WordMemo

if TYPE_CHECKING:
    from skyrl_megatron.data.row_cache import RowCache

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
MARK_BYTES = 16
LONGER = "longer than"
"""Beginning of the problem of a row with more than ``max_length`` tokens."""
NOTHING_TRAINED = f"{NO_ANSWER_TRAINED}: the flags of the messages leave out all"
_OF_RUN = ("kept", "marks", "_words", "_exchanged")
"""Attributes of rows that only the process of the run needs."""
IMAGES = ("image", "image_url", "video", "audio")


@dataclass(slots=True)
class MadeRow:
    """What tokenizing a row gave, whatever the limits of the run are."""

    kind: str = ""
    """Why it cannot be trained, "" if it can; the same for many rows."""
    details: str = ""
    notes: list[str] = field(default_factory=list)
    """What was left out of it or changed."""
    groups: list[list[TrainedSequence]] = field(default_factory=list)
    """The sequences of each answer; [] if there are no tokens."""


@dataclass(slots=True)
class FittedRow:
    """A row as a run trains it: the fields of :class:`MadeRow` within the limits of the run."""

    kind: str = ""
    details: str = ""
    notes: list[str] = field(default_factory=list)
    groups: list[list[TrainedSequence]] = field(default_factory=list)


class TokenSource(Protocol):
    """Where rows were made before."""

    def made(self, number: int) -> MadeRow | None:
        """Return a row; None if it is not there."""

    def wait(self) -> None:
        """Return when all rows were made."""


class ChatRows:
    """The conversations of one or several data sets, as tokens.

    ``datasets``: as in ``data.train_data``. An item is ``{uid, sequences, source, name}``: the row number over all
    data sets, the row's sequences, its data set, and the name of that in metrics.

    The constructor tokenizes every row once, and an item is tokenized again when it is read. The same rows with their
    tokens on disk are those of :func:`~skyrl_megatron_supervised.row_tokens.cached_rows`.
    ``enough``: stop after this many rows and keep only these (None: read all). ``only``: read this row alone.

    Raises DataError for data sets that cannot be read, for a row ``only`` that does not exist, and, unless
    ``settings`` skip it, for a row that cannot be trained, with file and row.
    """

    kept: np.ndarray
    """[n] int64: numbers of the rows that are trained, ascending."""
    COLUMNS: ClassVar[tuple[str, ...]] = (MESSAGES,)
    """Columns with chat messages."""
    OTHERS: ClassVar[tuple[str, ...]] = ()
    """Other columns of the command."""
    has_marks: ClassVar[bool] = False
    """Whether :meth:`mark` gives something."""
    can_be_cut: ClassVar[bool] = True
    """Whether an answer without its end can be trained."""
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
        self._open(datasets, chat, settings, hub_commits or {}, say, declared, None)
        self.kept = self._valid_rows(enough) if only is None else self._one_row(only)
        self.report(say)
        if enough is None and only is None:
            self.require_enough(say)
        elif not len(self.kept):
            raise self._none_left()

    def require_enough(self, say: Callable[[str], None]) -> None:
        """Raise DataError if too few rows are kept."""
        if not len(self.kept):
            raise self._none_left()

    def _none_left(self) -> DataError:
        return DataError(f"{', '.join(self.names)}: none of {len(self.rows)} rows can be trained")

    def _open(
        self,
        datasets: Sequence[str],
        chat: ChatFormat,
        settings: SFTConfig,
        hub_commits: Mapping[str, str],
        say: Callable[[str], None],
        declared: Sequence[str],
        cache: RowCache | None,
    ) -> None:
        if not datasets:
            raise DataError("no data set is given: set data.train_data")
        self.names, self.chat, self.settings = list(datasets), chat, settings
        self.hub_commits = dict(hub_commits)
        self.short_names = data_set_names(self.names)
        self.rows = JoinedRows([load_source(name, 1, hub_commits, say, cache) for name in datasets])
        self.form = MessageForm(
            chat.tokenizer, chat.template, chat.kwargs, thinking=settings.thinking, section=settings.SECTION
        )
        self.declared = DECLARED.union(self.COLUMNS, self.OTHERS, declared)
        self.skipped: Counter[str] = Counter()
        """Problem → number of rows that were skipped because of it."""
        self.notes: Counter[str] = Counter()
        """What was left out of rows or changed, as text → number of rows."""
        self.tokens: TokenSource | None = None
        self.marks: list[bytes] = []
        """:meth:`mark` of each row that is kept."""

    @classmethod
    def to_make(
        cls,
        datasets: Sequence[str],
        chat: ChatFormat,
        settings: SFTConfig,
        *,
        hub_commits: Mapping[str, str] | None = None,
        declared: Sequence[str] = (),
        cache: RowCache | None = None,
    ) -> Self:
        """Return the rows for :meth:`make`, none of which is checked yet; the arguments are those of the class."""
        rows = cls.__new__(cls)
        rows._open(datasets, chat, settings, hub_commits or {}, logger.info, declared, cache)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        """Return what :meth:`make` needs in another process."""
        return {name: value for name, value in vars(self).items() if name not in _OF_RUN} | {"tokens": None}

    def report(self, say: Callable[[str], None]) -> None:
        """Say which rows were skipped, and what was left out of others."""
        for problem, count in self.skipped.items():
            say(f"data: skipped {count} of {len(self.rows)} rows: {problem}")
        for note, count in self.notes.items():
            say(f"data: {note} ({count} of {len(self.rows)} rows)")

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
            fitted = self.fitted(self.make_one(number, row))
            if self.is_kept(number, fitted):
                self.notes.update(fitted.notes)
                self.marks.append(self.mark(self._read(self.rows, number, row, self.settings)[0]))
                kept.append(number)
        return np.asarray(kept, np.int64)

    def is_kept(self, number: int, fitted: FittedRow) -> bool:
        """Return whether a row is trained; count it if not. Raises DataError with file and row if that is an error."""
        if not fitted.kind:
            return True
        if not self.is_skipped(fitted.kind):
            raise self.error(number, fitted)
        self.skipped[fitted.kind] += 1
        return False

    def is_skipped(self, kind: str) -> bool:
        """Return whether a row with a problem is skipped; else it is an error."""
        if kind.startswith(self.LEFT_OUT):
            return True
        settings = self.settings
        return (settings.of_long_rows if kind.startswith(LONGER) else settings.invalid_rows) == "skip"

    @property
    def skips_made_rows(self) -> bool:
        """Whether a row may be left out for what is only known when it is tokenized."""
        return "skip" in (self.settings.invalid_rows, self.settings.of_long_rows)

    def error(self, number: int, fitted: FittedRow) -> DataError:
        """Return the error of a row."""
        section = self.settings.SECTION
        fix = f"{section}.invalid_rows=skip"
        if fitted.kind.startswith(LONGER):
            fix = fix if self.settings.long_rows is None else f"{section}.long_rows=skip"
            fix += f", or {section}.long_rows=truncate" if self.can_be_cut else ""
        place = self.rows.place(number)
        return DataError(f"{place}: {fitted.kind}{fitted.details}: correct or remove the row, or set {fix}")

    def _one_row(self, number: int) -> np.ndarray:
        require_row(self.rows, number)
        fitted = self.fitted(self.make_one(number, self.rows[number]))
        if fitted.kind:
            fix = (
                "its own flag says so, and training leaves it out"
                if fitted.kind.startswith(self.LEFT_OUT)
                else "correct the row"
            )
            raise DataError(f"{self.rows.place(number)}: {fitted.kind}{fitted.details}: {fix}")
        self.notes.update(fitted.notes)
        return np.asarray([number], np.int64)

    # ------------------------------------------------------------------ from a row to its tokens
    def make_one(self, number: int, row: Mapping[str, Any]) -> MadeRow:
        """Return the tokens of a row as it is in the file."""
        return self.make([number], [row])[0]

    def make(self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[MadeRow]:
        """Return the tokens of the rows ``numbers``, which are encoded at once."""
        made, rendered = [], []
        for number, row in zip(numbers, rows, strict=True):
            result, groups = self._rendered(number, row)
            made.append(result)
            rendered.append(groups)
        texts = [one.text for row in rendered for group in row for one in group]
        words = self._words if len(numbers) > 1 else None
        encodings = iter(self.chat.encoder.encodings(texts) if words is None else words.encodings(texts))
        for result, groups in zip(made, rendered, strict=True):
            encoded = [[(one, next(encodings)) for one in group] for group in groups]
            try:
                result.groups = self._taught([[tokens_of(self.chat, *one) for one in group] for group in encoded])
            except DataError as error:
                result.kind, result.details = str(error), ""
        return made

    @cached_property
    def _words(self) -> WordMemo | None:
        return WordMemo.of(self.chat.tokenizer)

    def _rendered(self, number: int, row: Mapping[str, Any]) -> tuple[MadeRow, list[list[RenderedSequence]]]:
        """Return a row without its tokens, and the texts of the sequences of each of its answers; [] if it cannot be
        trained."""
        row, notes, kind, details = self.checked(self.rows, number, row, self.settings)
        if kind:
            return MadeRow(kind, details), []
        said = Said()
        try:
            groups = [self._texts(*conversation, said) for conversation in self._conversations(row)]
        except DataError as error:
            return MadeRow(str(error)), []
        unread = [f"the column {name!r}" for name in row if name not in self.declared and row[name] is not None]
        unread += [f"the key {name!r} of messages" for name in sorted(said.unread)]
        made = MadeRow(notes=[*(f"nothing reads {name}" for name in unread), *notes, *sorted(said.notes)])
        if unread and self.settings.strict_rows:
            made.kind, made.details = f"nothing reads {unread[0]}", f" ({self.settings.SECTION}.strict_rows)"
        return made, groups

    def _conversations(self, row: Mapping[str, Any]) -> list[tuple[Sequence[Mapping[str, Any]], Any, int]]:
        """Return (messages, tools, first message that may be trained) of each answer of a row."""
        return [(row[MESSAGES], row.get(TOOLS), 0)]

    def _texts(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, start: int, said: Said
    ) -> list[RenderedSequence]:
        """Return the texts of the sequences that teach the assistant's messages from the message ``start`` on. What is
        left out of them or changed is added to ``said``."""
        trained = trained_messages(messages, start, last=self.settings.turns == "last")
        if not any(trained):
            raise DataError(NOTHING_TRAINED)
        if (declared := read_tools(tools)) and not self.form.writes_tools:
            said.notes.add("the chat template leaves out the tools")
        if any("function" not in tool for tool in declared):
            said.notes.add(BARE_TOOLS)
        return rendered_sequences(self.chat, self.form.fitted(messages, said), trained, declared)

    def _taught(self, groups: list[list[TrainedSequence]]) -> list[list[TrainedSequence]]:
        """Return the sequences of each answer as they are trained, of those that its text gives."""
        return groups

    def mark(self, row: Mapping[str, Any]) -> bytes:
        """Return what the class compares with other rows, 0 or MARK_BYTES bytes. ``row``: with chat messages."""
        return b""

    def shape_of(self, number: int, row: Mapping[str, Any]) -> tuple[str, str, bytes]:
        """Return what is known of a row without its tokens: why it cannot be trained, as (kind, details), and its
        mark."""
        read, _, kind, details = self.checked(self.rows, number, row, self.settings)
        if kind:
            return kind, details, b""
        try:
            for messages, _, start in self._conversations(read):
                if not any(trained_messages(messages, start, last=self.settings.turns == "last")):
                    return NOTHING_TRAINED, "", b""
        except DataError as error:
            return str(error), "", b""
        return "", "", self.mark(read)

    def fitted(self, made: MadeRow) -> FittedRow:
        """Return a row as the settings want it: cut, or with its problem."""
        groups, limit, section = made.groups, self.settings.max_length, self.settings.SECTION
        if not groups:
            return FittedRow(made.kind, made.details)
        longest = max(len(prompt) + len(response) for group in groups for prompt, response, _ in group)
        notes = made.notes
        if longest > limit and self.settings.of_long_rows != "truncate":
            return self.too_long(longest)
        if made.kind:
            return FittedRow(made.kind, made.details)
        if longest > limit:
            groups, loses_ends = cut(groups, limit)
            if not all(groups) or any(a == b for a, b in pairwise(groups)):
                why = "no trained token" if not all(groups) else "no difference of the two answers"
                return FittedRow(f"{why} within {section}.max_length={limit}", f" ({longest} tokens)")
            notes = [*notes, f"{section}.long_rows=truncate cuts rows at {limit} tokens"]
            if loses_ends:
                notes.append(f"{section}.long_rows=truncate cuts within an answer, which is trained without its end")
        return FittedRow(groups=groups, notes=notes)

    def too_long(self, longest: int) -> FittedRow:
        """Return a row whose longest sequence has too many tokens."""
        return FittedRow(
            f"{LONGER} {self.settings.SECTION}.max_length={self.settings.max_length}", f" ({longest} tokens)"
        )

    def groups(self, item: int) -> list[list[TrainedSequence]]:
        """Return the sequences of each answer of an item. Raises DataError for a row that cannot be trained."""
        number = int(self.kept[item])
        made = None if self.tokens is None else self.tokens.made(number)
        fitted = self.fitted(self.make_one(number, self.rows[number]) if made is None else made)
        if fitted.kind:
            raise self.error(number, fitted)
        return fitted.groups

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
        return [("answer", sequence) for sequence in self.groups(item)[0]]

    def _item(self, item: int) -> dict[str, Any]:
        """Return what an item has in addition to uid and source."""
        return {"sequences": self.groups(item)[0]}

    @staticmethod
    def row_problem(row: Mapping[str, Any]) -> str:
        """Return why a row has the wrong form; "" if it has the right one."""
        return conversation_problem(row)


def _set_flag(row: Mapping[str, Any]) -> str:
    return next(f"{name} is {row[name]!r}" for name in FLAGS if row.get(name) is not None)


def cut(groups: list[list[TrainedSequence]], limit: int) -> tuple[list[list[TrainedSequence]], bool]:
    """Return the sequences of each answer without what follows their first ``limit`` tokens, those without a trained
    token left out; and whether a trained answer loses its end."""
    loses_ends = False
    fitted: list[list[TrainedSequence]] = []
    for group in groups:
        fitted.append([])
        for prompt, response, mask in group:
            size = max(limit - len(prompt), 0)
            if any(mask[:size]):
                loses_ends |= size < len(mask) and bool(mask[size - 1] and mask[size])
                fitted[-1].append((prompt, response[:size], mask[:size]))
    return fitted, loses_ends


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
