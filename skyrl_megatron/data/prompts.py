"""Prompts from files, and batches of them in an order that a resumed run continues exactly.

A row is ``{prompt: chat messages, env_class, reward_spec, extra_info, …}``.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.config.roles import ADAPTERS_KEY as ADAPTERS
from skyrl_megatron.data.row_files import JoinedRows, Rows, load_source
from skyrl_megatron.data.tokenizer import render
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

TEACHER_KEY, TEACHERS = "teacher", "trainer.teacher.models"
"""A column, and the setting that lists what it may name."""
REWARD_SPEC = "reward_spec"


class PromptDataset:
    """The prompts of one or several sources, without those that are too long.

    ``datasets``: paths of parquet, json or jsonl files, or ``name[@revision][:subset][:split]`` of a data set on the
    Hugging Face hub or of a folder (split ``train`` unless given). ``hub_commits``: ``trainer.hub_commits``; ``say``
    gets the progress of downloads. Rows are read when they are needed (:mod:`skyrl_megatron.data.row_files`), and
    prompts are measured a thousand at a time, so that memory does not grow with the files. ``template`` and
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
        names = [datasets] if isinstance(datasets, str) else list(datasets)
        if not names:
            raise DataError("no dataset is given: set data.train_data")
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        self.tokenizer, self.max_prompt_length = tokenizer, max_prompt_length
        self._render: dict[str, Any] = {"template": template, **(template_kwargs or {})}
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
        self.rows: Rows = JoinedRows(sources)
        self.kept = self._short_enough(enough)
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
        return [_as_rendered(message) for message in messages], env_class, extras, str(number)

    def adapters_of(self, uids: Sequence[str]) -> list[str]:
        """Return the adapter that answers each of some items, by their uids; [] without several adapters."""
        if not self.adapters or ADAPTER_KEY not in self.rows.column_names:
            return [self.adapters[0]] * len(uids) if self.adapters else []
        return [self.rows[_row_of(uid)].get(ADAPTER_KEY) or self.adapters[0] for uid in uids]

    def teachers_of(self, uids: Sequence[str]) -> list[str]:
        """Return the teacher that judges the answers to each of some items, "" where a row names none; [] without such
        a column."""
        if TEACHER_KEY not in self.rows.column_names:
            return []
        return [self.rows[_row_of(uid)].get(TEACHER_KEY) or "" for uid in uids]

    def env_classes(self, default: str) -> set[str]:
        """Return the environments that the rows name; ``default`` for rows that name none."""
        if self.env_class_key not in self.rows.column_names:
            return {default}
        return {row.get(self.env_class_key) or default for row in self.rows.each([self.env_class_key])}

    def rows_without_reward_spec(self, default: str) -> Counter[str]:
        """Count, for each environment, the rows that have nothing to compare a response with."""
        rows = self.rows.each([self.env_class_key, REWARD_SPEC])
        return Counter(row.get(self.env_class_key) or default for row in rows if not row.get(REWARD_SPEC))

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size and hash of the contents of each file."""
        return self.rows.fingerprint

    def collate_fn(self, items: Sequence[tuple[Any, Any, Any, str]]) -> list[dict[str, Any]]:
        """Turn items into entries ``{prompt, env_class, env_extras, uid}``."""
        return [
            {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": uid}
            for prompt, env_class, extras, uid in items
        ]

    def _short_enough(self, enough: int | None) -> np.ndarray:
        """Check and measure every prompt, or until ``enough`` are found; return the numbers of the rows to keep."""
        kept, first = [], 0
        for batch in self.rows.batches([self.prompt_key, self.env_class_key, REWARD_SPEC]):
            for number, row in enumerate(batch, first):
                if problem := row_problem(row, self.prompt_key, self.env_class_key):
                    raise DataError(f"{self.rows.place(number)}: {problem}")
            texts = [self._rendered(row[self.prompt_key], number) for number, row in enumerate(batch, first)]
            lengths = [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
            kept.append(first + np.flatnonzero(np.asarray(lengths) <= self.max_prompt_length))
            first += len(batch)
            if enough is not None and sum(map(len, kept)) >= enough:
                break
        return np.concatenate(kept) if kept else np.zeros(0, np.int64)

    def _rendered(self, messages: Iterable[Mapping[str, Any]], number: int) -> str:
        try:
            text: Any = render(
                self.tokenizer,
                [_as_rendered(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
                **self._render,
            )
        except Exception as error:  # whatever a template's expressions and its own raise_exception raise
            raise DataError(
                f"{self.rows.place(number)}: the chat template cannot render {self.prompt_key}: {error}"
            ) from error
        return str(text)


def _row_of(uid: str) -> int:
    """Return the number of a row; a prompt that a batch has twice has a uid such as ``12#1`` the second time."""
    return int(uid.partition("#")[0])


