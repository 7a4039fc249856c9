"""Batches of prompts in an order that a resumed run continues exactly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from skyrl_megatron.errors import DataError, SkyRLMegatronWarning


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
