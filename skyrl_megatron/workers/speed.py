"""How fast a role or the engines work: tokens and model FLOPs over the seconds that a phase took, a rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from skyrl_megatron.runtime.flops import ModelFlops


class Speed:
    """Sums the forward passes of a phase; :meth:`metrics` tells and starts anew."""

    def __init__(self) -> None:
        self.tokens, self.flops, self.seconds = 0.0, 0.0, 0.0

    def add(self, lengths: np.ndarray, flops: ModelFlops, seconds: float = 0.0) -> None:
        """Count sequences. ``lengths``: [B] int, tokens; ``seconds``: what they took, unless it is told at the end."""
        self.tokens += float(lengths.sum())
        self.flops += float(flops.forward(lengths).sum())
        self.seconds += seconds

    def timed[T](self, lengths: np.ndarray, flops: ModelFlops, result: Callable[[], T]) -> Callable[[], T]:
        """Return ``result``, which counts the sequences and the seconds from now until it has returned."""
        began = time.perf_counter()

        def finish() -> T:
            found = result()
            self.add(lengths, flops, time.perf_counter() - began)
            return found

        return finish

    def metrics(self, prefix: str, ranks: int, peak: float | None, seconds: float | None = None) -> dict[str, float]:
        """Return ``<prefix>tokens_per_second_per_rank``, ``flops_per_second_per_rank`` and, with the ``peak`` of a
        rank in FLOP/s, ``mfu``; {} when nothing was done. ``seconds``: of all of it, where they were not counted."""
        took = self.seconds if seconds is None else seconds
        found: dict[str, float] = {}
        if self.tokens and took > 0:
            found[f"{prefix}tokens_per_second_per_rank"] = self.tokens / took / ranks
            found[f"{prefix}flops_per_second_per_rank"] = self.flops / took / ranks
            if peak is not None:
                found[f"{prefix}mfu"] = self.flops / took / ranks / peak
        self.tokens = self.flops = self.seconds = 0.0
        return found
