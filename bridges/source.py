"""Sources of conversion and verification: tensors by HF name, config and tokenizer files of a folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bridges.disk_form import AS_TEXT, DiskForm
from bridges.errors import BridgeError
from bridges.files import holds_text_model, read_hf_config, read_json, refuse_outside, refuse_special, text_config
from bridges.hf_io import HfFolder
from bridges.plan import PREDICTION_LAYERS, Plan, without_output_layer
from bridges.quantized import DequantizedFolder
from bridges.rows import Shape
from bridges.rules import CheckpointLocation, Entry, checkpoint_locations
from bridges.staging import write_file

# small files of a HF folder that are copied with a model, including its licence
ASSETS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json",
    "chat_template*", "*.model", "*.tiktoken", "*processor_config.json", "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
CONVERT = "skyrl-megatron convert CHECKPOINT OUT"  # other verbs that read a checkpoint have no options for it
HF_SUBFOLDER = "huggingface"  # config, tokenizer and generation config inside a Megatron folder; never weights
CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HF_DTYPE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of ``bf16``, ``fp16`` or ``fp32``; None (keep the stored dtype) for None."""
    if name is None:
        return None
    if name not in CAST_TO:
        raise BridgeError(f"--dtype {name} is not known; use one of {', '.join(CAST_TO)}")
    return CAST_TO[name]


def output_config(config: Mapping[str, Any], dtype: torch.dtype | None, drop_mtp: bool) -> dict[str, Any]:
    """Return the output's ``config.json``: the input's with the output's dtype and number of prediction layers.

    ``quantization_config`` is removed, because outputs are never quantised.
    """
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if holds_text_model(config):
        result["text_config"] = output_config(config["text_config"], dtype, drop_mtp)
    if dtype in HF_DTYPE:
        for key in ("dtype", "torch_dtype"):
            if key in result:
                result[key] = HF_DTYPE[dtype]
    if drop_mtp:
        result |= {key: 0 for key in PREDICTION_LAYERS if key in result}
    return result


def value_config(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model with a value head, for transformers' ``AutoModelForTokenClassification``.

    ``architecture``: that of the family. Of a model of text and images it is the language model's.
    """
    classifier = architecture.replace("ForCausalLM", "ForTokenClassification")
    return {**text_config(config), "architectures": [classifier], "id2label": {"0": "value"}, "label2id": {"value": 0}}


def asset_files(source: Path) -> list[Path]:
    """Return the small files of a HF folder, without ``config.json``.

    Raises :class:`BridgeError` for special files, and for links to files outside the folder, because they would be
    published with the model.
    """
    assets = []
    for path in (path for pattern in ASSETS for path in sorted(source.glob(pattern))):
        refuse_special(path)
        if path.is_file() and path.suffix != ".safetensors":
            refuse_outside(path, source)
            assets.append(path)
    return assets


TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """How the files of an exported folder differ from those of the model that it was trained from."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries that replace those of ``config.json``."""
    pad_token: str | None = None
    """The token with which the folder's tokenizer pads; None: as before."""

    def assets(self, source: Path) -> dict[str, bytes]:
        """Return name → content of the small files for ``source``, without ``config.json``.

        Raises :class:`BridgeError` as :func:`asset_files` does, and for a tokenizer's file that is not JSON.
        """
        files = {path.name: path.read_bytes() for path in asset_files(source)}
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS) if self.pad_token is not None else ():
            if name in files or name == TOKENIZER_CONFIG:
                values = read_json(source / name) if name in files else {}
                files[name] = _as_json(values | {"pad_token": self.pad_token})
        return files


def _as_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def copy_assets(source: Path, target: Path, config: Mapping[str, Any], changes: FolderChanges | None = None) -> None:
    """Copy tokenizer and generation config from ``source`` to ``target`` and write ``config`` there, with ``changes``.

    Raises :class:`BridgeError` as :meth:`FolderChanges.assets` does.
    """
    changes = changes or FolderChanges()
    target.mkdir(exist_ok=True)
    for name, content in changes.assets(source).items():
        write_file(target / name, content)
    write_file(target / "config.json", _as_json({**config, **changes.config}))


MANIFEST = "MANIFEST.json"  # in a training run's checkpoint, next to a folder for each role
PASSTHROUGH = "carried."  # key prefix of tensors that are copied unchanged (multi-token prediction)
OUTPUT_LAYER = "output_layer.weight"  # key of the vocabulary's output layer, or of a value head [1, H]
SCORE = "score.weight"  # HF name of a value head, as in ...ForTokenClassification; loads with any prefix setting
# key prefixes of a training checkpoint that are not weights
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine")


