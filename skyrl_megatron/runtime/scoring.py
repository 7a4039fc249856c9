"""Score given tokens on a rank: log-probs at temperature 1, also with perturbed embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_megatron.types import TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine


def score_tokens(
    engine: MegatronEngine, token_ids: Sequence[int], *, perturbation: float = 0.0, adapter: str = ""
) -> list[float] | None:
    """Return log-probs of tokens 1 … n−1 at temperature 1, nats, on the first replica's rank that collects, else None.

    ``perturbation``: relative change of every embedding, up or down, at least half a unit in its last place; 0: none.
    How far the scores move is how far rounding takes them in this model. ``adapter``: with which of several; the first
    unless given. All ranks call it together.
    """
    tokens = torch.tensor([list(token_ids)])
    ones = torch.ones(1, len(token_ids) - 1)
    batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), ones, ones)
    batch.adapters = [adapter] if adapter else []
    with perturbed_embeddings(engine, perturbation) if perturbation else contextlib.nullcontext():
        logprobs = engine.compute_logprobs(batch, temperature=1.0)
    return logprobs[0].tolist() if engine.is_collection_rank and engine.dp_rank == 0 else None


@contextlib.contextmanager
def perturbed_embeddings(engine: MegatronEngine, change: float) -> Iterator[None]:
    """Change every embedding by so much of itself, up or down, at least half a unit in its last place."""

    def perturb(module: Any, arguments: Any, embedded: Tensor) -> Tensor:
        seeded = torch.Generator().manual_seed(0)  # the same signs on all ranks of a tensor-parallel group
        signs = torch.randint(0, 2, embedded.shape, generator=seeded).to(embedded) * 2 - 1
        return embedded * (1 + signs * max(change, torch.finfo(embedded.dtype).eps / 2))

    first = [chunk for chunk in engine.model.chunks if chunk.pre_process]
    hooks = [chunk.embedding.register_forward_hook(perturb) for chunk in first]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
