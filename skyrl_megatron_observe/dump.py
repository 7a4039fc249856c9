"""A step's batch in a file (``trainer.dump_data_batch``), written before the step to debug it later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridges.staging import write_file
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.identity import Identity, as_json, from_json, refuse_other, sampled_identity, sampled_part
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.trainer.recorders import RunRecorder
from skyrl_megatron.types import PaddedBatch, TokenSupport, TrainingBatch

type Versions = list[list[tuple[str, int, int]]]
"""For each row, its spans (policy version, first response token, token after the last)."""


class BatchRecorder(RunRecorder):
    """Writes the batch of each step, with ``trainer.dump_data_batch``."""

    ends_run = True

    def on_batch(self, step: int, batch: TrainingBatch, output: GeneratorOutput) -> None:
        cfg = self.run.cfg
        if cfg.trainer.dump_data_batch:
            versions = output.get("rollout_versions") or ()
            dump_batch(batch, dump_path(cfg, step), versions, sampled_part(self.run.identity()))


def dump_path(cfg: SkyRLTrainConfig, step: int) -> Path:
    """Return the file of a step."""
    return Path(cfg.trainer.export_path) / "dumped_data" / f"global_step_{step}.safetensors"


def dump_batch(
    batch: TrainingBatch,
    path: Path,
    versions: Sequence[Sequence[Sequence[Any]]] = (),
    identity: Identity | None = None,
) -> None:
    """Write the flat tensors of ``batch`` to ``path``, a safetensors file. The file is renamed to ``path`` when
    complete. An OSError, also of a full disk, names the file.

    ``rollout_support`` becomes the vocabulary entries of all rows, the count of each response token, and the tokens of
    each row. ``rollout_routes`` becomes [tokens, L, K] of all rows, and the tokens of each row. Uids, adapters,
    ``versions`` and the ``identity`` of what sampled them are in the metadata, as JSON.
    """
    from safetensors.torch import save  # save_file raises errors of its own for a full disk

    private_folder(path.parent)
    fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    tensors |= {name: torch.from_numpy(fields[name]) for name in ("lengths", "response_lengths")}
    if batch.rollout_support:
        joined = TokenSupport.joined(batch.rollout_support)
        tensors["rollout_support_ids"] = torch.from_numpy(joined.ids.astype("int32"))
        tensors["rollout_support_counts"] = torch.from_numpy(joined.counts)
        tensors["rollout_support_tokens"] = torch.tensor([len(support) for support in batch.rollout_support])
    if recorded := [routes for routes in batch.rollout_routes if routes is not None]:
        tensors["rollout_routes"] = torch.from_numpy(np.concatenate(recorded).astype("int32"))
        counts = [0 if routes is None else len(routes) for routes in batch.rollout_routes]
        tensors["rollout_routes_counts"] = torch.tensor(counts)
    metadata: dict[str, Any] = {"uids": batch.uids, "adapters": batch.adapters, "versions": list(versions)}
    metadata["identity"] = as_json(identity or {})
    unfinished = path.with_name(f".{path.name}")
    write_file(unfinished, save(tensors, {name: json.dumps(value) for name, value in metadata.items()}))
    unfinished.replace(path)


def refuse_other_dump(cfg: SkyRLTrainConfig, step: int) -> None:
    """Raise ConfigError if the batch of a step was sampled with another model, tokenizer or template than the
    configuration's, which ``trainer.resume_other`` allows. Raises ValueError if the file is not a dumped batch."""
    from safetensors import SafetensorError, safe_open

    path = dump_path(cfg, step)
    try:
        with safe_open(str(path), "pt") as file:
            saved = from_json(json.loads((file.metadata() or {}).get("identity", "{}")))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a dumped batch ({error})") from error
    instead = "Set those of the dump"
    here = sampled_identity(cfg) if saved else {}  # a dump of an older version does not say
    refuse_other("--step", f"{step} ({path})", saved, cfg, here, instead=instead, to="use it")


def read_dump(path: Path) -> tuple[TrainingBatch, Versions]:
    """Return the batch that :func:`dump_batch` wrote, and the versions that sampled it. Raises OSError if the file is
    missing, ValueError if it is not a dumped batch."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a dumped batch ({error})") from error
    ragged = {
        name: tensors.pop(name).numpy()
        for name in list(tensors)
        if name.startswith(("rollout_support", "rollout_routes"))
    }
    lists = {name: metadata.get(name, []) for name in ("uids", "adapters")}
    if "sequences" in tensors:  # written by an older version, padded
        batch = _flat(PaddedBatch(**tensors, **lists), metadata.get("versions", []))
    else:
        lengths = {name: tensors.pop(name).numpy() for name in ("lengths", "response_lengths")}
        batch = TrainingBatch(**tensors, **lengths, **lists)
    if "rollout_support_ids" in ragged:
        rest = TokenSupport(ragged["rollout_support_ids"], ragged["rollout_support_counts"])
        for tokens in ragged["rollout_support_tokens"].tolist():
            batch.rollout_support.append(rest.first(tokens))
            rest = rest.last(len(rest) - tokens)
    if "rollout_routes" in ragged:
        by_row = np.split(ragged["rollout_routes"], np.cumsum(ragged["rollout_routes_counts"])[:-1])
        batch.rollout_routes = [routes if len(routes) else None for routes in by_row]
    return batch, metadata.get("versions", [])


def _flat(padded: PaddedBatch, versions: Versions) -> TrainingBatch:
    """Return the rows of an older file, without padding. The masks of a row that failed do not tell its response: its
    sampled spans do, or what the engine said of its tokens."""
    counts, width = padded.flat().response_lengths.copy(), padded.response_mask.shape[1]
    told = [values != 0 for values in (padded.rollout_logprobs, padded.rewards) if values is not None]
    for row in np.flatnonzero(counts == 0).tolist():
        tokens = [torch.nonzero(values[row]) for values in told]
        first = min((int(places[0]) for places in tokens if len(places)), default=width)
        last = max((end for _, _, end in versions[row]), default=0) if versions else 0
        counts[row] = min(max(width - first, last), int(padded.lengths[row]))
    padded.response_lengths = counts
    return padded.flat()
