"""Multi-token prediction (arXiv:2412.19437, 2.2): a separately trained layer predicts the token after the next.

Engines draft tokens with it (speculative decoding), so it has to follow the policy; the policy must not follow it. It
reads the model's last hidden states, embedding and output layer as constants, so that one backward pass of both losses
leaves every other gradient as it is, bit for bit. Its parameters have gradient buffers and a gradient norm of their
own (``trained.py``, ``optimizer.py``) and belong to the same optimizer.

It stands in the last chunk as ``draft``, where loading, exports, syncs and checkpoints find it; its layer is the one
behind the last. Megatron's own way (transformer/multi_token_prediction.py) runs it within ``GPTModel.forward``, which
takes labels and no policy-gradient loss, and has the last stage train a second embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_megatron.runtime.model.norm import RMSNorm
from skyrl_megatron.runtime.parallel_state import ProcessGroups

DRAFT = "draft"
"""The module of the last chunk."""
_OF_DECODER = ("hidden_states", "inference_context", "rotary_pos_cos_sin")
"""What a decoder is called with and a layer is not given here."""


class DraftHead(MegatronModule):
    """h' = layer(W [norm(embedding of the next token); norm(h)]), normalised; logits are the model's head of h'.

    ``spec``: of a decoder layer with experts; ``layer_number``: from 1, behind the model's.
    """

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, layer_number: int, groups: ProcessGroups) -> None:
        own = copy.copy(config)
        own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "none", 0.0, None
        super().__init__(config=own)
        self.groups = groups
        self.enorm = RMSNorm(own, own.hidden_size, own.layernorm_epsilon)
        self.hnorm = RMSNorm(own, own.hidden_size, own.layernorm_epsilon)
        self.eh_proj = ColumnParallelLinear(
            2 * own.hidden_size,
            own.hidden_size,
            config=own,
            init_method=own.init_method,
            bias=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        self.layer = build_module(
            spec, config=own, layer_number=layer_number, is_mtp_layer=True, pg_collection=groups.collection
        )
        self.final_layernorm = RMSNorm(own, own.hidden_size, own.layernorm_epsilon)
        for parameter in self.parameters():
            parameter.grad_norm_group = "mtp"  # a name that Megatron's optimizer knows
        self._seen: tuple[Tensor, dict[str, Any]] | None = None
        self._embedding: Tensor | None = None

    def watch(self, chunk: Any) -> None:
        """Keep what the last training pass of the chunk's decoder made and was called with."""

        def keep(module: torch.nn.Module, _: Any, arguments: dict[str, Any], hidden: Tensor) -> None:
            if module.training and torch.is_grad_enabled():
                given = {name: value for name, value in arguments.items() if name not in _OF_DECODER}
                self._seen = hidden.detach(), given

        chunk.decoder.register_forward_hook(keep, with_kwargs=True)

    def refresh(self, chunks: Sequence[Any]) -> None:
        """Have the embedding as it is now; the first stage calls :func:`send_embedding`. With several stages this rank
        keeps a copy of its rows, without a gradient."""
        if self.groups.pp.size() == 1:
            self._embedding = chunks[0].embedding.word_embeddings.weight.detach()
            return
        head = chunks[-1].output_layer.weight
        if self._embedding is None:
            self._embedding = torch.empty_like(head, requires_grad=False)
        dist.broadcast(self._embedding, group_src=0, group=self.groups.embd)

    def forward(self, next_tokens: Tensor, positions: Tensor) -> Tensor:
        """Return h' of the micro-batch that the chunk saw last, [b·s, H], the same on all tp ranks; its gradient is to
        be summed over them. ``next_tokens``, ``positions``: [b, s], the token behind each, and each one's position.

        The first position of a sequence gets zeros for an embedding, as in engines (vLLM's ``deepseek_mtp``).
        """
        assert self._seen is not None, "the draft head follows a training pass of its chunk"
        (hidden, given), self._seen = self._seen, None
        embedded = self._embedded(next_tokens, positions)
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        projected = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0], group=self.groups.tp)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, group=self.groups.tp)
        out = self.layer(hidden_states=projected, **given)
        out = self.final_layernorm(out[0] if isinstance(out, tuple) else out)
        if self.config.sequence_parallel:
            out = gather_from_sequence_parallel_region(out, group=self.groups.tp)
        tokens: Tensor = out.transpose(0, 1).flatten(0, 1)
        return tokens

    @torch.no_grad()
    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look tokens up in the rows that tp ranks share: [s, b, H], or with sequence parallelism a tp-th of s."""
        assert self._embedding is not None
        tp, rows = self.groups.tp, len(self._embedding)
        local = tokens - tp.rank() * rows
        here = (local >= 0) & (local < rows) & (positions > 0)
        found: Tensor = torch.where(here[..., None], self._embedding[torch.where(here, local, 0)], 0.0)
        if tp.size() > 1:
            dist.all_reduce(found, group=tp)
        found = found.transpose(0, 1)
        return found.chunk(tp.size())[tp.rank()] if self.config.sequence_parallel else found


def send_embedding(chunks: Sequence[Any], groups: ProcessGroups) -> None:
    """Send the first stage's rows of the embedding to the last stage (:meth:`DraftHead.refresh`)."""
    if groups.is_first_stage and groups.pp.size() > 1:
        dist.broadcast(chunks[0].embedding.word_embeddings.weight.detach(), group_src=0, group=groups.embd)


def draft_of(chunks: Sequence[torch.nn.Module]) -> DraftHead | None:
    """Return the draft head of a rank's chunks, where it has one."""
    found = getattr(chunks[-1], DRAFT, None)
    return found if isinstance(found, DraftHead) else None
