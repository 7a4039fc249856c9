"""What a rank has of a model made of Transformer Engine's layers, against the same model made of ours: the plain suite
proves load, sync, checkpoints and adapters on ours."""

from __future__ import annotations

from typing import Any

WHOLE = ("linear_q_down_proj", "linear_kv_down_proj", ".q_a_proj", ".kv_a_proj_with_mqa")
"""Multi-latent attention's down projections, which Transformer Engine has whole on every tp rank and we split: what is
expected of them says :func:`_whole`."""


def compare(folders: dict[str, str], layout: dict[str, Any]) -> dict[str, list[str]]:
    """Return family → differences on this rank; a body for ``ranks``. ``folders``: HF folders by family."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model
    from tests.te.meta import build_te

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), seed=0, timeout_s=400)
    found = {}
    for family, folder in folders.items():
        theirs = build_te(folder, groups)
        ours = build_model(folder, groups, dtype=torch.bfloat16, device=torch.device("meta"))
        assert theirs.layer_kind == "Transformer Engine" and ours.layer_kind == "skyrl_megatron's own"
        wrong = [*_parameters(theirs), *load_problems(theirs, folder, groups)]
        for what in (weights, sent, blocks, factors):  # adapters come last: checkpoints are then of them alone
            of_te, of_ours = what(theirs, groups), what(ours, groups)
            wrong += _differences(what.__name__, of_te, of_ours)
            wrong += _whole(what.__name__, of_te, theirs, groups)
        found[family] = wrong
    return found


def attention_problems(model: Any, like: Any = None, groups: Any = None) -> list[str]:
    """Return what of a model is not as shared prefixes need it, or not as in the model ``like``."""
    from skyrl_megatron.runtime.model.attention import PackedAttention
    from skyrl_megatron.runtime.model.rotary import PackedRotary

    wrong, chunk = [], model.chunks[0]
    for number, layer in enumerate(chunk.decoder.layers):
        mixer = layer.self_attention
        latent = model.config.multi_latent_attention
        rotary, expected = (mixer.rotary_pos_emb, "DepthRotary") if latent else (chunk.rotary_pos_emb, "PackedRotary")
        if type(mixer.core_attention) is not PackedAttention:
            wrong.append(f"layer {number}: the core attention is a {type(mixer.core_attention).__name__}")
        if type(rotary).__name__ != expected:
            wrong.append(f"layer {number}: tokens are rotated by a {type(rotary).__name__}")
        if latent and isinstance(getattr(chunk, "rotary_pos_emb", None), PackedRotary):
            wrong.append("two modules rotate")
    if model.config.apply_rope_fusion:
        wrong.append("a fused kernel rotates tokens by the boundaries of the pack")
    if like is not None:
        wrong += [*_parameters(model), *_differences("weights", weights(model, groups), weights(like, groups))]
    return wrong


def _parameters(model: Any) -> list[str]:
    elsewhere = [name for name, parameter in model.chunks[0].named_parameters() if parameter.device.type != "meta"]
    modules = {type(module).__module__.split(".")[0] for module in model.chunks[0].modules()}
    return [f"not on meta: {elsewhere}"] * bool(elsewhere) + ["no module of TE"] * (
        "transformer_engine" not in modules
    )


def load_problems(model: Any, folder: str, groups: Any) -> list[str]:
    """Read every weight from the folder as ``load_hf`` does, and compare the shape of what it would copy."""
    from pathlib import Path

    from bridges.source import open_hf
    from skyrl_megatron.runtime.hf_weights import read_shard
    from skyrl_megatron.runtime.model.local_weights import local_weights

    source, wrong = open_hf(Path(folder)), []
    for weight in local_weights(model, groups):
        over = groups.etp if weight.entry.is_expert else groups.tp
        read = read_shard(source, weight.entry, over.size(), over.rank(), weight.tensor.shape[0])
        if read.shape != weight.tensor.shape:
            wrong.append(f"load: {weight.name} is {list(weight.tensor.shape)}, the folder gives {list(read.shape)}")
    return wrong


def weights(model: Any, groups: Any) -> dict[str, Any]:
    """Return canonical name → (shape, whether each tp rank has another part)."""
    from skyrl_megatron.runtime.model.local_weights import local_weights

    return {
        weight.name: (tuple(weight.tensor.shape), weight.entry.split.dim) for weight in local_weights(model, groups)
    }


def sent(model: Any, groups: Any) -> dict[str, Any]:
    """Return HF name → (dtype and shape, rows of this rank's shard, whether ranks send it together). The order is
    that of the modules, of which Transformer Engine's have their norm first."""
    from dataclasses import replace

    from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource

    return {
        f"{shard.meta.name} {shard.meta.rows}": (
            replace(shard.meta, position=0),
            shard.ranges,
            shard.group is not None,
        )
        for shard in MegatronWeightSource(model, groups).shards()
    }


def blocks(model: Any, groups: Any) -> dict[str, Any]:
    """Return key and place → what a checkpoint writes there, and that it is a parameter's own memory."""
    from skyrl_megatron.runtime.checkpoint.rank_state import local_blocks

    own = {id(parameter) for chunk in model.chunks for parameter in chunk.parameters()}
    own |= {id(buffer) for chunk in model.chunks for buffer in chunk.buffers()}
    found = {}
    for tensor, pieces in local_blocks(model.chunks, groups):
        for piece in pieces:
            is_own = id(tensor) in own or any(
                tensor.data_ptr() == other.data_ptr() for chunk in model.chunks for other in chunk.buffers()
            )
            found[f"{piece.key} {piece.offsets}"] = (piece.shape, piece.global_shape, piece.replica[:2], is_own)
    return found


def factors(model: Any, groups: Any) -> dict[str, Any]:
    """Return name → (shape, split) of the adapters of all linear maps."""
    from skyrl_megatron_lora.attach import attach
    from skyrl_megatron_lora.layers import AdapterSettings
    from skyrl_megatron_lora.targets import select

    adapters = attach(model, groups, select(model.hf.plan, "all-linear"), AdapterSettings(2, 4, 0.0, "kaiming"))
    return {factor.name: (tuple(factor.tensor.shape), factor.split) for factor in adapters.factors()}


def _whole(what: str, found: dict[str, Any], model: Any, groups: Any) -> list[str]:
    """Check the weights that are whole under Transformer Engine: loaded, sent by one rank, and stored as one block."""
    right = {
        "weights": lambda name, it: it == (model.hf.plan.by_name[name].shape, None),
        "sent": lambda name, it: groups.tp.rank() == 0 and it[1][0].count == it[0].shape[0] and not it[2],
        "blocks": lambda name, it: it[0] == it[1][-2:] and it[2][1] == groups.tp.rank(),
        "factors": lambda name, it: it[1] is None or groups.tp.size() == 1,
    }[what]
    return [
        f"{what}: {name} is not whole: {it}"
        for name, it in found.items()
        if any(word in name for word in WHOLE) and "layer_norm" not in name and not right(name, it)
    ]


def _differences(what: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what only one has and what differs, but for :data:`WHOLE` weights."""
    theirs, ours = (
        {name: found for name, found in each.items() if not any(word in name for word in WHOLE)}
        for each in (theirs, ours)
    )
    wrong = [f"{what}: only of TE: {name}" for name in theirs.keys() - ours.keys()]
    wrong += [f"{what}: TE has no {name}" for name in ours.keys() - theirs.keys()]
    same = sorted(theirs.keys() & ours.keys())
    return wrong + [f"{what}: {n}: {theirs[n]}, ours {ours[n]}" for n in same if theirs[n] != ours[n]]
