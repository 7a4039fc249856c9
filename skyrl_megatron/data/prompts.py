"""Prompts from files: rows ``{prompt: chat messages, env_class, reward_spec, extra_info, …}``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config.adapters import ADAPTER_KEY
from skyrl_megatron.config.adapters import KEY as ADAPTERS
from skyrl_megatron.errors import DataError, HubError
from skyrl_megatron.hub import Repo, data_folder, data_source

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TEACHER_KEY, TEACHERS = "teacher", "trainer.teacher.models"
"""A column, and the setting that lists what it may name."""
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
BATCH_ROWS = 1000


class PromptDataset:
    """The prompts of one or several sources, without those that are too long.

    ``datasets``: paths of parquet, json or jsonl files, or ``name[@revision][:subset][:split]`` of a data set on the
    Hugging Face hub or of a folder (split ``train`` unless given). ``hub_commits``: ``trainer.hub_commits``; ``say``
    gets the progress of downloads. Files are converted once to Arrow in the ``datasets`` cache and mapped into memory,
    and prompts are measured a thousand at a time, so that memory does not grow with the files. ``template`` and
    ``template_kwargs`` are what the generator renders prompts with; a prompt is kept if it has at most
    ``max_prompt_length`` tokens, the beginning of the answer included.

    An item is ``(messages, env_class, extras, uid)``: ``env_class`` is None where the row has none, ``extras`` are all
    other columns, ``uid`` is the row's number over all sources and does not depend on what was filtered.

    ``adapters``: names of the policy's adapters, where they have names: a row's ``adapter`` says which one answers it;
    with one adapter it may say nothing. Every item's extras name it.

    ``enough``: stop measuring once so many prompts are found, and hold only those (None: measure all).

    Raises DataError for files that are missing or cannot be read, and for rows without a prompt (file and row).
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
    ) -> None:
        from datasets import concatenate_datasets

        names = [datasets] if isinstance(datasets, str) else list(datasets)
        if not names:
            raise DataError("no dataset is given: set data.train_data")
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        self.tokenizer, self.max_prompt_length = tokenizer, max_prompt_length
        self._render = {"chat_template": template, **(template_kwargs or {})}
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: set"
                " generator.chat_template, or take the tokenizer of an instruction-tuned model"
            )
        sources = [load_source(name, num_workers, hub_commits or {}, say) for name in names]
        for name, source in zip(names, sources, strict=True):
            require_prompts(source, name, prompt_key)
            require_known(source, name, ADAPTER_KEY, adapters, ADAPTERS, needed=len(adapters) > 1)
        self.adapters = list(adapters)
        self.rows = _joined(sources, names, concatenate_datasets)
        self.kept = self._short_enough(names, [len(source) for source in sources], enough)
        self.num_filtered = 0 if enough is not None and len(self.kept) >= enough else len(self.rows) - len(self.kept)
        """Prompts left out because they are too long."""
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
        extras = dict(self.rows[number])
        messages, env_class = extras.pop(self.prompt_key), extras.pop(self.env_class_key, None)
        if self.adapters:
            extras[ADAPTER_KEY] = extras.get(ADAPTER_KEY) or self.adapters[0]
        return [_without_nulls(message) for message in messages], env_class, extras, str(number)

    def adapters_of(self, uids: Sequence[str]) -> list[str]:
        """Return the adapter that answers each of some items, by their uids; [] without several adapters."""
        if not self.adapters or ADAPTER_KEY not in self.rows.column_names:
            return [self.adapters[0]] * len(uids) if self.adapters else []
        column = self.rows.select_columns([ADAPTER_KEY])
        return [column[_row_of(uid)][ADAPTER_KEY] or self.adapters[0] for uid in uids]

    def teachers_of(self, uids: Sequence[str]) -> list[str]:
        """Return the teacher that judges the answers to each of some items, "" where a row names none; [] without such
        a column."""
        if TEACHER_KEY not in self.rows.column_names:
            return []
        column = self.rows.select_columns([TEACHER_KEY])
        return [column[_row_of(uid)][TEACHER_KEY] or "" for uid in uids]

    def env_classes(self, default: str) -> set[str]:
        """Return the environments that the rows name; ``default`` for rows that name none."""
        named = self.rows.unique(self.env_class_key) if self.env_class_key in self.rows.column_names else [None]
        return {name or default for name in named}

    def collate_fn(self, items: Sequence[tuple[Any, Any, Any, str]]) -> list[dict[str, Any]]:
        """Turn items into entries ``{prompt, env_class, env_extras, uid}``."""
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": uid}
            for prompt, env_class, extras, uid in items
        ]

    def _short_enough(self, names: Sequence[str], sizes: Sequence[int], enough: int | None) -> np.ndarray:
        """Check and measure every prompt, or until ``enough`` are found; return the numbers of the rows to keep."""
        kept, starts = [], np.cumsum([0, *sizes])
        for first, prompts in self._batches():
            for offset, messages in enumerate(prompts):
                if problem := _problem(messages):
                    source = int(np.searchsorted(starts, first + offset, side="right")) - 1
                    row = first + offset - int(starts[source])
                    raise DataError(f"{names[source]}, row {row}: {self.prompt_key} {problem}")
            texts = [
                self.tokenizer.apply_chat_template(
                    [_without_nulls(message) for message in messages],
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._render,
                )
                for messages in prompts
            ]
            lengths = [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
            kept.append(first + np.flatnonzero(np.asarray(lengths) <= self.max_prompt_length))
            if enough is not None and sum(map(len, kept)) >= enough:
                break
        return np.concatenate(kept) if kept else np.zeros(0, np.int64)

    def _batches(self) -> Iterator[tuple[int, list[Any]]]:
        only_prompts = self.rows.select_columns([self.prompt_key])
        for first in range(0, len(only_prompts), BATCH_ROWS):
            yield first, only_prompts[first : first + BATCH_ROWS][self.prompt_key]


def _row_of(uid: str) -> int:
    """Return the number of a row; a prompt that a batch has twice has a uid such as ``12#1`` the second time."""
    return int(uid.partition("#")[0])


def require_prompts(rows: Dataset, name: str, prompt_key: str = "prompt") -> None:
    """Raise DataError unless there is a column of prompts, with one in the first row and one in the last."""
    if prompt_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(f"{name}, row 0: no column {prompt_key!r}; the columns are {columns}")
    for row in sorted({0, len(rows) - 1}):
        if problem := _problem(rows[row][prompt_key]):
            raise DataError(f"{name}, row {row}: {prompt_key} {problem}")


def require_known(
    rows: Dataset, name: str, column: str, known: Sequence[str], key: str, *, needed: bool = False
) -> None:
    """Raise DataError, with file and row, where ``column`` of a row names none of ``known``, which ``key`` lists; or
    nothing, if ``needed``. No-op without any known."""
    if not known:
        return
    there = f"{key} has {', '.join(known)}"
    if column not in rows.column_names:
        if needed:
            raise DataError(f"{name}, row 0: no column {column!r} says which {column} it is for; {there}")
        return
    allowed = {*known} if needed else {*known, None, ""}
    if wrong := [each for each in rows.unique(column) if each not in allowed]:
        row = next(number for number, each in enumerate(rows[column]) if each == wrong[0])
        problem = f"{column} {wrong[0]!r} is unknown" if wrong[0] else f"no {column} is named"
        raise DataError(f"{name}, row {row}: {problem}; {there}")


def load_source(
    name: str,
    num_workers: int = 1,
    hub_commits: Mapping[str, str] | None = None,
    say: Callable[[str], None] = logger.info,
) -> Dataset:
    """Open a file, or a data set of a folder or the hub. Raises DataError when it is missing, empty or unreadable."""
    from datasets import DatasetDict, load_dataset

    path = Path(name).expanduser()
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        return _load_folder(name, hub_commits or {}, say)
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; prepare it with python -m skyrl_megatron.data.prepare, or name another"
        )
    if reader == "json" and _begins_with_null(path):
        raise DataError(f"{path} begins with null, where a row must be: every row is an object with a prompt")
    try:
        found = load_dataset(reader, data_files=str(path), num_proc=num_workers if num_workers > 1 else None)
    except Exception as error:
        cause = error.__cause__ or error
        if reader == "parquet" and _has_no_rows(path):
            raise DataError(f"{path} has no rows: write it again, or name another") from error
        raise DataError(f"{path} cannot be read as {reader}: {cause}") from error
    assert isinstance(found, DatasetDict)
    if not len(found["train"]):
        raise DataError(f"{path} has no rows: write it again, or name another")
    return found["train"]


