"""The prompt dataset.

A row is ``{prompt: chat messages, env_class, reward_spec, tools, extra_info, …}``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.config.roles import ADAPTERS_KEY as ADAPTERS
from skyrl_megatron.config.schema.evaluation import UNKNOWN
from skyrl_megatron.data.message_form import MessageForm, Said
from skyrl_megatron.data.messages import BARE_TOOLS, EMPTY_TOOLS, declared_tools, messages_problem
from skyrl_megatron.data.row_cache import RowCache, RowProcesses, tokenizer_digest
from skyrl_megatron.data.row_files import BATCH_ROWS, READERS, JoinedRows, Rows, load_source
from skyrl_megatron.data.samplers import SampledRows
from skyrl_megatron.data.tokenizer import render, require_template
from skyrl_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

TEACHER_KEY, TEACHERS = "teacher", "trainer.teacher.models"
"""The column with the name of a row's teacher, and the configuration key that defines the names."""
REWARD_SPEC, TOOLS = "reward_spec", "tools"
_OF_VERL = "reward_model"
ROLE_KEY = "role"
"""The column with the role of a row, for the estimator ``rae``."""
IN_PROCESSES_FROM = 16_384
"""Rows from which on all processor cores tokenize them: the processes take seconds to start."""

type Measured = tuple[np.ndarray, Counter[str]]
"""(tokens of each of some prompts [n] int32, what the template leaves out of them → number of prompts)."""


