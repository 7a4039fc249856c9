"""Whether a PEFT folder holds the adapter that a run trains: found before anything starts. Needs no Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bridges.errors import BridgeError
from bridges.json_file import read_json
from bridges.peft_folder import AdapterConfig, PeftFolder
from bridges.plan import Plan
from bridges.rows import Shape
from skyrl_megatron.runtime.lora.base import fingerprint
from skyrl_megatron.runtime.lora.targets import KEY, Selection, adapted

BASE = "base_model.json"
"""The file of an adapter folder that says by hash which weights the adapter was trained on; PEFT has none for it."""
_HASH = "fingerprint"


def selected_modules(selection: Selection, plan: Plan) -> dict[str, Shape]:
    """Return HF module → shape of its weight for every adapted projection of the whole model, in model order."""
    return {piece.name.removesuffix(".weight"): piece.shape for _, piece in adapted(plan, selection)}


def base_file(base: str) -> bytes:
    """Return the content of :data:`BASE`. ``base``: fingerprint of the weights (``base.py``)."""
    return (json.dumps({_HASH: base}, indent=2) + "\n").encode()


def misfits(peft: PeftFolder, wanted: AdapterConfig, selection: Selection, plan: Plan) -> Iterator[str]:
    """Yield what ``peft`` has otherwise than ``wanted`` and ``selection``, with the setting to change."""
    config = peft.config
    for name, theirs, ours in (
        ("rank", config.rank, wanted.rank),
        ("alpha", config.alpha, wanted.alpha),
        ("use_rslora", config.rank_stabilised, wanted.rank_stabilised),
    ):
        if theirs != ours:
            value = f"{theirs:g}" if name == "alpha" else str(theirs).lower()
            yield f"{KEY}.{name} is {ours}, the folder's {value}: set {KEY}.{name}={value}"
    modules = set(selected_modules(selection, plan))
    if absent := sorted(modules - peft.modules):
        yield f"{absent[0]} has no adapter there ({len(absent)} in all): set {KEY}.target_modules to fit"
    if extra := sorted(peft.modules - modules):
        yield f"{extra[0]} has an adapter there ({len(extra)} in all): set {KEY}.target_modules to fit"


def base_misfit(folder: Path, base: str | Path) -> str | None:
    """Say that an adapter was trained on other weights than ``base``: their fingerprint, or their folder. None where
    they are the same, or the folder does not say (other programs write no :data:`BASE`)."""
    try:
        saved = read_json(folder / BASE).get(_HASH)
    except BridgeError:
        return None
    ours = base if isinstance(base, str) else fingerprint(base)
    if not isinstance(saved, str) or saved == ours:
        return None
    fix = "set trainer.policy.model.path to the model that it was trained on"
    return f"it is an adapter of another base model ({BASE} has {saved[:12]}…, these weights are {ours[:12]}…): {fix}"
