"""The weights of one role into another of the same model at any layout, bit for bit, through memory.

Ranks of the source gather the shards of a few weights at a time (:func:`rounds`); each rank of the target takes its
own share of whole weights that it holds (:class:`Taker`). What lies between, Ray's object store, sees bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bridges.shard import shard
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.hf.export import gathered
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups

ROUND_BYTES = 256 * 2**20
"""What a rank of the source gives at a time, about."""


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A whole weight as it is in Megatron, vocabulary not padded, in a form that any process can read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """[bytes] uint8."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WholeWeight:
        """Copy ``tensor`` to the host."""
        whole = tensor.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        return cls(name, str(whole.dtype).removeprefix("torch."), tuple(whole.shape), data)

    def tensor(self) -> Tensor:
        """Return the weight, in memory of its own."""
        return torch.from_numpy(self.data.copy()).view(getattr(torch, self.dtype)).view(self.shape)


@torch.no_grad()
def rounds(model: ModelChunks, groups: ProcessGroups, nbytes: int = ROUND_BYTES) -> Iterator[list[WholeWeight]]:
    """Yield this rank's part of each round: every weight stands in one round of one rank, the first of those that hold
    it. All ranks of a pipeline stage go through equally many rounds, which gather, together."""
    given: list[WholeWeight] = []
    passed = 0
    for weight in local_weights(model, groups):
        if weight.is_copy:
            continue
        whole = gathered(weight, groups)
        if whole is not None:
            given.append(WholeWeight.of(weight.entry.name, whole))
        passed += weight.tensor.nbytes  # alike on all ranks of the stage, whether they give it or not
        if passed >= nbytes:
            yield given
            given, passed = [], 0
    yield given


class Taker:
    """Takes this rank's share out of whole weights, until it has every one."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups) -> None:
        self.groups = groups
        self._missing: defaultdict[str, list[LocalWeight]] = defaultdict(list)
        for weight in local_weights(model, groups):
            self._missing[weight.entry.name].append(weight)

    @torch.no_grad()
    def take(self, weights: Iterable[WholeWeight]) -> None:
        """Copy what belongs to this rank. Raises WeightSyncError for a weight of another shape or type."""
        for given in weights:
            places = self._missing.pop(given.name, [])
            whole = given.tensor() if places else None
            for place in places:
                assert whole is not None
                over = self.groups.etp if place.entry.is_expert else self.groups.tp
                rows = place.tensor.shape[0] * over.size()
                own = shard(whole, place.entry, over.size(), over.rank(), rows if place.entry.split.vocab else None)
                if own.shape != place.tensor.shape or own.dtype != place.tensor.dtype:
                    raise WeightSyncError(
                        f"{given.name} is {own.dtype} {list(own.shape)} in the policy and {place.tensor.dtype} "
                        f"{list(place.tensor.shape)} in the reference: give both roles one model and one type"
                    )
                place.tensor.copy_(own)

    def finish(self) -> None:
        """Raise WeightSyncError naming a weight that never came."""
        if self._missing:
            name = next(iter(self._missing))
            raise WeightSyncError(
                f"{name} and {len(self._missing) - 1} more weights of the reference are not among the policy's: give "
                "both roles one model"
            )
