"""What a vLLM 0.32 engine drafts tokens with, where that is its model's own layer of multi-token prediction: a second
model in each worker, which has embedding and output layer in common with the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

_EMBEDDING = "model.embed_tokens.weight"


class DraftedModel(torch.nn.Module):
    """Both models as one that weights are loaded into: ``modules()`` has what they share once."""

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module) -> None:
        super().__init__()
        self.target: Any = target
        self.draft: Any = draft

    def takes(self, name: str) -> bool:
        """Tell whether a tensor, by its HF name, belongs to the draft layer."""
        return get_spec_layer_idx_from_weight_name(self.draft.config, name) is not None

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load (HF name, tensor), each by the loaders of the model that it belongs to."""
        self.target.load_weights(self._of_target(tensors))

    def _of_target(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the target's tensors, and load the others, each before the next is asked for."""
        # the last of several pipeline stages drafts with an embedding of its own (_maybe_share_embeddings)
        apart = self.draft.model.embed_tokens is not getattr(self.target.model, "embed_tokens", None)
        for name, tensor in tensors:
            of_draft = self.takes(name)
            if of_draft or (apart and name == _EMBEDDING):
                self.draft.load_weights([(name, tensor)])
            if not of_draft:
                yield name, tensor


def drafted_model(worker: Any) -> DraftedModel | None:
    """Return a worker's model with what it drafts with; None where that is none of the folder's layers, or none at
    all."""
    own, speculative = worker.vllm_config.model_config, worker.vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp" or speculative.draft_model_config.model != own.model:
        return None
    draft = worker.get_draft_model()
    return None if draft is None else DraftedModel(worker.get_model(), draft)