class PromptDataset:
    """The prompts of one or several sources, without those that are too long.

    ``datasets``: paths of parquet, json or jsonl files, or ``name[@revision][:subset][:split]`` of a data set on the
    Hugging Face hub or in a folder (default split: ``train``). ``hub_commits``: ``trainer.hub_commits``. ``say`` gets
    the progress of downloads. Rows are read on demand (:mod:`skyrl_megatron.data.row_files`), and prompts are
    tokenized a thousand at a time, many by all processor cores, so memory does not grow with the files. The dataset
    keeps prompts of at most ``max_prompt_length`` tokens including the generation prompt. ``template`` and
    ``template_kwargs`` must be those with which the generator renders prompts.

    An item is ``(messages, env_class, extras, uid)``. ``env_class`` is None if the row has none, ``extras`` are all
    other columns, and ``uid`` is the row number over all sources, which does not depend on the filter. The column
    ``tools``, a list of objects or its JSON text, is written into the prompt by the template. ``say`` names what the
    template does not read; with ``strict`` a key of messages that nothing reads is an error.

    ``adapters``: names of the policy's adapters, if they have names. The column ``adapter`` selects one for each row;
    it is optional if there is one adapter. The extras of every item contain it.

    ``enough``: stop after this many prompts and keep only these (None: read all). ``cache`` keeps their lengths.

    Raises DataError for files that are missing or cannot be read, and for rows without a prompt (with file and row).
    """

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        num_workers: int = 1,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        *,
        template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        enough: int | None = None,
        adapters: Sequence[str] = (),
        hub_commits: Mapping[str, str] | None = None,
        say: Callable[[str], None] = logger.info,
        strict: bool = False,
        cache: RowCache | None = None,
    ) -> None:
        names = [datasets] if isinstance(datasets, str) else list(datasets)
        if not names:
            raise DataError("no dataset is given: set data.train_data")
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        self.tokenizer, self.max_prompt_length = tokenizer, max_prompt_length
        self._render: dict[str, Any] = {"template": template, **(template_kwargs or {})}
        require_template(tokenizer, template)
        sources = [load_source(name, num_workers, hub_commits or {}, say, cache) for name in names]
        for name, source in zip(names, sources, strict=True):
            require_prompts(source, name, prompt_key)
            require_known(source, name, ADAPTER_KEY, adapters, ADAPTERS, needed=len(adapters) > 1)
        self.adapters = list(adapters)
        self.names, self.rows, self.strict = names, JoinedRows(sources), strict
        self.form = MessageForm(tokenizer, template, template_kwargs or {}, thinking="ignore")
        self.notes: Counter[str] = Counter()
        """What of the prompts the template leaves out, as text → number of rows."""
        kept_lengths = None if enough is not None else cache
        self.kept = self._short_enough(enough, say) if kept_lengths is None else self._by_length(kept_lengths, say)
        if _OF_VERL in self.rows.column_names and REWARD_SPEC not in self.rows.column_names:
            say(f"data: the column {_OF_VERL!r} is not {REWARD_SPEC!r}, which environments read: rename it")
        for note, count in self.notes.items():
            say(f"data: {note} ({count} of {len(self.rows)} rows)")
        self.num_filtered = 0 if enough is not None and len(self.kept) >= enough else len(self.rows) - len(self.kept)
        """Number of prompts dropped because they are too long."""
        if self.num_filtered:
            logger.info("%d of %d prompts are longer than %d", self.num_filtered, len(self.rows), max_prompt_length)
        if not len(self.kept):
            raise DataError(
                f"{', '.join(names)}: none of {len(self.rows)} prompts has at most {max_prompt_length} tokens: raise"
                " trainer.max_prompt_length"
            )

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, item: int) -> tuple[list[dict[str, Any]], str | None, dict[str, Any], str]:
        number = int(self.kept[item])
        extras, _ = self.rows.as_written(number, dict(self.rows[number]), (self.prompt_key, TOOLS))
        messages, env_class = extras.pop(self.prompt_key), extras.pop(self.env_class_key, None)
        if self.adapters:
            extras[ADAPTER_KEY] = extras.get(ADAPTER_KEY) or self.adapters[0]
        return self.form.fitted(messages), env_class, extras, str(number)

    def adapters_of(self, uids: Sequence[str]) -> list[str]:
        """Return the name of the adapter for each uid; [] if adapters have no names."""
        if not self.adapters or ADAPTER_KEY not in self.rows.column_names:
            return [self.adapters[0]] * len(uids) if self.adapters else []
        return [self.rows[_row_of(uid)].get(ADAPTER_KEY) or self.adapters[0] for uid in uids]

    def teachers_of(self, uids: Sequence[str]) -> list[str]:
        """Return the teacher for each uid, "" if the row names none; [] without the column ``teacher``."""
        if TEACHER_KEY not in self.rows.column_names:
            return []
        return [self.rows[_row_of(uid)].get(TEACHER_KEY) or "" for uid in uids]

    def roles_of(self, uids: Sequence[str]) -> list[str]:
        """Return the column ``role`` for each uid, "" where it is missing."""
        if ROLE_KEY not in self.rows.column_names:
            return [""] * len(uids)
        return [self.rows[_row_of(uid)].get(ROLE_KEY) or "" for uid in uids]

    def hints_of(self, uids: Sequence[str], column: str) -> list[str]:
        """Return the text in ``column`` for each uid. Raises DataError for a row without one."""
        hints: dict[str, str] = {}
        for uid in dict.fromkeys(uids):
            hint = self.rows[_row_of(uid)].get(column)
            if not isinstance(hint, str):
                raise DataError(
                    f"row {uid}: trainer.algorithm.distillation.demonstration needs text in the column {column!r}, "
                    f"the row has {hint!r:.40}; the data has {', '.join(self.rows.column_names)}"
                )
            hints[uid] = hint
        return [hints[uid] for uid in uids]

    def hint_tokens(self, hint: str) -> list[int]:
        """Return the tokens of a hint as a system message, in the template of the prompts."""
        message = {"role": "system", "content": hint}
        settings = self._render | {"add_generation_prompt": False, "tokenize": True, "return_dict": False}
        return list(render(self.tokenizer, [message], **settings))

    def env_classes(self, default: str) -> set[str]:
        """Return the environments of all rows; ``default`` for rows without one."""
        if self.env_class_key not in self.rows.column_names:
            return {default}
        return {row.get(self.env_class_key) or default for row in self.rows.each([self.env_class_key])}

    def rows_without_reward_spec(self, default: str) -> Counter[str]:
        """Count the rows without ``reward_spec`` of each environment."""
        rows = self.rows.each([self.env_class_key, REWARD_SPEC])
        return Counter(row.get(self.env_class_key) or default for row in rows if not row.get(REWARD_SPEC))

    def values_of(self, column: str, missing: str = UNKNOWN) -> list[str]:
        """Return the different values of a column, as texts, in alphabetical order; ``missing`` for rows without."""
        if column not in self.rows.column_names:
            return [missing]
        values = [row.get(column, missing) for row in self.rows.each([column])]
        return sorted({str(values[number]) for number in self.kept.tolist()})

    @property
    def sampled_rows(self) -> SampledRows:
        """What a sampler knows of the rows."""
        return SampledRows(self.rows, self.names, self.kept)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size and content hash of each file."""
        return self.rows.fingerprint

    def collate_fn(self, items: Sequence[tuple[Any, Any, Any, str]]) -> list[dict[str, Any]]:
        """Return the items as entries ``{prompt, env_class, env_extras, uid}``."""
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": uid}
            for prompt, env_class, extras, uid in items
        ]

    def _by_length(self, cache: RowCache, say: Callable[[str], None]) -> np.ndarray:
        """Return the numbers of the rows to keep, by the lengths of an earlier run on these rows if there are some."""
        of = {
            "files": [file["sha256"] for file in self.fingerprint],
            "rows": [*self.rows.ends, *(name for name in self.names if Path(name).suffix.lower() not in READERS)],
            "tokenizer": tokenizer_digest(self.tokenizer, self._render["template"]),
            "settings": [self._render, self.prompt_key, self.env_class_key, self.strict],
        }
        if not of["tokenizer"]:
            return self._short_enough(None, say)
        here = Path(__file__).parent
        sources = [here / f"{name}.py" for name in ("prompts", "row_files", "messages", "message_form", "tokenizer")]
        with cache.kept("prompts", sources, **of) as entry:
            file = None if entry is None else entry.read("lengths")
            if file is None:
                lengths: list[np.ndarray] = []
                kept = self._short_enough(None, say, lengths)
                self.rows.require_unchanged()
                if entry and cache.make_room(4 * len(self.rows)):
                    entry.write("lengths", {"lengths": np.concatenate(lengths)}, self.notes)
                return kept
            self.notes.update(file.about)
            return np.flatnonzero(file["lengths"] <= self.max_prompt_length)

    def _short_enough(
        self, enough: int | None, say: Callable[[str], None], counted: list[np.ndarray] | None = None
    ) -> np.ndarray:
        """Check and tokenize every prompt until ``enough`` are found; return the numbers of the rows to keep. Their
        lengths, int32, are added to ``counted``."""
        kept, first, missing = [], 0, enough
        for lengths, notes in self._measured_parts(in_processes=enough is None, say=say):
            self.notes.update(notes)
            kept.append(first + np.flatnonzero(lengths <= self.max_prompt_length))
            if counted is not None:
                counted.append(lengths)
            first += len(lengths)
            if missing is not None and (missing := missing - len(kept[-1])) <= 0:
                break
        return np.concatenate(kept) if kept else np.zeros(0, np.int64)

    def _measured_parts(self, *, in_processes: bool, say: Callable[[str], None]) -> Iterator[Measured]:
        """Yield :meth:`_measured` of all rows in order; of many rows, if ``in_processes``, by all processor cores."""
        parts = range(0, len(self.rows), BATCH_ROWS)
        done = 0
        if in_processes and len(self.rows) >= IN_PROCESSES_FROM and len(os.sched_getaffinity(0)) > 1:
            try:
                for result in RowProcesses(self._measured, parts).results():
                    done += 1
                    yield result
            except RuntimeError as error:
                say(f"data: prompts are tokenized by this process alone: {error}")
        yield from map(self._measured, parts[done:])

    def _measured(self, first: int) -> Measured:
        """Check and tokenize the thousand rows from ``first`` on."""
        columns = [self.prompt_key, self.env_class_key, REWARD_SPEC, TOOLS]
        batch = self.rows.part(first, min(first + BATCH_ROWS, len(self.rows)), columns)
        for number, row in enumerate(batch, first):
            if problem := row_problem(row, self.prompt_key, self.env_class_key):
                raise DataError(f"{self.rows.place(number)}: {problem}")
        notes: Counter[str] = Counter()
        texts = [self._rendered(row, number, notes) for number, row in enumerate(batch, first)]
        tokens = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return np.asarray([len(ids) for ids in tokens], np.int32), notes

    def _rendered(self, row: dict[str, Any], number: int, counted: Counter[str]) -> str:
        """Return the text of a prompt, and count what the template leaves out of it in ``counted``."""
        row, nulls = self.rows.as_written(number, row, (self.prompt_key, TOOLS))
        tools = declared_tools(row.get(TOOLS))
        said = Said()
        try:
            messages = self.form.fitted(row[self.prompt_key], said)
            settings = self._render | {"add_generation_prompt": True, "tokenize": False}
            text: Any = render(self.tokenizer, messages, **(settings | {"tools": tools} if tools else settings))
        except DataError as error:
            raise DataError(f"{self.rows.place(number)}: {self.prompt_key}: {error}") from error
        except Exception as error:  # expressions and raise_exception of a template can raise anything
            raise DataError(
                f"{self.rows.place(number)}: the chat template cannot render {self.prompt_key}: {error}; change the "
                "row, or set generator.chat_template"
            ) from error
        unread = [f"nothing reads the key {name!r} of messages" for name in sorted(said.unread)]
        if unread and self.strict:
            raise DataError(f"{self.rows.place(number)}: {unread[0]}: remove it, or set data.strict_rows=false")
        notes = [*unread, *sorted(said.notes)]
        if nulls:
            notes.append("null fields that the columns' types add to tool calls and tools are left out")
        if tools and not self.form.writes_tools:
            notes.append("the chat template leaves out the tools")
        if any("function" not in tool for tool in tools):
            notes.append(BARE_TOOLS)
        if row.get(TOOLS) and not tools and row[TOOLS] not in EMPTY_TOOLS:
            notes.append(f"only the environment gets the column {TOOLS!r}, which describes no tools")
        counted.update(notes)
        return str(text)


def _row_of(uid: str) -> int:
    """Return the row number of a uid. If a batch repeats a prompt, the uid of the second copy is e.g. ``12#1``."""
    return int(uid.partition("#")[0])


