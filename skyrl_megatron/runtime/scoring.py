"""Log-probs of given tokens at temperature 1, optionally with perturbed embeddings."""

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
    """Return log-probs of tokens 1 … n−1 at temperature 1 in nats, on the collection rank of dp 0; None elsewhere.

    ``perturbation``: relative change of every embedding, up or down, at least half a ulp; 0: none. The resulting
    change of the log-probs estimates the effect of rounding in this model. ``adapter``: name of the adapter, by
    default the first. All ranks call it together.
    """
    # All tokens but the first are a response, so that each has a position that predicts it.
    tokens = torch.tensor([list(token_ids)])
    ones = torch.ones(1, len(token_ids) - 1)
    batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), ones, ones)
    batch.adapters = [adapter] if adapter else []
    with perturbed_embeddings(engine, perturbation) if perturbation else contextlib.nullcontext():
        logprobs = engine.compute_logprobs(batch, temperature=1.0)
    return logprobs[0].tolist() if engine.is_collection_rank and engine.dp_rank == 0 else None


@contextlib.contextmanager
def perturbed_embeddings(engine: MegatronEngine, change: float) -> Iterator[None]:
    """Multiply every embedding entry by 1 ± ``change``, at least half a ulp, with random signs."""

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
