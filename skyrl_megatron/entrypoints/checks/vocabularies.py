"""Roles besides the policy read the policy's token ids: their tokenizers must give each token the same id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridges.errors import BridgeError
from bridges.json_file import read_json
from skyrl_megatron.config.rules.role_layout import active_roles
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem
from skyrl_megatron.hub import cached_folder


def vocabularies(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield models with another tokenizer, or fewer embeddings, than the policy's. Folders without a tokenizer are
    compared by the number of embeddings alone."""
    trainer = run.cfg.trainer
    policy = cached_folder(run.cfg, weights=False)
    if policy is None:
        return
    for role in active_roles(run.cfg):
        path = getattr(trainer, role).model.path
        folder = cached_folder(run.cfg, role, weights=False) if path != trainer.policy.model.path else None
        if folder is not None and (difference := _difference(policy, folder)):
            yield Problem(
                f"trainer.{role}.model.path", path, f"{difference}: it would read the policy's tokens as others"
            )


def _difference(policy: Path, other: Path) -> str | None:
    """Say how two folders differ in what token ids mean; None where they agree or cannot be compared."""
    ours, theirs = _tokens(policy), _tokens(other)
    if ours and theirs and ours != theirs:
        token = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
        named = [tokens.get(token, "no token") for tokens in (ours, theirs)]
        return f"its tokenizer is not the policy's ({token!r} is {named[1]} here, {named[0]} there)"
    sizes = _embeddings(policy), _embeddings(other)
    if None in sizes or sizes[0] == sizes[1] or (ours and theirs and max(ours.values()) < int(sizes[1] or 0)):
        return None
    return f"its vocabulary has {sizes[1]} entries, the policy's {sizes[0]}; take a model with the same"


def _tokens(folder: Path) -> dict[str, int]:
    """Return token → id of ``tokenizer.json``; {} where there is none, or one of another kind."""
    try:
        described: dict[str, Any] = read_json(folder / "tokenizer.json")
        vocabulary = described["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] by id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in described.get("added_tokens", ())}}
    except (BridgeError, ValueError, KeyError, TypeError):
        return {}


def _embeddings(folder: Path) -> int | None:
    try:
        return int(read_json(folder / "config.json")["vocab_size"])
    except (BridgeError, ValueError, KeyError, TypeError):
        return None