def require_prompts(rows: Rows, name: str, prompt_key: str = "prompt") -> None:
    """Raise DataError unless there is a column of prompts, with one in the first row and one in the last."""
    if prompt_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(f"{name}, row 0: no column {prompt_key!r}; the columns are {columns}")
    for row in sorted({0, len(rows) - 1}):
        if problem := row_problem(rows[row], prompt_key):
            raise DataError(f"{rows.place(row)}: {problem}")


def require_known(rows: Rows, name: str, column: str, known: Sequence[str], key: str, *, needed: bool = False) -> None:
    """Raise DataError, with file and row, where ``column`` of a row names none of ``known``, which ``key`` lists; or
    nothing, if ``needed``. No-op without any known."""
    if not known:
        return
    there = f"{key} has {', '.join(known)}"
    if column not in rows.column_names:
        if needed:
            raise DataError(f"{name}, row 0: no column {column!r} says which {column} it is for; {there}")
        return
    allowed = [*known] if needed else [*known, None, ""]
    for number, row in enumerate(rows.each([column])):
        if (value := row.get(column)) not in allowed:
            problem = f"{column} {value!r:.80} is unknown" if value else f"no {column} is named"
            raise DataError(f"{rows.place(number)}: {problem}; {there}")


def row_problem(row: Mapping[str, Any], prompt_key: str = "prompt", env_class_key: str = "env_class") -> str | None:
    """Say what is wrong with a row, whatever its environment; None if nothing is."""
    if problem := _problem(row.get(prompt_key)):
        return f"{prompt_key} {problem}"
    if not isinstance(row.get(env_class_key), str | None):
        return f"{env_class_key} is {row[env_class_key]!r:.80}, it must be the id of an environment"
    if not isinstance(row.get(REWARD_SPEC), dict | None):
        return f"{REWARD_SPEC} is {row[REWARD_SPEC]!r:.80}, it must be an object, such as {{'ground_truth': …}}"
    return None


def _problem(messages: Any) -> str | None:
    """Say what is wrong with a prompt; None if nothing is."""
    if messages is None or (isinstance(messages, list) and not messages):
        return "is empty"
    if not isinstance(messages, list):
        return f"is {messages!r:.80}, it must be a list of messages with role and content"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") is None or not _says_something(message):
            return f"holds {message!r:.80}, which is no message with role and content"
        if not isinstance(message["role"], str) or not message["role"]:
            return f"holds a message whose role is {message['role']!r:.80}, it must be text"
        if not isinstance(message.get("content"), str | None):
            return f"holds a message whose content is {message['content']!r:.80}, it must be text"
    return None


def _says_something(message: Mapping[str, Any]) -> bool:
    """Return whether a message has content, or calls tools instead."""
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are null: Arrow adds those that other messages have. A message that only
    calls tools has the content null, as OpenAI writes it and templates expect it."""
    rendered = {key: value for key, value in message.items() if value is not None}
    rendered.setdefault("content", None)
    return rendered


class Items(Protocol):
    """The data set of a loader."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Any: ...