class Source(Protocol):
    """Tensors of a model by their HF names."""

    path: Path
    config: dict[str, Any]
    form: DiskForm

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that :meth:`read` returns."""

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor, or its slice ``[index]``; may be a view of a mapped file."""


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder looks like a Megatron distributed checkpoint (complete or not)."""
    return (path / "metadata.json").exists() or (path / ".metadata").exists() or any(path.glob("*.distcp"))


def model_folder(path: Path) -> Path:
    """Return the folder with a model's tensors.

    For a training run's checkpoint (``global_step_N``) this is the folder of the policy, or of its only role; any
    other folder is returned unchanged. Raises :class:`BridgeError` if the checkpoint holds only adapters.
    """
    step = path if (path / MANIFEST).is_file() else path.parent
    try:
        manifest = json.loads((step / MANIFEST).read_bytes())
        roles, bases = list(manifest["layouts"]), manifest.get("bases") or {}
    except (OSError, ValueError, KeyError, TypeError):
        return path
    role = path.name
    if step == path:
        role = "policy" if "policy" in roles or len(roles) != 1 else roles[0]
    if role in bases:
        raise BridgeError(
            f"{step / role} holds only the adapters of a run with trainer.policy.model.lora.rank, without the base "
            "weights: run the same command with trainer.hf_save_interval=1 to export them"
        )
    return step / role


def open_hf(path: Path) -> Source:
    """Open a HF folder; quantised weights are dequantised and have the names of the bf16 model."""
    folder = HfFolder(path)
    return DequantizedFolder(folder) if folder.config.get("quantization_config") else folder


def open_source(path: Path, template: Path | None = None) -> Source:
    """Open a HF or Megatron folder; for a run's checkpoint, its policy."""
    path = model_folder(path)
    return MegatronSource(path, template) if is_checkpoint(path) else open_hf(path)


