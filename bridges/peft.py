"""Read and write PEFT adapter folders, and merge an adapter into a HF folder.

Expert adapters have two formats. One tensor per expert, as in the base model's folder and as vLLM reads them:
``….mlp.experts.7.gate_proj.lora_A.weight`` [r, in]. Or stacked, as PEFT stores them for models with all experts in one
parameter (``target_parameters``): ``….mlp.experts.base_layer.lora_A.weight`` [E·r, H] for gate and up together, and
``….mlp.experts.lora_A.weight`` [E·r, M] for down, with experts outermost; ``lora_B`` [out, r·E] has experts innermost.

The factors of the embedding are ``….embed_tokens.lora_embedding_A`` [r, V] and ``lora_embedding_B`` [H, r]. Here they
are read as Bᵀ and Aᵀ, because the embedding's weight is [V, H].
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bridges.convert import Report
from bridges.errors import BridgeError
from bridges.files import check_folder, read_json
from bridges.hf_io import HfWriter, TensorInfo, map_file, read_header, view_of
from bridges.plan import Plan
from bridges.rows import Shape
from bridges.rules import Entry
from bridges.source import copy_assets, open_hf, output_config
from bridges.staging import Progress, in_threads, shares, staged

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_EMBEDDING = "embed_tokens"
_BASE_WEIGHT = ".base_layer.weight"
"""Suffix of frozen base weights of embedding and output layer, which PEFT saves with their adapters."""
_STACKED = re.compile(r"^(?P<experts>.*\.layers\.(?P<layer>\d+)\..*experts)(?P<inner>\.base_layer)?$")
# Options of adapter_config.json that two factors cannot represent → values that leave the option off.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
}
# How PEFT 0.21 resolves gate_proj, up_proj and down_proj on transformers 5, where experts are single parameters
# (_MOE_TARGET_MODULE_MAPPING and _convert_peft_config_moe of peft/utils/transformers_weight_conversion.py, with the
# families of _MODEL_TO_CONVERSION_PATTERN in transformers/conversion_mapping.py). Mixtral and MiniMax-M2 are in
# neither set: PEFT maps their w1, w2 and w3, which only experts have.
TAKEN_FOR_EXPERTS = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "solar_open",
    }
)
"""Families where PEFT maps the names to experts only: it drops adapters of dense layers and shared experts."""
NOT_TAKEN_FOR_EXPERTS = frozenset({"hy_v3", "mimo_v2_flash", "qwen2_moe", "qwen3_5_moe_text"})
"""Families where PEFT does not map the names to experts: it drops adapters of experts."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter that are common to all projections."""

    rank: int
    alpha: float
    rank_stabilised: bool
    base: str | None
    """Name or folder of the base model according to the adapter."""

    @property
    def scale(self) -> float:
        """Factor of the product B·A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


class PeftFolder:
    """An adapter folder for the model of ``plan``.

    The constructor raises :class:`BridgeError` for missing or damaged files, unsupported options, or an adapter of
    another model.
    """

    def __init__(self, path: str | Path, plan: Plan) -> None:
        self.path = Path(path).expanduser()
        check_folder(self.path)
        if not (self.path / CONFIG).is_file():
            raise BridgeError(f"{self.path} has no {CONFIG}: use an adapter folder of PEFT or of a LoRA run")
        self.config = _read_config(self.path / CONFIG)
        self._infos: dict[str, TensorInfo] = read_header(self.path, WEIGHTS)
        self._map = map_file(self.path / WEIGHTS)
        self._plan = plan
        self._factors: dict[str, Callable[[], Tensor]] = {}
        for name in self._infos:
            self._add(name)
        self._check()

    @property
    def modules(self) -> frozenset[str]:
        """The adapted projections, by their HF names in the base model."""
        return frozenset(name[:-2] for name in self._factors)

    def factor(self, module: str, letter: str) -> Tensor:
        """Return ``A`` [rank, in] or ``B`` [out, rank] of a projection. Raises KeyError if it has none."""
        return self._factors[f"{module}.{letter}"]()

    def _add(self, name: str) -> None:
        if name.endswith(_BASE_WEIGHT) and name.startswith(PREFIX) and ".lora_" not in name:
            return
        if name.startswith(PREFIX) and name.endswith((".lora_embedding_A", ".lora_embedding_B")):
            module, letter = name[len(PREFIX) : -17], "BA"["AB".index(name[-1])]
            self._factors[f"{module}.{letter}"] = lambda: self._read(name).t()
            return
        module, _, rest = name.removeprefix(PREFIX).rpartition(".lora_")
        letter = rest.removesuffix(".weight")
        if letter not in ("A", "B") or not name.startswith(PREFIX):
            raise BridgeError(f"{self.path / WEIGHTS}: {name} is not a factor of a linear layer (….lora_A.weight)")
        stacked = _STACKED.match(module)
        if stacked is None or f"{module}.weight" in self._plan.hf:
            self._factors[f"{module}.{letter}"] = lambda: self._read(name)
        else:
            self._unstack(name, module, letter, int(stacked["layer"]))

    def _unstack(self, name: str, module: str, letter: str, layer: int) -> None:
        """Register the factors of single experts in a stacked tensor; the shapes of A and B give the projection."""
        rank = self.config.rank
        entries = [e for e in self._plan.entries if e.layer == layer and e.expert is not None and len(e.shape) == 2]
        count = len({entry.expert for entry in entries})
        a, b = (self._infos.get(f"{PREFIX}{module}.lora_{each}.weight") for each in "AB")
        sizes = a and b and (*a.shape, *b.shape)
        fitting = [
            (e, width)
            for e in entries
            for width in {rank, rank * len(e.hf)}
            if sizes == (count * width, e.shape[1], e.shape[0], count * width)
        ]
        if not fitting:
            shapes = " and ".join(str(list(info.shape)) for info in (a, b) if info)
            raise BridgeError(f"{self.path / WEIGHTS}: factors of {module} are {shapes}, which match no experts")
        for entry, width in fitting:
            for part in range(len(entry.hf)):
                self._factors[f"{entry.hf[part].name.removesuffix('.weight')}.{letter}"] = self._slice(
                    name, letter, entry, part, count, width
                )

    def _slice(self, name: str, letter: str, entry: Entry, part: int, count: int, width: int) -> Callable[[], Tensor]:
        """Return a function that reads one projection's factor of one expert.

        ``width``: rank of the stacked factor. It is a multiple of the adapter's rank if each projection has a separate
        ``A`` (:func:`stack_experts`).
        """
        rank = self.config.rank
        own = slice(None) if width == rank else slice(part * rank, (part + 1) * rank)

        def read() -> Tensor:
            whole = self._read(name)
            if letter == "A":
                return whole.view(count, width, -1)[entry.expert][own]
            matrix = whole.view(-1, width, count)[..., entry.expert].chunk(len(entry.hf))[part]
            if matrix.count_nonzero() != matrix[:, own].count_nonzero():
                module = entry.hf[part].name.removesuffix(".weight")
                raise BridgeError(
                    f"{self.path / WEIGHTS}: {module} has rank {width}, the adapter has rank {rank}: such experts are "
                    "not supported"
                )
            return matrix[:, own]

        return read

    def _read(self, name: str) -> Tensor:
        info = self._infos[name]
        return view_of(self._map, info.start, info.dtype, info.shape)

    def _check(self) -> None:
        for module in sorted(self.modules):
            base = self._plan.hf.get(f"{module}.weight")
            if base is None and f"{module}.weight" in self._plan.copies:
                raise BridgeError(
                    f"{self.path}: {module} shares its weight with the embedding (tie_word_embeddings in config.json),"
                    f" but the adapter changes only one of them: add {module}.weight to the model, a copy of "
                    f"{self._plan.copies[f'{module}.weight']}, and set tie_word_embeddings to false"
                )
            if base is None:
                raise BridgeError(f"{self.path}: {module} is not a layer of the model: the adapter is of another one")
            for letter, side in (("A", 1), ("B", 0)):
                if f"{module}.{letter}" not in self._factors:
                    raise BridgeError(f"{self.path / WEIGHTS}: {module} has no lora_{letter}")
                shape = self.factor(module, letter).shape
                if (shape[side], shape[1 - side]) != (base[side], self.config.rank):
                    raise BridgeError(
                        f"{self.path}: lora_{letter} of {module} is {list(shape)}, the model's layer is {list(base)} "
                        f"and the rank {self.config.rank}: it is an adapter of another model"
                    )


def tensor_on_disk(module: str, letter: str, factor: Tensor) -> tuple[str, Tensor]:
    """Return name and tensor in an adapter folder for a factor: ``A`` [rank, in] or ``B`` [out, rank]."""
    if module.endswith(f".{_EMBEDDING}"):
        return f"{PREFIX}{module}.lora_embedding_{'BA'['AB'.index(letter)]}", factor.t().contiguous()
    return f"{PREFIX}{module}.lora_{letter}.weight", factor


def _read_config(path: Path) -> AdapterConfig:
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise BridgeError(f"{path}: peft_type={values.get('peft_type')}; only LORA is supported")
    for key, off in _UNSUPPORTED.items():
        if key in values and values[key] not in off:
            raise BridgeError(f"{path}: {key}={values[key]} is not supported; only plain A and B factors are")
    check_adapter_fields(values, str(path))
    rank, alpha = values["r"], float(values["lora_alpha"])
    config = AdapterConfig(rank, alpha, bool(values.get("use_rslora")), values.get("base_model_name_or_path"))
    ranks, alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
    for key in {**ranks, **alphas}:
        own = AdapterConfig(ranks.get(key, rank), alphas.get(key, alpha), config.rank_stabilised, None)
        if not math.isclose(own.scale, config.scale, rel_tol=1e-6):
            raise BridgeError(
                f"{path}: rank_pattern and alpha_pattern give {key} the scale {own.scale:g}, all others have "
                f"{config.scale:g}; only one scale for all is supported"
            )
    return config


def check_adapter_fields(values: Mapping[str, Any], where: str) -> None:
    """Raise :class:`BridgeError` for a field of ``adapter_config.json`` of a wrong type: ``where``, key and value."""
    for key, fits, expected in (
        ("r", _is_rank, "a whole number of at least 1"),
        ("lora_alpha", _is_alpha, "a number"),
        ("rank_pattern", _patterns_of(_is_rank), "an object of whole numbers of at least 1"),
        ("alpha_pattern", _patterns_of(_is_alpha), "an object of numbers"),
        ("use_rslora", lambda value: value is None or isinstance(value, bool), "true or false"),
        ("base_model_name_or_path", lambda value: value is None or isinstance(value, str), "a name"),
    ):
        if not fits(values.get(key)):
            value = repr(values[key])[:80] if key in values else "nothing"
            raise BridgeError(f"{where}: {key}={value} must be {expected}; fetch the file again")


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**20


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**40  # False for NaN


def _patterns_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return what tells whether a value is absent or an object whose values fit."""
    return lambda value: value is None or (isinstance(value, Mapping) and all(map(fits, value.values())))