class PromptLoader:
    """Iterating yields the batches of one epoch, from where the loader stands; the next iteration is the next epoch.

    The order of an epoch follows from ``seed`` and the epoch's number alone, so the position is two numbers. With
    ``drop_last`` an incomplete batch at the end is left out. Raises DataError when not even one batch fits.
    """

    def __init__(
        self, dataset: Items, batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0
        """Epoch of the next batch, from 0."""
        self.batch = 0
        """Number of the next batch in its epoch, from 0."""
        self._orders: dict[int, np.ndarray] = {}
        if not len(self):
            raise DataError(
                f"{len(dataset)} prompts do not fill one batch of {batch_size}: lower trainer.train_batch_size, or"
                " give more data"
            )

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (0 if self.drop_last or not rest else 1)

    def __iter__(self) -> Iterator[Any]:
        order = self._order(self.epoch)
        while self.batch < len(self):
            rows = order[self.batch * self.batch_size : (self.batch + 1) * self.batch_size]
            self.batch += 1
            items = [self.dataset[int(row)] for row in rows]
            yield getattr(self.dataset, "collate_fn", list)(items)
        self.epoch, self.batch = self.epoch + 1, 0

    def prompt(self, number: int) -> Any:
        """Return the prompt that comes ``number``-th (from 0) where all epochs follow one another, as a batch of one
        has it; the position stays."""
        epoch, place = divmod(number, len(self) * self.batch_size)
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = self._order(epoch)
        items = [self.dataset[int(self._orders[epoch][place])]]
        return getattr(self.dataset, "collate_fn", list)(items)[0]

    def seek(self, number: int) -> None:
        """Go to the batch that has the prompt which comes ``number``-th."""
        self.epoch, self.batch = divmod(number // self.batch_size, len(self))

    @property
    def number(self) -> int:
        """Number of the first prompt of the next batch, see :meth:`prompt`."""
        return (self.epoch * len(self) + self.batch) * self.batch_size

    @property
    def finished_epochs(self) -> int:
        """Count the epochs whose batches have all been taken."""
        return self.epoch + (self.batch == len(self))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the loader's position, what its order follows from, and fingerprints of the files."""
        return {"epoch": self.epoch, "batch": self.batch, **self._identity(), "files": self._files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises DataError when data, batch size or seed are not those of the state;
        warns where files have other contents."""
        warn_of_changes(state.get("files"), self._files)
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise DataError(
                    f"the checkpoint's data position has {key}={state.get(key)}, this run has {value}: resume with the"
                    " same data, batch size and seed, or start with trainer.resume_mode=none"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])

    @property
    def _files(self) -> list[dict[str, Any]]:
        return getattr(self.dataset, "fingerprint", [])

    def _identity(self) -> dict[str, int | bool]:
        return {
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _order(self, epoch: int) -> np.ndarray:
        rows = len(self.dataset)
        return np.random.default_rng([self.seed, epoch]).permutation(rows) if self.shuffle else np.arange(rows)


def warn_of_changes(before: Sequence[Mapping[str, Any]] | None, now: Sequence[Mapping[str, Any]]) -> None:
    """Warn of data files, by their fingerprints, that are not what they were when a checkpoint was saved.

    ``before`` is None in checkpoints that were saved without.
    """
    if before is None or list(before) == list(now):
        return
    known = [dict(file) for file in before]
    changed = [file["name"] for file in now if dict(file) not in known]
    changed += [file["name"] for file in before if file["name"] not in {each["name"] for each in now}]
    what = f"{', '.join(changed)} changed" if changed else "the order of the data files changed"
    warnings.warn(
        f"{what} since the checkpoint was saved: the run continues at the same row numbers, whose rows may be others",
        SkyRLMegatronWarning,
        stacklevel=3,
    )
