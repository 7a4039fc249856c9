"""The loader of a run: prompts by their number, in an order that a resumed run continues exactly.

Prompts are numbered from 0 over the whole run; ``batch_size`` of them make a batch. A :class:`Sampler` orders them.
For an :class:`AdaptiveSampler` :class:`Draws` keeps the observations in the order of the prompts, so that the draws do
not depend on when samples finish.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from skyrl_megatron.config.resolve import generates_ahead
from skyrl_megatron.data.samplers import KEY, AdaptiveSampler, Sampler, Shuffle, make_sampler
from skyrl_megatron.errors import DataError, SkyRLMegatronError, SkyRLMegatronWarning, with_origin

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


class Items(Protocol):
    """The dataset of a loader."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Any: ...


class PromptLoader:
    """A loader whose iteration yields the remaining batches of the current epoch, then moves to the next epoch.

    ``sampler``: None shuffles each epoch anew by ``seed``. ``name``: of the sampler and its options, for checkpoints.
    ``lag``: batches that may be sampled ahead of the observations of an adaptive sampler. ``drop_last`` drops an
    incomplete last batch. A row that a batch repeats gets the uid ``UID#NUMBER`` there. Raises DataError if an epoch
    is smaller than one batch.
    """

    def __init__(
        self,
        dataset: Items,
        batch_size: int,
        *,
        seed: int = 0,
        sampler: Sampler | None = None,
        name: str = "shuffle",
        lag: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.name = dataset, batch_size, seed, name
        self.sampler = Shuffle(cast(Any, dataset), batch_size, seed, None) if sampler is None else sampler
        self.drop_last = drop_last
        self.draws = Draws(self.sampler, batch_size, lag) if isinstance(self.sampler, AdaptiveSampler) else None
        self.epoch = 0
        """Epoch of the next batch, from 0."""
        self.batch = 0
        """Number of the next batch in its epoch, from 0."""
        self._orders: dict[int, np.ndarray] = {}
        if not len(self):
            raise DataError(
                f"{len(self.sampler)} prompts do not fill one batch of {batch_size}: lower trainer.train_batch_size,"
                " or add prompts to data.train_data"
            )
        if drop_last and self.sampler.same_order and (rest := len(self.sampler) % batch_size):
            warnings.warn(
                f"{KEY}={name}: the last {rest} of {len(self.sampler)} prompts fill no batch of {batch_size}, and are"
                " never trained: the order is the same in each epoch. Choose a trainer.train_batch_size that divides"
                " their number, or another sampler",
                SkyRLMegatronWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (0 if self.drop_last or not rest else 1)

    def __iter__(self) -> Iterator[Any]:
        while self.batch < len(self):
            rows = self._rows(self.epoch, self.batch, waits=False)
            assert rows is not None
            self.batch += 1
            yield self._entries(rows)
        self.epoch, self.batch = self.epoch + 1, 0

    def prompt(self, number: int) -> Any:
        """Return the entry of prompt ``number``, counted from 0 over all epochs. Does not change the position.

        Call it only if it is :meth:`ready`.
        """
        batch, place = divmod(number, self.batch_size)
        rows = self._rows(*divmod(batch, len(self)))
        assert rows is not None, f"prompt {number} depends on observations that are missing"
        return self._entries(rows[: place + 1], only_last=True)[0]

    def ready(self, number: int) -> bool:
        """Return whether the observations on which prompt ``number`` depends are known."""
        return self.draws is None or self.draws.rows(number // self.batch_size) is not None

    def recall(self, number: int, uid: str) -> Any:
        """Return the entry of prompt ``number``, which was recorded with ``uid``. An adaptive order takes the record's
        prompt, if the data has it: it was drawn after observations that may be lost."""
        if self.draws is None or (position := self._position(uid)) is None:
            return self.prompt(number)
        self.draws.pin(number, position)
        return self._entries(np.asarray([position]))[0] | {"uid": uid}

    def seek(self, number: int) -> None:
        """Move to the batch that contains prompt ``number``, see :meth:`prompt`."""
        self.epoch, self.batch = divmod(number // self.batch_size, len(self))

    # ------------------------------------------------------------------ observations, for adaptive samplers
    def observe(self, number: int, rewards: Sequence[float] | None) -> None:
        """Record the total rewards of the valid samples of prompt ``number``. None or []: it gives no observation.
        Only the first call for a number counts. May be called from any thread."""
        if self.draws is not None:
            self.draws.observe(number, rewards)

    def observe_batch(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Record the rewards, by uid, of the batch that the iteration yielded last."""
        if self.draws is None or self.number == 0:
            return
        first = self.number - self.batch_size
        rows = self.draws.rows(first // self.batch_size, waits=False)
        assert rows is not None
        for number, uid in enumerate(self._uids(rows), first):
            self.draws.observe(number, rewards.get(uid))

    def metrics(self) -> dict[str, float]:
        """Return ``sampler/…`` of an adaptive sampler, else {}."""
        return {} if self.draws is None else self.draws.metrics()

    # ------------------------------------------------------------------ position
    @property
    def number(self) -> int:
        """Number of the first prompt of the next batch, see :meth:`prompt`."""
        return (self.epoch * len(self) + self.batch) * self.batch_size

    @property
    def finished_epochs(self) -> int:
        """Number of epochs whose batches have all been used."""
        return self.epoch + (self.batch == len(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, the settings that determine its order, the observations of an adaptive
        sampler, and fingerprints of the files."""
        state = {"epoch": self.epoch, "batch": self.batch, **self._identity(), "files": self._files}
        return state if self.draws is None else state | {"draws": self.draws.state(self.number // self.batch_size)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Warns if the contents of files have changed.

        Raises DataError if number of rows, batch size, seed, sampler or drop_last differ.
        """
        warn_of_changes(state.get("files"), self._files)
        for key, value in self._identity().items():
            # checkpoints before there were samplers have no entry
            if state.get(key, "shuffle" if key == "sampler" else None) != value:
                raise DataError(
                    f"the data loader has {key}={value}, but {key}={state.get(key)} in the checkpoint: resume with the"
                    " same data, batch size, seed and sampler, or start with trainer.resume_mode=none (skyrl-megatron"
                    " convert makes a model of these weights)"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        if self.draws is not None:
            self.draws.load_state(state["draws"])

    @property
    def _files(self) -> list[dict[str, Any]]:
        return getattr(self.dataset, "fingerprint", [])

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "sampler": self.name,
            "drop_last": self.drop_last,
        }

    # ------------------------------------------------------------------ rows
    def _rows(self, epoch: int, batch: int, *, waits: bool = True) -> np.ndarray | None:
        """Return the rows of a batch. None if observations are missing and it ``waits`` for them."""
        if self.draws is not None:
            return self.draws.rows(epoch * len(self) + batch, waits=waits)
        if epoch not in self._orders:
            # two epochs are kept, because an asynchronous run looks ahead over the end of one
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = checked_rows(self.sampler, partial(self.sampler.epoch, epoch), len(self.sampler))
        return self._orders[epoch][batch * self.batch_size : (batch + 1) * self.batch_size]

    def _entries(self, rows: np.ndarray, *, only_last: bool = False) -> list[Any]:
        found = rows.tolist()
        items = [self.dataset[row] for row in (found[-1:] if only_last else found)]
        entries: list[Any] = list(getattr(self.dataset, "collate_fn", list)(items))
        # a row that is drawn twice is two prompts: their groups must not be one
        if len(set(found)) < len(found):
            for entry, uid in zip(entries, self._uids(rows)[-len(entries) :], strict=True):
                entry["uid"] = uid
        return entries

    def _uids(self, rows: np.ndarray) -> list[str]:
        """Return the uids of the rows of a batch, which differ."""
        seen = Counter[int]()
        uids = []
        for uid in self.sampler.rows.uids[rows].tolist():
            uids.append(f"{uid}#{seen[uid]}" if seen[uid] else str(uid))
            seen[uid] += 1
        return uids

    def _position(self, uid: str) -> int | None:
        plain = uid.partition("#")[0]
        return self.sampler.rows.position(int(plain)) if plain.isdecimal() else None


def run_loader(cfg: SkyRLTrainConfig, dataset: Items) -> PromptLoader:
    """Return the loader of a run, with the sampler of ``data.sampler``. Raises ConfigError, DataError."""
    name, options = cfg.data.sampler, cfg.data.sampler_options
    batch, seed = cfg.trainer.train_batch_size, cfg.trainer.seed
    if name == "shuffle" and not options:
        return PromptLoader(dataset, batch, seed=seed)
    if (rows := getattr(dataset, "sampled_rows", None)) is None:
        raise DataError(f"{KEY}={name} needs a PromptDataset, but the run's dataset is a {type(dataset).__name__}")
    sampler = make_sampler(name, options, rows, batch, seed)
    lag = cfg.trainer.fully_async.max_staleness_steps if generates_ahead(cfg) else _oversampling_lag(cfg)
    named = f"{name} {json.dumps(options, sort_keys=True, default=str)}" if options else name
    return PromptLoader(dataset, batch, seed=seed, sampler=sampler, name=named, lag=lag)


def _oversampling_lag(cfg: SkyRLTrainConfig) -> int:
    """Return how many batches of prompts may be started before all prompts of a batch are observed."""
    given = cfg.trainer.oversampling
    if not given.ratio:
        return 0
    steps = 1 if given.unfinished == "drop" else given.max_staleness_steps + 1
    return steps * math.ceil(1 + given.ratio)


class Draws:
    """The batches that an adaptive sampler has drawn, and the observations of their prompts.

    Batch k is drawn after the observations of all prompts of the batches before k - ``lag``, in their order. All
    methods may be called from any thread.
    """

    def __init__(self, sampler: AdaptiveSampler, batch: int, lag: int) -> None:
        self.sampler, self.batch, self.lag = sampler, batch, lag
        self.drawn: dict[int, np.ndarray] = {}
        """Batch → its rows, from the first batch that is not observed as a whole, or still to be taken."""
        self.scores: dict[int, float | None] = {}
        """Number → score of a prompt that the sampler has not been given yet; None: it gives no observation."""
        self.pinned: dict[int, int] = {}
        """Number → row, for prompts that another process drew."""
        self.next, self.observed = 0, 0  # the next batch to draw; all batches before the other one are observed
        self._lock = threading.RLock()

    def rows(self, batch: int, *, waits: bool = True) -> np.ndarray | None:
        """Return the rows of a batch, [batch] int64. If observations are missing, return None, or do without them
        unless it ``waits``."""
        with self._lock:
            while self.next <= batch:
                # in the order of batches: the same observations give the same draws, whatever finished first
                while self.observed < self.next - self.lag:
                    if not self._give(self.observed, waits):
                        return None
                self.drawn[self.next] = checked_rows(self.sampler, partial(self.sampler.draw, self.next), self.batch)
                self.next += 1
            rows = self.drawn[batch].copy()
            for number in range(self.batch):
                rows[number] = self.pinned.get(batch * self.batch + number, rows[number])
            return rows

    def _give(self, batch: int, waits: bool) -> bool:
        """Give the sampler the observations of a batch. Returns False if it ``waits`` for some."""
        numbers = range(batch * self.batch, (batch + 1) * self.batch)
        if waits and any(number not in self.scores for number in numbers):
            return False
        for number, row in zip(numbers, self.drawn[batch].tolist(), strict=True):
            score, row = self.scores.pop(number, None), self.pinned.get(number, row)
            if score is not None:
                _ask(self.sampler, partial(self.sampler.observe, row, score))
        self.observed += 1
        return True

    def observe(self, number: int, rewards: Sequence[float] | None) -> None:
        """See :meth:`PromptLoader.observe`."""
        with self._lock:
            # observed already, or given without it: a second observation would count twice
            if number in self.scores or number < self.observed * self.batch:
                return
            score = None
            if rewards is not None and len(rewards):
                values = np.asarray(rewards, np.float64)
                score = float(_ask(self.sampler, partial(self.sampler.score, values)))
                if not math.isfinite(score):
                    raise DataError(
                        f"{KEY}: {type(self.sampler).__name__} gave rewards {rewards} the score {score}: return a "
                        "finite number"
                    )
            self.scores[number] = score

    def pin(self, number: int, row: int) -> None:
        """Use a row as prompt ``number``."""
        with self._lock:
            rows = self.rows(number // self.batch)
            if rows is None or rows[number % self.batch] != row:
                self.pinned[number] = row

    def metrics(self) -> dict[str, float]:
        """See :meth:`PromptLoader.metrics`."""
        with self._lock:
            return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()}

    def state(self, batch: int) -> dict[str, Any]:
        """Return everything as values that JSON can represent, and forget what is not needed from ``batch`` on."""
        with self._lock:
            # batches that a resumed run takes again, and those whose observations are still missing
            first = min(batch, self.observed)
            self.drawn = {number: rows for number, rows in self.drawn.items() if number >= first}
            self.pinned = {number: row for number, row in self.pinned.items() if number >= first * self.batch}
            return {
                "next": self.next,
                "observed": self.observed,
                "drawn": [[number, rows.tolist()] for number, rows in self.drawn.items()],
                "scores": [[number, score] for number, score in self.scores.items()],
                "pinned": [[number, row] for number, row in self.pinned.items()],
                "sampler": self.sampler.state(),
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        with self._lock:
            self.next, self.observed = int(state["next"]), int(state["observed"])
            self.drawn = {number: np.asarray(rows, np.int64) for number, rows in state["drawn"]}
            self.scores, self.pinned = dict(state["scores"]), dict(state["pinned"])
            self.sampler.load_state(state["sampler"])


def _ask(sampler: Sampler, method: Callable[[], Any]) -> Any:
    """Call a method of a sampler. Raises DataError with its origin for errors of a plugin."""
    try:
        return method()
    except SkyRLMegatronError:
        raise
    except Exception as error:
        raise DataError(f"{KEY}: {type(sampler).__name__} failed ({with_origin(error)})") from error


def checked_rows(sampler: Sampler, method: Callable[[], Any], count: int) -> np.ndarray:
    """Return the positions that a sampler returns. Raises DataError unless they are [count] valid positions."""
    drawn = np.asarray(_ask(sampler, method))
    rows = len(sampler.rows)
    if drawn.shape != (count,) or drawn.dtype.kind not in "iu" or not ((drawn >= 0) & (drawn < rows)).all():
        got = f"{drawn.dtype} {list(drawn.shape)}"
        raise DataError(
            f"{KEY}: {type(sampler).__name__} must return [{count}] positions of rows, 0 to {rows - 1}; got {got}"
            + (f" from {drawn.min()} to {drawn.max()}" if drawn.size and drawn.dtype.kind in "iuf" else "")
        )
    return drawn.astype(np.int64)


def warn_of_changes(before: Sequence[Mapping[str, Any]] | None, now: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the fingerprints of data files differ from those in a checkpoint.

    ``before`` is None for a checkpoint without fingerprints.
    """
    if before is None or list(before) == list(now):
        return
    files_before = [dict(file) for file in before]
    changed = [file["name"] for file in now if dict(file) not in files_before]
    changed += [file["name"] for file in before if file["name"] not in {file_now["name"] for file_now in now}]
    what = f"{', '.join(changed)} changed" if changed else "the order of the data files changed"
    warnings.warn(
        f"{what} since the checkpoint was saved: the run continues at the same row numbers, which may be other rows",
        SkyRLMegatronWarning,
        stacklevel=3,
    )
