"""Select the linear layers that get an adapter, by Hugging Face's or Megatron's names, and check whether a PEFT folder
fits. Does not import Megatron.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.errors import BridgeError
from bridges.files import read_json, weights_fingerprint
from bridges.peft import AdapterConfig, PeftFolder
from bridges.plan import Plan
from bridges.rows import Shape
from bridges.rules import Entry, HfSlice
from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.layout import ParallelConfig


ALL_LINEAR = "all-linear"
KEY = "trainer.policy.model.lora"
_ENDS = ("embedding.word_embeddings", "output_layer")


@dataclass(frozen=True)
class Target:
    """A weight that can have an adapter: one linear layer of Megatron, one to three HF projections."""

    entry: Entry

    @cached_property
    def module(self) -> str:
        """Canonical global name of the module, e.g. ``decoder.layers.3.mlp.experts.7.linear_fc1``."""
        return self.entry.name.removesuffix(".weight")

    @cached_property
    def hf_modules(self) -> tuple[str, ...]:
        """Its HF modules in the order of its rows, e.g. ``model.layers.3.self_attn.q_proj``, …"""
        return tuple(piece.name.removesuffix(".weight") for piece in self.entry.hf)

    @property
    def projections(self) -> tuple[str, ...]:
        """Last parts of the HF names: ``q_proj``, ``k_proj``, ``v_proj``."""
        return tuple(name.rpartition(".")[2] for name in self.hf_modules)


@dataclass(frozen=True, slots=True)
class Selection:
    """The targets of a run: canonical module name → the HF projections that are adapted, in the order of the rows."""

    modules: dict[str, tuple[str, ...]]


def targets(plan: Plan) -> Iterator[Target]:
    """Yield every linear layer of a model, including embedding and output layer, without routers."""
    for entry in plan.entries:
        linear = ".linear_" in entry.name or entry.name.removesuffix(".weight") in _ENDS
        if linear and entry.name.endswith(".weight") and len(entry.shape) == 2:
            yield Target(entry)


def select(
    plan: Plan,
    names: str,
    exclude: str | None = None,
    *,
    attention: bool = True,
    mlp: bool = True,
    unembed: bool = False,
    separate: bool = False,
    key: str = KEY,
) -> Selection:
    """Select modules by ``target_modules`` and ``exclude_modules``: names separated by commas. Each name is one or
    more consecutive parts of a HF or Megatron module name (``q_proj``, ``linear_fc1``, ``mlp.experts``, ``layers.0``).

    ``attention``, ``mlp``: ``train_attn`` and ``train_mlp``; layers of a kind that is false get no adapter, named or
    not. ``unembed``: ``train_unembed``, the output layer with ``all-linear``. ``separate``: every HF projection has a
    separate adapter (``canonical_lora``); else the projections of one Megatron module share an adapter. Raises
    ConfigError for a name that matches nothing (with the nearest names), for a part of a joined module, for an empty
    selection, and for a family whose layers on disk cannot have adapters.
    """
    everything = list(targets(plan))
    wanted = _words(names)
    chosen: dict[str, tuple[str, ...]] = {}
    problems = _unknown(everything, wanted, f"{key}.target_modules")
    problems += _unknown(everything, _words(exclude), f"{key}.exclude_modules")
    for target in everything:
        if target.module in _ENDS:
            every = unembed and ALL_LINEAR in wanted and target.module == _ENDS[1]
        else:
            every = ALL_LINEAR in wanted
            if not (attention if ".self_attention." in target.module else mlp):
                continue
        taken = tuple(
            projection
            for projection, hf in zip(target.projections, target.hf_modules, strict=True)
            if (every or _named(target.module, hf, wanted)) and not _named(target.module, hf, _words(exclude))
        )
        if not taken:
            continue
        problems += _misfits(target, taken, separate, names, key)
        chosen[target.module] = taken
    if "untied" not in plan.shape.flags:
        problems += _tied(chosen, unembed, names, key)
    if not chosen and not problems:
        off = [name for name, trained in (("train_attn", attention), ("train_mlp", mlp)) if not trained]
        why = f" with {' and '.join(f'{name}=false' for name in off)}" if off else ""
        fix = f"selects no linear layer{why}: name at least one{', or set it to true' if off else ''}"
        problems.append(Problem(f"{key}.target_modules", names, fix))
    # the same problem once: every layer of the model reports it
    if problems:
        # dict, not set: the order of the problems is that of the layers
        raise ConfigError(list({str(problem): problem for problem in problems}.values()))
    return Selection(chosen)


def _tied(chosen: Mapping[str, object], unembed: bool, names: str, key: str) -> Iterator[Problem]:
    """Yield problems for an adapter of tied embeddings. PEFT would apply it to only one of the two layers."""
    fix = "this model's output layer is its embedding, and an adapter of only one of them would untie them: "
    if unembed:
        yield Problem(f"{key}.train_unembed", True, fix + "leave it off")
    if _ENDS[0] in chosen:
        yield Problem(f"{key}.target_modules", names, fix + "leave the embedding out")


def _misfits(target: Target, taken: tuple[str, ...], separate: bool, names: str, key: str) -> list[Problem]:
    if not target.entry.has_rows_of_hf:
        fix = f"{target.hf_modules[0]} holds all experts in one tensor, which cannot have an adapter; exclude it"
        return [Problem(f"{key}.exclude_modules", None, fix)]
    if separate and len(target.projections) > 1 and not target.entry.bound.conversion.keeps_order:
        fix = (
            f"the rows of {', '.join(target.projections)} are interleaved here, so they cannot have separate "
            "adapters: exclude it, or set trainer.policy.megatron_config.lora_config.lora_type=lora"
        )
        return [Problem(f"{key}.exclude_modules", None, fix)]
    if not separate and len(taken) < len(target.projections):
        left = ", ".join(p for p in target.projections if p not in taken)
        fix = (
            f"{', '.join(taken)} without {left}: they are one layer in Megatron; name all of them, or set "
            "trainer.policy.megatron_config.lora_config.lora_type=canonical_lora"
        )
        return [Problem(f"{key}.target_modules", names, fix)]
    return []


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in (text or "").split(",")) if word)


def _named(module: str, hf: str, names: Sequence[str]) -> bool:
    return any(f".{name}." in f".{module}." or f".{name}." in f".{hf}." for name in names)


def _unknown(everything: Sequence[Target], names: Sequence[str], key: str) -> list[Problem]:
    problems = []
    for name in names:
        if name == ALL_LINEAR or any(_named(t.module, hf, (name,)) for t in everything for hf in t.hf_modules):
            continue
        known = {t.module.rpartition(".")[2] for t in everything} | {p for t in everything for p in t.projections}
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        fix = f"no linear layer of this model has this name; {'nearest' if near else 'there are'}: "
        problems.append(Problem(key, name, fix + ", ".join(near or sorted(known))))
    return problems


def adapted(plan: Plan, selection: Selection) -> Iterator[tuple[Entry, HfSlice]]:
    """Yield every adapted HF projection of the model, in order, with the Megatron weight that contains it."""
    for entry in plan.entries:
        taken = selection.modules.get(entry.name.removesuffix(".weight"))
        if taken is not None:
            target = Target(entry)
            for piece, projection in zip(entry.hf, target.projections, strict=True):
                if projection in taken:
                    yield entry, piece


def configured_selection(cfg: SkyRLTrainConfig, plan: Plan) -> Selection:
    """Return what ``policy.model.lora`` selects. Raises as :func:`select`."""
    lora, how = cfg.trainer.policy.model.lora, cfg.trainer.policy.megatron_config.lora_config
    return select(
        plan,
        lora.target_modules,
        lora.exclude_modules,
        attention=lora.train_attn,
        mlp=lora.train_mlp,
        unembed=lora.train_unembed,
        separate=how.lora_type == "canonical_lora",
    )


def expert_rank(cfg: SkyRLTrainConfig, top_k: int | None) -> int:
    """Return the rank of experts' adapters. ``top_k``: experts per token. Raises ConfigError for a rank that
    ``normalize_moe_lora`` cannot divide."""
    rank = cfg.trainer.policy.model.lora.rank
    if not cfg.trainer.policy.megatron_config.lora_config.normalize_moe_lora or not top_k:
        return rank
    if rank % top_k:
        fix = f"normalize_moe_lora divides it among the {top_k} experts of a token: set a multiple of {top_k}"
        raise ConfigError([Problem(f"{KEY}.rank", rank, fix)])
    return rank // top_k


def rank_problems(
    plan: Plan, selection: Selection, rank: int, expert_rank: int, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Yield a Problem if the LoRA rank exceeds a side of a selected matrix on a rank: it could never use more."""
    worst: tuple[int, Problem] | None = None
    for entry in plan.entries:
        if entry.name.removesuffix(".weight") not in selection.modules:
            continue
        wanted_rank, over = (expert_rank, parallel.etp) if entry.is_expert else (rank, parallel.tp)
        sides = [size // (over if axis == entry.split.dim else 1) for axis, size in enumerate(entry.shape)]
        most = min(sides)
        # only the smallest side is reported: the fix for it covers the others
        if wanted_rank > most and (worst is None or most < worst[0]):
            fix = f"{entry.name} is {sides} on a rank: set a rank of at most {most}, or exclude it"
            worst = most, Problem(f"{KEY}.rank", wanted_rank, fix)
    if worst is not None:
        yield worst[1]


BASE = "base_model.json"
"""The file of an adapter folder with the fingerprint of the base weights; PEFT defines no such file."""
_HASH = "fingerprint"


def selected_modules(selection: Selection, plan: Plan) -> dict[str, Shape]:
    """Return HF module → shape of its weight for every adapted projection of the whole model, in model order."""
    return {piece.name.removesuffix(".weight"): piece.shape for _, piece in adapted(plan, selection)}


def base_file(base: str) -> bytes:
    """Return the content of :data:`BASE`. ``base``: :func:`~bridges.files.weights_fingerprint` of the base weights."""
    return (json.dumps({_HASH: base}, indent=2) + "\n").encode()


def adapter_mismatches(peft: PeftFolder, wanted: AdapterConfig, selection: Selection, plan: Plan) -> Iterator[str]:
    """Yield the differences between ``peft`` and ``wanted`` or ``selection``, with the setting to change."""
    config = peft.config
    if config.rank != wanted.rank:
        yield f"{KEY}.rank is {wanted.rank}, the folder's {config.rank}: set {KEY}.rank={config.rank}"
    elif not math.isclose(config.scale, wanted.scale, rel_tol=1e-6):
        # The same factor of B·A can be written in two ways, and an export never has use_rslora.
        ways = {False: config.scale * config.rank, True: config.scale * math.sqrt(config.rank)}
        fixes = [
            f"{KEY}.alpha={round(alpha)} with {KEY}.use_rslora={str(stabilised).lower()}"
            for stabilised, alpha in ways.items()
            if math.isclose(alpha, round(alpha), rel_tol=1e-6)
        ]
        yield (
            f"{KEY}.alpha is {wanted.alpha:g} with use_rslora={str(wanted.rank_stabilised).lower()}, a scale of "
            f"{wanted.scale:g}, the folder's {config.scale:g}: "
            + (f"set {' or '.join(fixes)}" if fixes else "no whole alpha gives it, so use another folder")
        )
    if not peft.is_uniform:
        yield (
            "rank_pattern or alpha_pattern give its projections several ranks or scales, and one is trained: merge it "
            "into the model (python -m bridges merge), and train a new adapter"
        )
    modules = set(selected_modules(selection, plan))
    if absent := sorted(modules - peft.modules):
        yield f"{absent[0]} has no adapter there ({len(absent)} in all): set {KEY}.target_modules to fit"
    if extra := sorted(peft.modules - modules):
        yield f"{extra[0]} has an adapter there ({len(extra)} in all): set {KEY}.target_modules to fit"


def base_mismatch(folder: Path, base: str | Path) -> str | None:
    """Return a message if an adapter was trained on other weights than ``base`` (fingerprint or folder), else None.
    Also None if the folder has no :data:`BASE`, which other programs do not write."""
    try:
        saved = read_json(folder / BASE).get(_HASH)
    except BridgeError:
        # other programs write no base: an adapter of theirs is accepted without this check
        return None
    ours = base if isinstance(base, str) else weights_fingerprint(base)
    if not isinstance(saved, str) or saved == ours:
        return None
    fix = "set trainer.policy.model.path to the model that it was trained on"
    return f"the adapter has another base model ({BASE} has {saved[:12]}…, these weights have {ours[:12]}…): {fix}"
