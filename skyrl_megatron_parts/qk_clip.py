"""QK-clip (Kimi K2, arXiv:2507.20534, 2.1): after a step, query and key weights of too large logits shrink.

A head with the largest logit S above the threshold t has its logits multiplied by η = t / S: in multi-latent attention
its rows of the query and key up projections by η^α and η^(1 - α), and those of the rotary query by η, because heads
share the rotary key. Heads of a KV group share the key: they have the smallest η of the group, as in Megatron
(``clip_qk`` of ``transformer/attention.py`` and ``multi_latent_attention.py``, whose settings ``qk_clip``,
``qk_clip_threshold`` and ``qk_clip_alpha`` these are). Biases shrink with their rows.

Megatron's own step (``optimizer/qk_clip.py``) is not used: it writes whole master weights, which a distributed
optimizer does not have, and asks for Transformer Engine's attention. Here the masters shrink where they are held, and
weights are their rounding on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.runtime.checkpoint.rank_state import (
    HeldRange,
    held_ranges,
    inner_optimizers,
    is_distributed,
    parameters_of,
)
from skyrl_megatron.runtime.model.attention import PackedAttention
from skyrl_megatron.runtime.parts import PartSetup, RankPart

if TYPE_CHECKING:
    from skyrl_megatron.runtime.optimizer import TrainingState


@dataclass(frozen=True, slots=True)
class MaxLogits:
    """The largest logits of all queries since the last step."""

    by_layer: tuple[tuple[Any, Tensor], ...]
    """This rank's attention modules, each with the logits of its heads, equal on all ranks that hold these heads."""
    largest: float
    """The largest of the model."""


class QkClip(RankPart):
    """Measures the largest attention logit of each step for ``log_max_attention_logit``, and clips for ``qk_clip``."""

    name = "qk_clip"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether either field of ``transformer_config_kwargs`` is set for a role that is trained."""
        config: Any = setup.model.config
        return not is_frozen(setup.role) and bool(config.qk_clip or config.log_max_attention_logit)

    def __init__(self, setup: PartSetup) -> None:
        super().__init__(setup)
        self._logits: MaxLogits | None = None

    def begin_step(self, trained: TrainingState) -> None:
        """Take the logits before it is known whether the step is skipped: they never count for the next one."""
        self._logits = take_max_logits(self.setup.model.chunks)

    def updated(self, trained: TrainingState) -> dict[str, float]:
        """Clip; return ``attention_logit_max``, the largest logit since the last step, before clipping."""
        assert self._logits is not None
        config: Any = self.setup.model.config
        if config.qk_clip:
            clip_qk(self._logits, trained.optimizer)
        return {"attention_logit_max": self._logits.largest}


@torch.no_grad()
def take_max_logits(chunks: Sequence[torch.nn.Module]) -> MaxLogits:
    """Return the largest logits since the last call. Collective over all ranks."""
    layers: list[tuple[Any, PackedAttention]] = []
    for chunk in chunks:
        for module in chunk.modules():
            core = getattr(module, "core_attention", None)
            if isinstance(core, PackedAttention):
                layers.append((module, core))
    logits = [_taken(core, module.num_attention_heads_per_partition) for module, core in layers]
    largest = torch.stack([heads.max() for heads in logits]).max() if logits else None
    if layers:
        flat = torch.cat(logits)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=layers[0][1].groups.dp_cp)
        logits = list(flat.split([len(heads) for heads in logits]))
        largest = flat.max()
    device = next(chunks[0].parameters()).device
    overall = torch.full((), -torch.inf, device=device) if largest is None else largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX)
    by_layer = tuple((module, heads) for (module, _), heads in zip(layers, logits, strict=True))
    return MaxLogits(by_layer, float(overall))


def _taken(core: PackedAttention, heads: int) -> Tensor:
    found, core.current_max_attn_logits = core.current_max_attn_logits, None
    if found is None:
        found = torch.full((heads,), -torch.inf, device=next(iter(core.parameters()), torch.empty(0)).device)
    return found


@torch.no_grad()
def clip_qk(logits: MaxLogits, optimizer: Any) -> None:
    """Shrink the weights of all heads above the threshold. Collective over the ranks that share these weights."""
    factors: dict[int, Tensor] = {}
    for module, maxima in logits.by_layer:
        threshold = module.config.qk_clip_threshold
        if bool((maxima > threshold).any()):
            ratio = torch.where(maxima > threshold, threshold / maxima, torch.ones_like(maxima))
            factors |= {id(parameter): rows for parameter, rows in _row_factors(module, ratio)}
    if not factors:
        return
    for part in inner_optimizers(optimizer):
        if not any(id(parameter) in factors for parameter in parameters_of(part)):
            continue
        for held in held_ranges(part):
            if (rows := factors.get(id(held.parameter))) is not None:
                _shrink(held, rows)
        if (copy := getattr(part, "_copy_main_params_to_model_params", None)) is not None:
            copy()
        if is_distributed(part) and not part.ddp_config.overlap_param_gather:
            _gather(part, factors)


def _gather(part: Any, changed: Collection[int]) -> None:
    """Gather the buckets with these parameters. Their ranks have the same heads, and so the same changes; ranks that
    share experts can have other heads (etp below tp), so that not all of them would gather the experts' buckets."""
    for chunk in part.model_chunks:
        for buckets in chunk.bucket_groups:
            if any(id(parameter) in changed for bucket in buckets.buckets for parameter in bucket.params):
                chunk._start_bucket_group_param_sync(buckets, force_sync=False)


def _shrink(held: HeldRange, rows: Tensor) -> None:
    columns = held.parameter.numel() // len(rows)
    held.main.view(-1).mul_(rows.repeat_interleave(columns)[held.start : held.stop])


def _row_factors(attention: Any, ratio: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters of an attention module with the factor of each row. ``ratio``: η of each head of this rank."""
    config = attention.config
    alpha = config.qk_clip_alpha
    if config.multi_latent_attention:
        query = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        sizes = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        yield query.weight, _repeated([ratio**alpha, ratio], sizes)
        sizes = (config.qk_head_dim, config.v_head_dim)
        yield attention.linear_kv_up_proj.weight, _repeated([ratio ** (1 - alpha), torch.ones_like(ratio)], sizes)
        return
    groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    linear = attention.linear_qkv
    ratio = ratio.view(groups, -1).amin(1)
    queries = attention.num_attention_heads_per_partition // groups * width
    value = linear.weight.shape[0] // groups - queries - width
    rows = _repeated([ratio**alpha, ratio ** (1 - alpha), torch.ones_like(ratio)], (queries, width, value))
    yield linear.weight, rows
    if linear.bias is not None:
        yield linear.bias, rows


def _repeated(factors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the factors of rows: for each head (or group), ``sizes[i]`` rows with ``factors[i]``."""
    runs = [each[:, None].expand(-1, size) for each, size in zip(factors, sizes, strict=True)]
    return torch.cat(runs, dim=1).flatten()