def require_prompts(rows: Rows, name: str, prompt_key: str = "prompt") -> None:
    """Raise DataError if the prompt column is missing, or the first or last row has no valid prompt."""
    if prompt_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(
            f"{name}, row 0: no column {prompt_key!r}; the columns are {columns}: rename one, or set data.prompt_key"
        )
    for row in sorted({0, len(rows) - 1}):
        if problem := row_problem(rows[row], prompt_key):
            raise DataError(f"{rows.place(row)}: {problem}")


def require_known(rows: Rows, name: str, column: str, known: Sequence[str], key: str, *, needed: bool = False) -> None:
    """Raise DataError with file and row if ``column`` has a value outside ``known``, or is empty and ``needed``.

    ``key`` is the configuration key that defines ``known``. No-op if ``known`` is empty.
    """
    if not known:
        return
    there = f"{key} has {', '.join(known)}"
    if column not in rows.column_names:
        if needed:
            raise DataError(f"{name}, row 0: the column {column!r} is missing; {there}: add it to every row")
        return
    allowed = [*known] if needed else [*known, None, ""]
    for number, row in enumerate(rows.each([column])):
        if (value := row.get(column)) not in allowed:
            problem = f"{column} {value!r:.80} is unknown" if value else f"no {column} is named"
            raise DataError(f"{rows.place(number)}: {problem}; {there}: name one of them, or add it to {key}")


def row_problem(row: Mapping[str, Any], prompt_key: str = "prompt", env_class_key: str = "env_class") -> str | None:
    """Return the problem of a row that every environment would have with it; None if it is valid."""
    if problem := messages_problem(row.get(prompt_key)):
        return f"{prompt_key} {problem}"
    if not isinstance(row.get(env_class_key), str | None):
        return f"{env_class_key} is {row[env_class_key]!r:.80}, it must be the id of an environment"
    if not isinstance(row.get(REWARD_SPEC), dict | None):
        return f"{REWARD_SPEC} is {row[REWARD_SPEC]!r:.80}, it must be an object, such as {{'ground_truth': …}}"
    return None
