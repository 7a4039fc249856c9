"""Log-probs of a reference on disk: the sums that preferences read, for every row of a data set.

A file ``<name>.safetensors`` has float64 arrays, and in its metadata what they depend on: the weights of the
reference, the tokens of all sequences, and settings of the model. If one of these is not that of the run, or the file
is damaged, the file is not used, a line says why, and the log-probs are computed again.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.staging import write_file
from skyrl_megatron.config.derive import preferences
from skyrl_megatron.config.fields import field_types
from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.config.schema.supervised import CachedDPOConfig, DPOConfig
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.identity import reference_identity

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_supervised.chat_rows import ChatRows

KEY = "dpo.reference_cache"
SUMS, STARTS, OTHERS = "sums", "starts", "others"


class ReferenceCache:
    """The log-probs of the reference for ``rows``, in the file ``name`` of ``folder``.

    ``of``: what they depend on in addition to the rows (:func:`reference_identity`). The constructor reads the file;
    :attr:`is_complete` is true once it has them.
    """

    def __init__(
        self, folder: Path, name: str, rows: ChatRows, of: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.path, self.rows, self.say = folder / f"{name}.safetensors", rows, say
        self.of = {**of, "data": data_identity(rows)}
        self.arrays: dict[str, np.ndarray] | None = self._read()

    @property
    def is_complete(self) -> bool:
        """Whether every row has its log-probs."""
        return self.arrays is not None

    def sums(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the summed log-probs of the trained tokens of each sequence of ``rows``, items of the data: [B]
        float64, in nats."""
        assert self.arrays is not None
        starts = self.arrays[STARTS]
        return np.concatenate([self.arrays[SUMS][starts[row] : starts[row + 1]] for row in self._rows_of(rows)])

    def others(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the summed log-probs of the answers in ``others`` of each of ``rows``: [N] float64, in nats."""
        assert self.arrays is not None
        sums: np.ndarray = self.arrays[OTHERS][self._rows_of(rows)]
        return sums

    def fill(self, compute: Callable[[Sequence[Mapping[str, Any]]], tuple[np.ndarray, np.ndarray]], size: int) -> None:
        """Compute the log-probs of all rows and write the file. ``compute`` returns what :meth:`sums` and
        :meth:`others` return of up to ``size`` items."""
        sums, others, counts = [], [], [0]
        for first in range(0, len(self.rows), size):
            items = [self.rows[row] for row in range(first, min(first + size, len(self.rows)))]
            sums_of_items, others_of_items = compute(items)
            sums.append(sums_of_items)
            others.append(others_of_items)
            counts += [len(item["sequences"]) for item in items]
        self.arrays = {
            SUMS: np.concatenate(sums),
            OTHERS: np.concatenate(others),
            STARTS: np.cumsum(np.asarray(counts, np.int64)),
        }
        self._write(self.arrays)
        self.say(f"reference: log-probs of {len(self.rows)} rows are in {self.path}")

    def _rows_of(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the indices in :attr:`rows` of items of the data, whose uids count skipped rows too: [B] int64."""
        return np.searchsorted(self.rows.kept, [int(row["uid"]) for row in rows])

    # ------------------------------------------------------------------ the file
    def _read(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of the file if they are those of the run; else None, and say why."""
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="numpy") as file:
                saved = dict(file.metadata() or {})
                arrays = {name: file.get_tensor(name) for name in (SUMS, STARTS, OTHERS)}
        except (SafetensorError, OSError) as error:
            why = f"cannot be read ({error})"
        else:
            other = [name for name, value in self.of.items() if saved.get(name) != value]
            if not other and saved.get("sha256") == _digest(arrays):
                return arrays
            why = f"is of another {' and another '.join(other)}" if other else "is damaged"
        self.say(f"{KEY}: {self.path} {why}: the log-probs of the reference are computed again")
        return None

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save  # save_file raises errors of its own for a full disk

        partial = self.path.with_suffix(f".partial-{os.getpid()}")
        try:
            private_folder(self.path.parent)
            write_file(partial, save(arrays, metadata={**self.of, "sha256": _digest(arrays)}))
            partial.replace(self.path)
        except OSError as error:
            fix = f"cannot be written ({error.strerror}): free disk space, or set another folder"
            raise ConfigError([Problem(KEY, str(self.path.parent), fix)]) from error
        finally:
            partial.unlink(missing_ok=True)


def open_caches(
    cfg: SkyRLTrainConfig, data: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[SkyRLTrainConfig, dict[str, ReferenceCache]]:
    """Return the configuration of the rest of the run, and the caches of the data sets ``data``, None left out.

    If the caches have all log-probs, that configuration needs no reference. Comes before the placement of the run.
    """
    settings = preferences(cfg)
    assert settings is not None and settings.reference_cache is not None
    folder, of = Path(settings.reference_cache), reference_identity(cfg)
    for rows in data.values():
        if rows is not None and rows.tokens is not None:
            rows.tokens.wait()  # the tokens of all rows are compared
    caches = {name: ReferenceCache(folder, name, rows, of, say) for name, rows in data.items() if rows is not None}
    if all(cache.is_complete for cache in caches.values()):
        say(f"reference: its log-probs are in {folder}")
        return _without_reference(cfg, settings), caches
    return cfg, caches


def _without_reference(cfg: SkyRLTrainConfig, settings: DPOConfig) -> SkyRLTrainConfig:
    """Return ``cfg`` as the configuration of a run that starts no reference. Other sections are shared with it."""
    cached = CachedDPOConfig(**{name: getattr(settings, name) for name in field_types(DPOConfig)})
    cached.__dict__["_given"] = settings.__dict__["_given"]
    cfg = copy.copy(cfg)
    setattr(cfg, DPOConfig.SECTION, cached)
    return cfg


def data_identity(rows: ChatRows) -> str:
    """Return a hash of the tokens and masks of all sequences, in the order of the rows."""
    hasher = hashlib.sha256()
    for row in range(len(rows)):
        for part in _sequences(rows[row]):
            hasher.update(np.asarray(part, np.int64).tobytes() + b"|")
    return hasher.hexdigest()


def _sequences(item: Mapping[str, Any]) -> Iterator[Sequence[int]]:
    for name in ("sequences", "others"):
        for sequence in item.get(name, ()):
            yield from sequence
    yield item["sides"]


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(name.encode() + arrays[name].tobytes())
    return hasher.hexdigest()
