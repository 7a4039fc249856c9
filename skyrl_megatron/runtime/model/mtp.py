"""Multi-token prediction (arXiv:2412.19437, 2.2): a separately trained layer predicts the token after the next.

Engines use it to draft tokens (speculative decoding), so it must follow the policy without changing it. It reads the
model's last hidden states, embedding and output layer as constants. One backward pass of both losses therefore leaves
every other gradient bitwise unchanged. Its parameters have separate gradient buffers and a separate gradient norm
(``optimizer.py``), and belong to the same optimizer.

It is the submodule ``draft`` of the last chunk, where loading, exports, syncs and checkpoints find it. Its layer
number is one more than that of the last layer. Megatron's implementation (transformer/multi_token_prediction.py) runs
inside ``GPTModel.forward``, needs labels instead of a policy-gradient loss, and trains a second embedding on the last
stage.
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
"""Name of the submodule of the last chunk."""
_DECODER_ONLY = ("hidden_states", "inference_context", "rotary_pos_cos_sin")
"""Arguments of a decoder that are not passed to the layer."""


class DraftHead(MegatronModule):
    """h' = norm(layer(W [norm(embedding of the next token); norm(h)])); the model's head turns h' into logits.

    ``spec``: spec of a decoder layer with experts. ``layer_number``: counts from 1 and follows the model's layers.
    """

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, layer_number: int, groups: ProcessGroups) -> None:
        # a copy: the auxiliary losses of the draft's router must not be added to the policy's
        draft_config = copy.copy(config)
        draft_config.moe_router_load_balancing_type, draft_config.moe_aux_loss_coeff, draft_config.moe_z_loss_coeff = (
            "none",
            0.0,
            None,
        )
        super().__init__(config=draft_config)
        self.groups = groups
        self.enorm = RMSNorm(draft_config, draft_config.hidden_size, draft_config.layernorm_epsilon)
        self.hnorm = RMSNorm(draft_config, draft_config.hidden_size, draft_config.layernorm_epsilon)
        self.eh_proj = ColumnParallelLinear(
            2 * draft_config.hidden_size,
            draft_config.hidden_size,
            config=draft_config,
            init_method=draft_config.init_method,
            bias=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        self.layer = build_module(
            spec, config=draft_config, layer_number=layer_number, is_mtp_layer=True, pg_collection=groups.collection
        )
        self.final_layernorm = RMSNorm(draft_config, draft_config.hidden_size, draft_config.layernorm_epsilon)
        for parameter in self.parameters():
            parameter.grad_norm_group = "mtp"  # a name that Megatron's optimizer knows
        self.captured: tuple[Tensor, dict[str, Any]] | None = None
        """Hidden states and the arguments of a layer, from the last training pass of the decoder."""
        self._embedding: Tensor | None = None

    def watch(self, chunk: Any) -> None:
        """Capture the output and the arguments of the last training pass of the chunk's decoder."""

        def capture(module: torch.nn.Module, _: Any, arguments: dict[str, Any], hidden: Tensor) -> None:
            # scoring passes have no gradient, and would replace what the training pass left
            if module.training and torch.is_grad_enabled():
                for_layer = {name: value for name, value in arguments.items() if name not in _DECODER_ONLY}
                self.captured = hidden.detach(), for_layer

        chunk.decoder.register_forward_hook(capture, with_kwargs=True)

    def refresh(self, chunks: Sequence[Any]) -> None:
        """Update the embedding; the first stage must call :func:`send_embedding`.

        With several stages this rank keeps a copy of the rows, without a gradient.
        """
        if self.groups.pp.size() == 1:
            self._embedding = chunks[0].embedding.word_embeddings.weight.detach()
            return
        head = chunks[-1].output_layer.weight
        if self._embedding is None:
            self._embedding = torch.empty_like(head, requires_grad=False)
        # tied or not, embd joins the first and the last stage
        dist.broadcast(self._embedding, group_src=0, group=self.groups.embd)

    def forward(self, next_tokens: Tensor, positions: Tensor) -> Tensor:
        """Return h' of the chunk's last micro-batch, [b·s, H], equal on all tp ranks.

        Its gradient must be summed over the tp ranks. ``next_tokens``: [b, s], the token after each token.
        ``positions``: [b, s], position of each token in its sequence. The embedding at position 0 is zero, as in
        engines (vLLM's ``deepseek_mtp``).
        """
        assert self.captured is not None, "the draft head needs a training pass of its chunk before each call"
        # taken, so that a second call without a pass fails instead of using old states
        (hidden, arguments), self.captured = self.captured, None
        embedded = self._embedded(next_tokens, positions)
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        projected = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0], group=self.groups.tp)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, group=self.groups.tp)
        out = self.layer(hidden_states=projected, **arguments)
        out = self.final_layernorm(out[0] if isinstance(out, tuple) else out)
        if self.config.sequence_parallel:
            out = gather_from_sequence_parallel_region(out, group=self.groups.tp)
        tokens: Tensor = out.transpose(0, 1).flatten(0, 1)
        return tokens

    @torch.no_grad()
    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look up tokens in the embedding split over tp: [s, b, H], with sequence parallelism [s / tp, b, H]."""
        assert self._embedding is not None
        tp, rows = self.groups.tp, len(self._embedding)
        local = tokens - tp.rank() * rows
        # position 0 has no token before it: engines feed zeros there
        here = (local >= 0) & (local < rows) & (positions > 0)
        rows_of_tokens: Tensor = torch.where(here[..., None], self._embedding[torch.where(here, local, 0)], 0.0)
        if tp.size() > 1:
            dist.all_reduce(rows_of_tokens, group=tp)
        rows_of_tokens = rows_of_tokens.transpose(0, 1)
        return rows_of_tokens.chunk(tp.size())[tp.rank()] if self.config.sequence_parallel else rows_of_tokens


def send_embedding(chunks: Sequence[Any], groups: ProcessGroups) -> None:
    """Send the first stage's rows of the embedding to the last stage (:meth:`DraftHead.refresh`)."""
    if groups.is_first_stage and groups.pp.size() > 1:
        dist.broadcast(chunks[0].embedding.word_embeddings.weight.detach(), group_src=0, group=groups.embd)


def draft_of(chunks: Sequence[torch.nn.Module]) -> DraftHead | None:
    """Return the draft head of a rank's chunks, None without one."""
    found = getattr(chunks[-1], DRAFT, None)
    return found if isinstance(found, DraftHead) else None