def adapter_config(
    *,
    rank: int,
    alpha: float,
    rank_stabilised: bool,
    dropout: float,
    modules: list[str],
    base: str | None,
    revision: str | None = None,
) -> bytes:
    """Return the content of ``adapter_config.json``.

    ``modules``: names, or suffixes of names, of the adapted projections. ``base``: the model's folder, or its name on
    the Hugging Face hub with its commit as ``revision``.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": rank_stabilised,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def dropped_by_peft(model_type: str, modules: Iterable[str]) -> list[str]:
    """Return the ``modules`` of an adapter that PEFT silently drops when it opens the folder.

    Numbers of layers and experts are replaced by ``*`` (``model.layers.*.mlp.gate_proj``).
    """
    if model_type not in TAKEN_FOR_EXPERTS | NOT_TAKEN_FOR_EXPERTS:
        return []
    dropped: dict[str, None] = {}
    for module in modules:
        is_mlp = module.endswith((".gate_proj", ".up_proj", ".down_proj"))
        if is_mlp and (".experts." in module) == (model_type in NOT_TAKEN_FOR_EXPERTS):
            dropped[re.sub(r"\.\d+(?=\.)", ".*", module)] = None
    return list(dropped)


def stack_experts(factors: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Convert factors named ``module.A`` and ``module.B`` to PEFT's tensors with stacked experts.

    If gate and up have separate ``A`` factors, they become one pair of twice the rank, with zeros in ``B``; the folder
    must then list them in ``rank_pattern``. Raises :class:`BridgeError` if only some experts of a layer are adapted.
    """
    left = dict(factors)
    stacked: dict[str, Tensor] = {}
    layers = sorted({e.layer for e in plan.entries if e.is_expert and e.layer is not None})
    for layer in layers:
        for kind, inner in (("linear_fc1", ".base_layer"), ("linear_fc2", "")):
            entries = [
                e for e in plan.entries if e.layer == layer and e.is_expert and e.name.endswith(f".{kind}.weight")
            ]
            names = [[piece.name.removesuffix(".weight") for piece in entry.hf] for entry in entries]
            present = [f"{name}.A" in left for modules in names for name in modules]
            if not any(present):
                continue
            if not all(present):
                raise BridgeError(f"layer {layer}: only some experts are adapted; write them one by one")
            pairs = [_join([(left.pop(f"{m}.A"), left.pop(f"{m}.B")) for m in modules]) for modules in names]
            prefix = names[0][0].partition(".experts.")[0] + ".experts" + inner
            stacked[f"{PREFIX}{prefix}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
            stacked[f"{PREFIX}{prefix}.lora_B.weight"] = torch.stack([b for _, b in pairs], dim=-1).flatten(1)
    plain = {f"{PREFIX}{name[:-2]}.lora_{name[-1]}.weight": tensor for name, tensor in left.items()}
    return plain | stacked


def _join(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the factors of several projections into one pair."""
    if all(torch.equal(a, pairs[0][0]) for a, _ in pairs[1:]):
        return pairs[0][0], torch.cat([b for _, b in pairs])
    return torch.cat([a for a, _ in pairs]), torch.block_diag(*[b for _, b in pairs])


EMBEDDING = "model.embed_tokens"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight + scale · B·A in fp32, rounded once to the weight's dtype."""
    return (weight.float() + (b.float() @ a.float()) * scale).to(weight.dtype)


def merge_adapter(
    hf: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    workers: int = 2,
    drop_mtp: bool = False,
    stream: TextIO | None = None,
) -> Report:
    """Merge the PEFT folder ``adapter`` into the HF folder ``hf`` and write the result to ``out``.

    Quantised folders are dequantised. Tensors without an adapter keep their bytes. An adapter of a tied embedding is
    added to the embedding only, which unties the output layer, with a warning. Raises :class:`BridgeError`; ``out``
    then does not exist.
    """
    source = open_hf(hf)
    plan = Plan.of(source.config)
    shapes = source.shapes()
    plan.check(shapes, str(hf))
    factors = PeftFolder(adapter, plan)
    left = set(factors.modules)
    config = output_config(source.config, dtype, drop_mtp)
    tensors: dict[str, tuple[Shape, torch.dtype]] = {
        name: (shape, source.dtype(name) if dtype is None or name not in plan.hf else dtype)
        for name, shape in shapes.items()
        if not (drop_mtp and plan.is_passthrough(name))
    }
    if untied := f"{EMBEDDING}.weight" in plan.copies.values() and EMBEDDING in left:
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"]
        config["tie_word_embeddings"] = False
        warnings.warn(
            f"{adapter} adapts {EMBEDDING}, which {hf} also uses as output layer. PEFT adds the adapter to the "
            "embedding only, so the merged model has a separate output layer (tie_word_embeddings: false, "
            "lm_head.weight)",
            stacklevel=2,
        )
    stacked = [name for name in plan.stacked if any(m.startswith(name.removesuffix(".weight")) for m in left)]
    if stacked:
        raise BridgeError(f"{hf}: {stacked[0]} holds all experts in one tensor; merging into it is not supported")
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    progress = Progress(total, "merge", stream)
    with staged(out, total) as folder:
        writer = HfWriter(folder, tensors, max_shard_size)

        def convert(worker: int, name: str) -> None:
            module = name.removesuffix(".weight")
            tensor = source.read(f"{EMBEDDING}.weight" if untied and module == "lm_head" else name)
            if module in left:
                a, b = (factors.factor(module, letter) for letter in "AB")
                tensor = merged(tensor, a, b, factors.config.scale)
            progress.add(writer.write(name, tensor))

        try:
            in_threads(shares(list(tensors), lambda name: math.prod(tensors[name][0]), max(1, workers)), convert)
            copy_assets(hf, folder, config)
            writer.finish()
        finally:
            writer.close()
    progress.finish()
    return Report(str(out), plan.family.model_type, len(tensors), progress.done, progress.seconds)
