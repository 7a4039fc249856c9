"""Samplers: the order in which a run takes its prompts (``data.sampler``, with ``data.sampler_options``).

A sampler that is not adaptive orders the rows of each epoch (:meth:`Sampler.epoch`), from the seed and the number of
the epoch alone. An :class:`AdaptiveSampler` draws each batch from what the run has observed of the prompts so far. The
loader (:mod:`skyrl_megatron.data.loader`) gives it the observations in the order of the prompts, whenever they finish.

A plugin registers a class with ``skyrl_megatron.plugins.register_sampler``. Its ``Options``, a dataclass below
``BaseConfig``, says which options it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from skyrl_megatron.config.fields import Fraction, NonNegativeInt, Positive
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.data.messages import is_finite_number
from skyrl_megatron.errors import ConfigError, DataError, Problem, SkyRLMegatronError, with_origin
from skyrl_megatron.plugins import SAMPLERS

if TYPE_CHECKING:
    from skyrl_megatron.data.row_files import JoinedRows

KEY, OPTIONS = "data.sampler", "data.sampler_options"


class SampledRows:
    """What a sampler knows of the data: the rows that the run can take, in the order of the data sets.

    ``kept`` [n] int64: their numbers over all data sets, ascending; None: all. ``names``: of the data sets.
    ``limit``: the setting that left out the others.
    """

    def __init__(
        self,
        rows: JoinedRows,
        names: Sequence[str],
        kept: np.ndarray | None = None,
        limit: str = "trainer.max_prompt_length",
    ) -> None:
        self.rows, self.names, self.limit = rows, list(names), limit
        self.uids = np.arange(len(rows)) if kept is None else np.asarray(kept, np.int64)
        """[n] int64: uid of each row, its number over all data sets."""

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def sources(self) -> np.ndarray:
        """[n] int64: place of each row's data set in ``names``."""
        return np.searchsorted(np.asarray(self.rows.ends), self.uids, side="right")

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, None where a row has none. Raises DataError without such a column."""
        if name not in self.rows.column_names:
            raise DataError(
                f"{', '.join(self.names)}: no column {name!r}; there are {', '.join(self.rows.column_names)}: name "
                "one of them, or add the column"
            )
        values = [row.get(name) for row in self.rows.each([name])]
        return [values[uid] for uid in self.uids.tolist()]

    def position(self, uid: int) -> int | None:
        """Return the position of the row with this uid, None if the run cannot take it."""
        place = int(np.searchsorted(self.uids, uid))
        return place if place < len(self.uids) and self.uids[place] == uid else None


@dataclass
class NoOptions(BaseConfig):
    """A sampler without options."""


class Sampler:
    """A sampler whose order depends only on the seed. Positions count the rows of ``rows`` from 0.

    ``batch``: prompts of a step. Subclasses raise DataError for data, and ConfigError for options, that do not fit.
    """

    Options: ClassVar[type[BaseConfig]] = NoOptions
    """The dataclass of the options."""
    same_order: ClassVar[bool] = False
    """Whether every epoch has the same order."""

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: Any) -> None:
        self.rows, self.batch, self.seed, self.options = rows, batch, seed, options

    def __len__(self) -> int:
        """Return the number of prompts of an epoch."""
        return len(self.rows)

    def epoch(self, number: int) -> np.ndarray:
        """Return the positions of the rows of epoch ``number``, in order: [len(self)] int64."""
        raise NotImplementedError


class InOrder(Sampler):
    """The rows in the order of the data, in each epoch."""

    same_order = True

    def epoch(self, number: int) -> np.ndarray:
        """Return [rows] int64, see :class:`Sampler`."""
        return np.arange(len(self))


class Shuffle(Sampler):
    """All rows, shuffled anew for each epoch."""

    def epoch(self, number: int) -> np.ndarray:
        """Return [rows] int64, see :class:`Sampler`."""
        return np.random.default_rng([self.seed, number]).permutation(len(self))


@dataclass
class MixtureOptions(BaseConfig):
    """Options of ``mixture``."""

    weights: list[float] = field(default_factory=list)
    """Share of each data set of ``data.train_data``, in their order; scaled to a sum of 1."""


class Mixture(Sampler):
    """The data sets by weight, whatever their sizes: at any time each has had its share to within one prompt or two.

    The j-th prompt of data set s comes at the virtual time (j + u_s) / w_s, with u_s in [0, 1) from the seed (stride
    scheduling). A data set is shuffled anew whenever all its rows have been taken. An epoch is as many batches as the
    rows fill, and the next one continues there: a time that no batch takes could always be that of one data set.
    """

    Options = MixtureOptions

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: MixtureOptions) -> None:
        super().__init__(rows, batch, seed, options)
        weights, names = options.weights, rows.names
        if len(weights) != len(names):
            fix = f"data.train_data has {len(names)} data sets, so give as many weights, in their order"
            raise ConfigError([Problem(f"{OPTIONS}.weights", weights, fix)])
        if wrong := [weight for weight in weights if weight <= 0]:
            fix = f"a weight must be above 0, {wrong[0]} is not: remove that data set from data.train_data"
            raise ConfigError([Problem(f"{OPTIONS}.weights", weights, fix)])
        self.shares = np.asarray(weights) / np.sum(weights)
        self.starts = np.random.default_rng([seed, 0, len(names)]).random(len(names))
        sources = rows.sources
        self.members = [np.flatnonzero(sources == number) for number in range(len(names))]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # data set → (pass over it, order of its rows)
        if empty := [name for name, members in zip(names, self.members, strict=True) if not len(members)]:
            raise DataError(f"{empty[0]}: {rows.limit} leaves no row: change it, or remove the data set")

    def __len__(self) -> int:
        rows = len(self.rows)
        return rows - rows % self.batch or rows

    def epoch(self, number: int) -> np.ndarray:
        """Return [rows] int64, see :class:`Sampler`."""
        rows, sets = len(self), len(self.members)
        first, end = max(0, number * rows - sets), (number + 1) * rows + sets
        begun = [self._before(source, first) for source in range(sets)]
        counts = [self._before(source, end) - begun[source] for source in range(sets)]
        places = np.repeat(np.arange(sets), counts)
        draws = np.concatenate([begun[source] + np.arange(counts[source]) for source in range(sets)])
        order = np.lexsort((places, (draws + self.starts[places]) / self.shares[places]))
        order = order[number * rows - sum(begun) :][:rows]
        return np.asarray(
            [self._row(*pair) for pair in zip(places[order].tolist(), draws[order].tolist(), strict=True)]
        )

    def _before(self, place: int, time: int) -> int:
        """Return how many prompts of a data set come before a virtual time."""
        count = max(0, int(time * self.shares[place]) - 2)
        while (count + self.starts[place]) / self.shares[place] < time:
            count += 1
        return count

    def _row(self, place: int, draw: int) -> int:
        members = self.members[place]
        turn, at = divmod(draw, len(members))
        if place not in self._orders or self._orders[place][0] != turn:
            self._orders[place] = turn, np.random.default_rng([self.seed, place, turn]).permutation(len(members))
        return int(members[self._orders[place][1][at]])


@dataclass
class ListOptions(BaseConfig):
    """Options of ``list``."""

    path: str = ""
    """A text file with the row number of one prompt per line, counted over all data sets from 0 (the uid)."""


class FixedList(Sampler):
    """The rows that a file lists, in its order; an epoch is one pass over the list. A row may be listed repeatedly."""

    Options = ListOptions
    same_order = True

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: ListOptions) -> None:
        super().__init__(rows, batch, seed, options)
        key = f"{OPTIONS}.path"
        try:
            lines = Path(options.path).expanduser().read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError([Problem(key, options.path, f"cannot be read ({reason}): name a text file")]) from error
        found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
        self.order = np.asarray([self._position(key, number, line) for number, line in found], np.int64)

    def _position(self, key: str, number: int, line: str) -> int:
        problem, last = f"line {number} is {line!r:.40}", len(self.rows.rows) - 1
        if not line.isdecimal() or int(line) > last:
            fix = f"{problem}, which is no row: the rows are 0 to {last}"
            raise ConfigError([Problem(key, self.options.path, fix)])
        if (position := self.rows.position(int(line))) is None:
            fix = f"{problem}, which {self.rows.limit} leaves out: remove the line, or change the setting"
            raise ConfigError([Problem(key, self.options.path, fix)])
        return position

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, number: int) -> np.ndarray:
        """Return [rows] int64, see :class:`Sampler`."""
        return self.order


@dataclass
class EasyToHardOptions(BaseConfig):
    """Options of ``easy_to_hard``."""

    column: str = "difficulty"
    """The column with a number for each row, larger for harder prompts."""


class EasyToHard(Sampler):
    """The rows by a column with their difficulty, ascending, in each epoch. Equal ones are shuffled anew. Rows that
    fill no batch are left out at random, not at the end, where they would always be the hardest."""

    Options = EasyToHardOptions

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: EasyToHardOptions) -> None:
        super().__init__(rows, batch, seed, options)
        values = rows.column(options.column)
        for uid, value in zip(rows.uids.tolist(), values, strict=True):
            if not (isinstance(value, bool) or is_finite_number(value)):
                raise DataError(
                    f"{rows.rows.place(uid)}: {options.column} is {value!r:.40}, it must be a finite number"
                )
        self.values = np.asarray(values, np.float64)

    def __len__(self) -> int:
        rows = len(self.rows)
        return rows - rows % self.batch or rows

    def epoch(self, number: int) -> np.ndarray:
        """Return [rows] int64, see :class:`Sampler`."""
        draw = np.random.default_rng([self.seed, number])
        order = np.lexsort((draw.permutation(len(self.rows)), self.values))
        left_out = draw.choice(len(order), len(order) - len(self), replace=False)
        return np.delete(order, left_out)


class AdaptiveSampler(Sampler):
    """A sampler that draws batches from what was observed of each prompt.

    The result of :meth:`draw` may depend only on the seed, the number of the batch, and the observations so far. Which
    these are does not depend on time: batch k is drawn after the observations of all prompts of the batches before
    k - ``lag``, each of them once, in the order of the prompts. ``lag`` is 0 in synchronous runs, else the bound on
    staleness. A prompt whose samples failed, or were dropped by another gate than that on rewards, is not observed.
    """

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: Any) -> None:
        super().__init__(rows, batch, seed, options)
        self.latest = np.full(len(rows), np.nan)
        """[n] float64: the latest score of each row; NaN: never observed."""

    def score(self, rewards: np.ndarray) -> float:
        """Return the score of a prompt, given the total rewards of its valid samples [k ≥ 1] float64: their mean."""
        return float(rewards.mean())

    def observe(self, position: int, score: float) -> None:
        """Record the score of a row."""
        self.latest[position] = score

    def draw(self, number: int) -> np.ndarray:
        """Return the positions of batch ``number``: [batch] int64."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the observations so far, without their prefix ``sampler/``."""
        return {"observed_share": float(np.mean(~np.isnan(self.latest)))}

    def state(self) -> dict[str, Any]:
        """Return the observations as values that JSON can represent."""
        seen = np.flatnonzero(~np.isnan(self.latest))
        return {"positions": seen.tolist(), "latest": self.latest[seen].tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.latest[:] = np.nan
        self.latest[state["positions"]] = state["latest"]


@dataclass
class PoolsOptions(BaseConfig):
    """Options of ``pools``. The success rate of a prompt is the share of its samples with a reward above ``above``."""

    above: float = 0.0
    """A sample with a total reward above this is a success."""
    easy: Fraction = 1.0
    """Success rate from which a prompt is easy."""
    hard: Fraction = 0.0
    """Success rate up to which a prompt is hard."""
    easy_weight: Positive = 0.25
    """Weight of easy prompts. That of prompts between easy and hard, and of those never seen, is 1."""
    hard_weight: Positive = 0.5
    """Weight of hard prompts."""
    warmup_batches: NonNegativeInt = 0
    """Number of batches at the start that are drawn as by ``shuffle``. Their prompts are observed."""
    retire_after: NonNegativeInt = 0
    """Retire a prompt that was easy this many times in a row: it is not drawn again. 0: never."""
    floor: Fraction = 0.25
    """Share of the prompts that are never retired, and at least those of a batch."""


class Pools(AdaptiveSampler):
    """Prompts by their latest success rate: easy, hard, between, never seen.

    A batch has different rows, drawn in proportion to the weights of their pools without replacement: those with the
    largest log(u)/w, u uniform in (0, 1) (Efraimidis and Spirakis, 2006). Every weight is above 0, so that no prompt
    is lost, except those that are retired.
    """

    Options = PoolsOptions

    def __init__(self, rows: SampledRows, batch: int, seed: int, options: PoolsOptions) -> None:
        super().__init__(rows, batch, seed, options)
        if options.hard >= options.easy:
            fix = f"must be below {OPTIONS}.easy={options.easy}"
            raise ConfigError([Problem(f"{OPTIONS}.hard", options.hard, fix)])
        self.streak = np.zeros(len(rows), np.int64)
        """[n] int64: how many times in a row each prompt was easy."""

    def score(self, rewards: np.ndarray) -> float:
        """Return the success rate of the ``rewards`` [samples] of one prompt."""
        return float(np.mean(rewards > self.options.above))

    def observe(self, position: int, score: float) -> None:
        """Record the success rate of a row."""
        super().observe(position, score)
        self.streak[position] = self.streak[position] + 1 if score >= self.options.easy else 0

    def draw(self, number: int) -> np.ndarray:
        """Return [batch] int64, see :class:`AdaptiveSampler`."""
        rows = len(self.rows)
        if number < self.options.warmup_batches:
            epoch, place = divmod(number, rows // self.batch)
            order = np.random.default_rng([self.seed, epoch]).permutation(rows)
            return order[place * self.batch : (place + 1) * self.batch]
        uniform = 1 - np.random.default_rng([self.seed, 1, number]).random(rows)
        keys = np.where(self.retired(), -np.inf, np.log(uniform) / self.weights())
        return np.lexsort((np.arange(rows), -keys))[: self.batch]

    def weights(self) -> np.ndarray:
        """Return the weight of each row, [n] float64, without regard to retirement."""
        weights = np.ones(len(self.rows))
        weights[self.latest >= self.options.easy] = self.options.easy_weight
        weights[self.latest <= self.options.hard] = self.options.hard_weight
        return weights

    def retired(self) -> np.ndarray:
        """Return which rows are retired, [n] bool: of more than allowed, those that were easy most often in a row."""
        rows, after = len(self.rows), self.options.retire_after
        retired = np.zeros(rows, bool)
        if after:
            most = rows - max(math.ceil(self.options.floor * rows), self.batch)
            order = np.lexsort((np.arange(rows), -self.streak))[: max(most, 0)]
            retired[order] = self.streak[order] >= after
        return retired

    def metrics(self) -> dict[str, float]:
        """See :class:`AdaptiveSampler`."""
        options = self.options
        return super().metrics() | {
            "easy_share": float(np.mean(self.latest >= options.easy)),
            "hard_share": float(np.mean(self.latest <= options.hard)),
            "retired_share": float(np.mean(self.retired())),
        }

    def state(self) -> dict[str, Any]:
        """See :class:`AdaptiveSampler`."""
        state = super().state()
        return state | {"streak": self.streak[state["positions"]].tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`AdaptiveSampler`."""
        super().load_state(state)
        self.streak[:] = 0
        self.streak[state["positions"]] = state["streak"]


BUILT_IN: dict[str, type[Sampler]] = {
    "shuffle": Shuffle,
    "in_order": InOrder,
    "mixture": Mixture,
    "list": FixedList,
    "easy_to_hard": EasyToHard,
    "pools": Pools,
}


def make_sampler(name: str, given: Mapping[str, Any], rows: SampledRows, batch: int, seed: int) -> Sampler:
    """Return the sampler ``name`` (``data.sampler``) with the options ``given`` (``data.sampler_options``).

    Raises ConfigError for an unknown name or option, DataError for data that do not fit.
    """
    kind: Any = BUILT_IN.get(name) or SAMPLERS.find(name)
    if kind is None:
        raise ConfigError(list(SAMPLERS.problems(name)))
    try:
        options = kind.Options.from_dict_config(dict(given))
    except ConfigError as error:
        under = [Problem(f"{OPTIONS}.{problem.key}", problem.value, problem.fix) for problem in error.problems]
        raise ConfigError(under) from error
    try:
        sampler: Sampler = kind(rows, batch, seed, options)
    except SkyRLMegatronError:
        raise
    except Exception as error:
        raise DataError(f"{KEY}={name}: the sampler cannot be made ({with_origin(error)})") from error
    return sampler
