"""The metadata of what all trainer ranks send, checked before a byte travels.

An engine fills a module that it got only a part of with garbage and says nothing, and it ignores names that it does
not know. So the tensors of all ranks must make up the model exactly: every tensor, whole, once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, is_dataclass
from typing import Any

from bridges.engine_form import EngineForm
from bridges.errors import BridgeError
from bridges.plan import Plan
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.turned import travelling

NAMED_IN_MESSAGES = 5
VALUES = "float8_e4m3fn"
"""The dtype of values that travel in 8 bits."""
FUSED_EXPERTS = frozenset({"glm4_moe", "qwen3_moe"})
"""Families whose experts travel as one tensor a layer: vLLM loads them three times as fast as one by one
(``benchmarks/weight_sync.py``). Those of which a test with a real engine says so."""
_FUSED = re.compile(r"^(?P<layer>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)$")
Shape = tuple[int, ...]


def plain_metadata(metadata: Sequence[Sequence[Any]]) -> list[list[list[Any]]]:
    """Turn the metadata of all senders, ``TensorMeta`` or tuples, into the lists of fields that go to workers."""
    return [[list(astuple(m) if is_dataclass(m) and not isinstance(m, type) else m) for m in s] for s in metadata]


def metadata_of(
    name: str,
    dtype: str,
    shape: Sequence[int],
    rows: Sequence[int] | None = None,
    position: int = -1,
    turned: str | None = None,
) -> TensorMeta:
    """Make a tensor's metadata of its fields as they come to a worker."""
    return TensorMeta(name, dtype, tuple(shape), None if rows is None else (rows[0], rows[1]), position, turned)


def check_metadata(
    metadata: Sequence[Sequence[TensorMeta]], hf_config: Mapping[str, Any], *, draft: bool = False
) -> None:
    """Raise WeightSyncError unless the senders send exactly the tensors of the model that ``hf_config`` (a HF
    ``config.json``) describes, in one of the namings that the engine loads.

    Experts may travel one by one, as on disk, or fused over a layer: ``experts.gate_up_proj`` [E, 2·ffn, H] and
    ``experts.down_proj`` [E, H, ffn]. What is on disk in another form travels as :mod:`weight_sync.turned` says. A
    tied output layer may be sent or not. Values of 8 bits come with their scales (``quantised_source.py``). ``draft``:
    with the layer of multi-token prediction, which is trained.
    """
    problems: list[str] = []
    found = _without_scales(wholes(metadata, problems), metadata, hf_config, problems)
    plan = Plan.of(hf_config, draft=draft)
    expected: dict[str, Shape] = dict(pair for entry in plan.entries for pair in travelling(entry))
    for copy in plan.copies:
        found.pop(copy, None)
    for name, shape in list(found.items()):
        if name not in expected and (fused := _FUSED.match(name)):
            for single, single_shape in _unfused(fused, shape).items():
                found[single] = single_shape
            del found[name]
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {named_some(missing)}")
    for name in extra[:NAMED_IN_MESSAGES]:
        near = difflib.get_close_matches(name, missing or expected, n=1)
        problems.append(f"{name} is no tensor of the model" + (f" (nearest: {near[0]})" if near else ""))
    if len(extra) > NAMED_IN_MESSAGES:
        problems.append(f"{len(extra) - NAMED_IN_MESSAGES} more unknown tensors")
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, the model has {list(expected[name])}")
    if problems:
        raise WeightSyncError("the trainer's weights are not the whole model: " + "; ".join(problems))


def wholes(metadata: Sequence[Sequence[TensorMeta]], problems: list[str]) -> dict[str, Shape]:
    """Return name → shape of every tensor; rows sent by several ranks must make it up without gap or overlap."""
    shards: dict[str, list[TensorMeta]] = {}
    for sender in metadata:
        for meta in sender:
            shards.setdefault(meta.name, []).append(meta)
    for name, pieces in shards.items():
        if len({(meta.shape, meta.dtype) for meta in pieces}) > 1:
            problems.append(f"{name} is listed with different shapes or dtypes")
        end = 0
        for start, stop in sorted(meta.rows or (0, meta.shape[0] if meta.shape else 1) for meta in pieces):
            if start < end:
                problems.append(f"rows {start} to {min(end, stop)} of {name} are sent twice")
            elif start > end:
                problems.append(f"rows {end} to {start} of {name} are missing")
            end = max(end, stop)
        if pieces[0].shape and end != pieces[0].shape[0]:
            problems.append(f"rows {end} to {pieces[0].shape[0]} of {name} are missing")
    return {name: pieces[0].shape for name, pieces in shards.items()}


def _without_scales(
    found: dict[str, Shape],
    metadata: Sequence[Sequence[TensorMeta]],
    hf_config: Mapping[str, Any],
    problems: list[str],
) -> dict[str, Shape]:
    """Return ``found`` without the scales of values in 8 bits, each of which must have its own."""
    dtypes = {meta.name: meta.dtype for sender in metadata for meta in sender}
    values = [name for name, dtype in dtypes.items() if dtype == VALUES]
    if not values:
        return found
    try:
        form = EngineForm.of(hf_config, "config.json")
    except BridgeError as error:
        problems.append(str(error))
        return found
    if form is None:
        problems.append(f"{named_some(values)} come in 8 bits, and config.json has no quantization_config")
        return found
    for name in values:
        scales, shape = name + form.suffix, found[name]
        grid = form.grid((shape[0], shape[1])) if len(shape) == 2 else None
        told = f"{list(found[scales])} {dtypes[scales]}" if scales in found else "missing"
        if grid is None or found.get(scales) != grid or dtypes[scales] != form.scale_dtype:
            problems.append(f"{scales} is {told}, the model has {list(grid or ())} {form.scale_dtype}")
    own = {name + form.suffix for name in values}
    return {name: shape for name, shape in found.items() if name not in own}


def _unfused(fused: re.Match[str], shape: Shape) -> dict[str, Shape]:
    layer, experts = fused["layer"], range(shape[0])
    if fused["projection"] == "down_proj":
        return {f"{layer}.{expert}.down_proj.weight": shape[1:] for expert in experts}
    half = (shape[1] // 2, *shape[2:])
    return {f"{layer}.{expert}.{name}_proj.weight": half for expert in experts for name in ("gate", "up")}


def named_some(names: Sequence[str]) -> str:
    """Name the first few, and count the others."""
    more = len(names) - NAMED_IN_MESSAGES
    return ", ".join(names[:NAMED_IN_MESSAGES]) + (f" and {more} more" if more > 0 else "")