class MegatronSource:
    """A Megatron folder read as HF tensors. ``template``: folder with ``config.json`` if the checkpoint has none.

    A value head (of a critic or a reward model) in place of the output layer is the HF tensor :data:`SCORE`.
    """

    def __init__(self, path: Path, template: Path | None = None) -> None:
        self.path = path
        from bridges.torch_dist import DistCheckpoint  # loads torch.distributed, and a check reads no checkpoint

        self.checkpoint = DistCheckpoint(path)
        self.hf_files = _hf_files(path, template)
        self.config = read_hf_config(self.hf_files)
        self.plan, self.form = Plan.of(self.config), DiskForm.of(self.config)
        last = self.checkpoint.tensors.get(OUTPUT_LAYER)
        self.has_value_head = last is not None and last.shape == (1, self.plan.shape.dims["H"])
        if self.has_value_head:
            self.plan, self.form = without_output_layer(self.plan), AS_TEXT
            named = any("Classification" in name for name in self.config.get("architectures") or ())
            config_here = text_config(self.config)
            self.config = config_here if named else value_config(config_here, self.plan.family.architecture)
        self.places = self._places()
        self.passthrough = {
            key.removeprefix(PASSTHROUGH): key for key in self.checkpoint.tensors if key.startswith(PASSTHROUGH)
        }
        self._unchanged = self.passthrough | ({SCORE: OUTPUT_LAYER} if self.has_value_head else {})
        self._by_hf = {
            piece.name: (entry, position)
            for entry in self.plan.entries
            for position, piece in enumerate(entry.hf)
            if piece.index in (None, 0)
        }
        self._stacked = {(piece.name, piece.index): entry for entry in self.plan.entries for piece in entry.hf}
        self._last = threading.local()

    def _places(self) -> dict[str, CheckpointLocation]:
        stored = self.checkpoint.tensors
        uniform = not any(key.startswith("decoder.layers.0.") for key in stored)
        places, problems, used = {}, [], {OUTPUT_LAYER} if self.has_value_head else set()
        for entry in self.plan.entries:
            candidates = checkpoint_locations(entry, self.plan.shape, uniform=uniform)
            location = next((location for location in candidates if location.key in stored), None)
            if location is None:
                problems.append(f"missing {candidates[0].key} (for {entry.name})")
                continue
            used.add(location.key)
            places[entry.name] = location
            problem = self._shape_problem(entry, location)
            problems += [problem] if problem else []
        passthrough = {
            key for key in stored if key.startswith((PASSTHROUGH, *NOT_WEIGHTS)) or key.endswith("_extra_state")
        }
        problems += [f"unknown {key}" for key in stored if key not in used and key not in passthrough]
        if problems:
            listed = "\n  ".join(dict.fromkeys(problems[:12]))
            raise BridgeError(
                f"{self.path}: its tensors do not match {self.hf_files / 'config.json'} "
                f"(model_type={self.plan.family.model_type}):\n  {listed}\nConvert it with the config.json of this "
                f"model: {CONVERT} --hf-template FOLDER; singleton_local_shards are not supported"
            )
        return places

    def _shape_problem(self, entry: Entry, place: CheckpointLocation) -> str | None:
        found = self.checkpoint.tensors[place.key].shape
        expected = (*place.axes, *entry.shape)
        if entry.split.vocab and len(found) == 2 and found[0] >= expected[0] and found[1] == expected[1]:
            return None  # the vocabulary is stored with padding
        return None if found == expected else f"{place.key} is {list(found)}, expected {list(expected)}"

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor, multi-token-prediction layers included if the checkpoint has them."""
        extra = {name: self.checkpoint.tensors[key].shape for name, key in self._unchanged.items()}
        return {**self.plan.hf, **extra}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype stored in the checkpoint."""
        key = self._unchanged.get(name) or self.places[self._by_hf[name][0].name].key
        return self.checkpoint.tensors[key].dtype

    def parts(self, entry: Entry) -> tuple[Tensor, ...]:
        """Return the parts of an entry's Megatron tensor, [rows / parts, …] each, in the checkpoint's dtype (see
        :class:`bridges.conversions.Conversion`)."""
        location = self.places[entry.name]
        rows = entry.shape[0] // entry.parts
        shape = (*((1,) * len(location.axes)), rows, *entry.shape[1:])
        rest = (0,) * (len(entry.shape) - 1)
        return tuple(
            self.checkpoint.read(location.key, (*location.index, part * rows, *rest), shape, len(location.axes))
            for part in range(entry.parts)
        )

    def hf_tensors(self, entry: Entry) -> tuple[Tensor, ...]:
        """Return the HF tensors of an entry, [shape on disk] (one expert's slices if stacked), in the order of
        ``entry.hf``."""
        return entry.bound.conversion.from_parts(self.parts(entry))

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor by HF name, [shape on disk], or the slice [index] of it. The last converted entry is cached,
        because q, k and v are read in turn."""
        if name in self._unchanged:
            shape = self.checkpoint.tensors[self._unchanged[name]].shape
            stored = self.checkpoint.read(self._unchanged[name], (0,) * len(shape), shape)
            return stored if index is None else stored[index]
        entry, position = self._by_hf[name]
        if entry.hf[position].index is not None:
            if index is None:
                experts = range(self.plan.hf[name][0])
                return torch.stack([self.read(name, expert) for expert in experts])
            entry = self._stacked[name, index]
        if getattr(self._last, "entry", None) is not entry:
            self._last.tensors = self.hf_tensors(entry)
            self._last.entry = entry
        tensor: Tensor = self._last.tensors[position]
        return tensor


def _hf_files(path: Path, template: Path | None) -> Path:
    """Return the folder that holds ``config.json`` for a checkpoint."""
    for folder in [template] if template else [path / HF_SUBFOLDER, path.parent / HF_SUBFOLDER, path]:
        if (folder / "config.json").exists():
            return folder
    where = template or path / HF_SUBFOLDER
    raise BridgeError(
        f"{where} holds no config.json; convert it with that of the original HF folder: {CONVERT} --hf-template FOLDER"
    )


def key_dtypes(
    plan: Plan, source: Source, dtype: torch.dtype | None, key_of: Mapping[str, str]
) -> dict[str, torch.dtype]:
    """Return checkpoint key → dtype: ``dtype``, or the dtype on disk if it is None or the row keeps its dtype.

    Raises :class:`BridgeError` if tensors under one key have different dtypes.
    """
    kinds: dict[str, tuple[torch.dtype, str]] = {}
    for entry in plan.entries:
        key = key_of[entry.name]
        for piece in entry.hf:
            on_disk = source.dtype(piece.name)
            kept = on_disk if dtype is None or entry.bound.row.keep_dtype else dtype
            first = kinds.setdefault(key, (kept, piece.name))
            if first[0] != kept:
                raise BridgeError(
                    f"{source.path}: {piece.name} is {kept} and {first[1]} is {first[0]}, but Megatron stores both in "
                    f"one tensor ({key}); choose one with python -m bridges import --dtype"
                )
    return {key: value for key, (value, _) in kinds.items()}