def _begins_with_null(path: Path) -> bool:
    """Return whether the first row is null, at which the reader of ``datasets`` 4 ends the process (SIGSEGV)."""
    with path.open("rb") as file:
        return re.match(rb"(\xef\xbb\xbf)?\s*\[?\s*null\b", file.read(4096)) is not None


def _has_no_rows(path: Path) -> bool:
    """Return whether a file is whole parquet without rows, which the reader of ``datasets`` fails on."""
    from pyarrow import ArrowException, parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == 0)
    except (ArrowException, OSError):
        return False


def _load_folder(name: str, hub_commits: Mapping[str, str], say: Callable[[str], None]) -> Dataset:
    from datasets import load_dataset

    source = data_source(name)
    if source is None:
        raise DataError(
            f"{name} is neither a file ({', '.join(READERS)}) or folder here nor a data set of the Hugging Face hub "
            "(org/name[@revision][:subset][:split])"
        )
    try:
        folder = source.where
        if isinstance(folder, Repo):
            folder = data_folder(folder, source.subset, hub_commits, say=say)
        return load_dataset(str(folder), source.subset, split=source.split)
    except HubError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:
        raise DataError(f"{name} cannot be read: {error.__cause__ or error}") from error


def _joined(sources: list[Dataset], names: Sequence[str], concatenate: Any) -> Dataset:
    try:
        return sources[0] if len(sources) == 1 else concatenate(sources)
    except ValueError as error:
        raise DataError(f"the columns of {', '.join(names)} do not fit together: {error}") from error


def _problem(messages: Any) -> str | None:
    """Say what is wrong with a prompt; None if nothing is."""
    if messages is None or (isinstance(messages, list) and not messages):
        return "is empty"
    if not isinstance(messages, list):
        return f"is {messages!r:.80}, it must be a list of messages with role and content"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") is None or message.get("content") is None:
            return f"holds {message!r:.80}, which is no message with role and content"
    return None


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a message that Arrow added because other messages have them."""
    return {key: value for key, value in message.items() if value is not None}
