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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from bridges.disk_form import TensorInfo, of_text_model
from bridges.errors import BridgeError
from bridges.files import check_folder, read_json, with_changes
from bridges.hf_io import HfWriter, map_file, read_header, view_of
from bridges.plan import Plan
from bridges.rows import InterleavedGateUp, Shape, Transposed
from bridges.rules import Entry
from bridges.source import copy_assets, open_hf, output_config
from bridges.staging import Progress, in_threads, shares, staged

if TYPE_CHECKING:
    from bridges.convert import Report

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_EMBEDDING = "embed_tokens"
_BASE_WEIGHT = ".base_layer.weight"
"""Suffix of frozen base weights of embedding and output layer, which PEFT saves with their adapters."""
_STACKED = re.compile(r"^(?P<experts>.*\.layers\.(?P<layer>\d+)\..*experts)(?P<inner>\.base_layer)?$")
_PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Megatron's map of an expert → transformers' parameter of all experts, by which patterns of ranks are matched."""
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
        self._settings: dict[str, AdapterConfig] = {}
        self._of_parameters: set[str] = set()
        self._patterns = _Patterns(self.path / CONFIG, self.config)
        self._names = _names_on_disk(plan)
        self.whole: dict[str, tuple[str, AdapterConfig]] = {}
        """Tensor of all experts in the base model → (module of the folder, its rank and alpha)."""
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

    def settings(self, module: str) -> AdapterConfig:
        """Return rank and alpha of a projection, which ``rank_pattern`` and ``alpha_pattern`` may change."""
        return self._settings.get(module, self.config)

    def added_to_layer(self, module: str, weight: Tensor) -> Tensor:
        """Return the weight of a projection with its adapter, as PEFT merges it."""
        a, b = (self.factor(module, letter) for letter in "AB")
        return merged(weight, a, b, self.settings(module).scale, of_parameter=module in self._of_parameters)

    @property
    def is_uniform(self) -> bool:
        """Whether all projections have the rank and the scale of the configuration."""
        same = (self.config.rank, self.config.scale)
        return all((each.rank, each.scale) == same for each in self._settings.values())

    def _add(self, name: str) -> None:
        if name.endswith(_BASE_WEIGHT) and name.startswith(PREFIX) and ".lora_" not in name:
            return
        if name.startswith(PREFIX) and name.endswith((".lora_embedding_A", ".lora_embedding_B")):
            module, letter = name[len(PREFIX) : -17], "BA"["AB".index(name[-1])]
            self._register(of_text_model(module), letter, lambda: self._read(name).t(), self._patterns.of(module))
            return
        module, _, rest = name.removeprefix(PREFIX).rpartition(".lora_")
        letter = rest.removesuffix(".weight")
        if letter not in ("A", "B") or not name.startswith(PREFIX):
            raise BridgeError(
                f"{self.path / WEIGHTS}: {name} is not a factor of a linear layer (….lora_A.weight): merge this "
                "adapter with PEFT, and use the merged model"
            )
        settings, is_parameter = self._patterns.of(module), self._patterns.is_parameter(f"{module}.weight")
        on_disk, module = module, of_text_model(module)
        within = on_disk.removesuffix(module.removeprefix("model."))  # "model.", or longer in text and images
        module = self._names.get(module, module)
        if is_parameter:
            self._of_parameters.add(module)
        stacked = _STACKED.match(module)
        if stacked is None or f"{module}.weight" in self._plan.hf:
            self._register(module, letter, lambda: self._read(name), settings)
        else:
            container = within + stacked["experts"].removeprefix("model.")
            self._unstack(name, module, letter, container, int(stacked["layer"]))

    def _register(self, module: str, letter: str, read: Callable[[], Tensor], settings: AdapterConfig) -> None:
        self._factors[f"{module}.{letter}"], self._settings[module] = read, settings

    def _unstack(self, name: str, module: str, letter: str, container: str, layer: int) -> None:
        """Register the factors of single experts in a stacked tensor; the shapes of A and B give the projection.
        ``container``: by its name in the folder, which patterns match."""
        entries = [e for e in self._plan.entries if e.layer == layer and e.expert is not None and len(e.shape) == 2]
        count = len({entry.expert for entry in entries}) or 1
        a, b = (self._infos.get(f"{PREFIX}{module}.lora_{name_end}.weight") for name_end in "AB")
        shapes = " and ".join(str(list(info.shape)) for info in (a, b) if info)
        fitting = [e for e in entries if a and b and (*a.shape[1:], *b.shape) == (e.shape[1], e.shape[0], a.shape[0])]
        kinds = {entry.name.rsplit(".", 2)[1] for entry in fitting}
        if not fitting or a is None or a.shape[0] % count:
            raise BridgeError(
                f"{self.path / WEIGHTS}: factors of {module} are {shapes}, which match no experts: use the base model "
                "that the adapter was trained on"
            )
        if len(kinds) > 1:  # PEFT wraps the parameter named first, gate and up, in the other
            kinds = {"linear_fc1" if module.endswith(".base_layer") else "linear_fc2"}
        width, (kind,) = a.shape[0] // count, kinds
        settings = self._patterns.of(f"{container}.{_PARAMETERS[kind]}")
        if settings.rank != width:
            raise BridgeError(
                f"{self.path}: factors of {module} are {shapes}, of rank {width} for {count} experts, but {CONFIG} "
                f"gives {_PARAMETERS[kind]} the rank {settings.rank} (r, rank_pattern): fetch both files again"
            )
        for entry in fitting:
            if entry.name.rsplit(".", 2)[1] == kind and entry.hf[0].index is not None:
                self.whole.setdefault(entry.hf[0].name, (module, settings))
            elif entry.name.rsplit(".", 2)[1] == kind:
                for part in range(len(entry.hf)):
                    self._register_part(name, letter, entry, part, count, settings)

    def _register_part(
        self, name: str, letter: str, entry: Entry, part: int, count: int, settings: AdapterConfig
    ) -> None:
        """Register one projection's factor of one expert.

        If each projection has a separate ``A`` (stacked experts), it is the part of these ranks alone.
        """
        parts, rank = len(entry.hf), self.config.rank
        module = entry.hf[part].name.removesuffix(".weight")
        apart = settings.rank == rank * parts and parts > 1 and self._is_apart(name, entry, count, rank)
        columns = slice(part * rank, (part + 1) * rank) if apart else slice(None)

        def read() -> Tensor:
            stacked = self._read(name)
            if letter == "A":
                return stacked.view(count, settings.rank, -1)[entry.expert][columns]
            return stacked.view(-1, settings.rank, count)[..., entry.expert].chunk(parts)[part][:, columns]

        part_settings = replace(settings, rank=rank, alpha=settings.scale * self._divisor(rank)) if apart else settings
        self._register(module, letter, read, part_settings)
        self._of_parameters.add(module)

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.config.rank_stabilised else rank

    def _is_apart(self, name: str, entry: Entry, count: int, rank: int) -> bool:
        """Return whether ``B`` of an expert is 0 outside of each projection's own ranks."""
        parts = len(entry.hf)
        matrix = self._read(name.replace(".lora_A.", ".lora_B.")).view(-1, rank * parts, count)[..., entry.expert]
        own = sum(
            int(rows[:, part * rank : (part + 1) * rank].count_nonzero())
            for part, rows in enumerate(matrix.chunk(parts))
        )
        return int(matrix.count_nonzero()) == own

    def added_to(self, name: str, weight: Tensor) -> Tensor:
        """Return the tensor ``name`` of all experts with their adapters, as PEFT merges it; :attr:`whole` has it."""
        module, settings = self.whole[name]
        a, b = (self._read(f"{PREFIX}{module}.lora_{letter}.weight") for letter in "AB")
        count, out = len(weight), torch.empty_like(weight)
        entry = next(e for e in self._plan.entries if e.hf[0].name == name)
        transposed = isinstance(entry.bound.row, InterleavedGateUp | Transposed)
        for expert in range(count):
            own_b, own_a = b.view(len(b), -1, count)[..., expert], a.view(count, -1, a.shape[1])[expert]
            if transposed:
                out[expert] = merged(weight[expert].t(), own_a, own_b, settings.scale, of_parameter=True).t()
            else:
                out[expert] = merged(weight[expert], own_a, own_b, settings.scale, of_parameter=True)
        return out

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
                raise BridgeError(
                    f"{self.path}: {module} is not a layer of the model: the adapter is of another one; use its base "
                    "model"
                )
            rank = self.settings(module).rank
            for letter, side in (("A", 1), ("B", 0)):
                if f"{module}.{letter}" not in self._factors:
                    raise BridgeError(f"{self.path / WEIGHTS}: {module} has no lora_{letter}; fetch the file again")
                shape = self.factor(module, letter).shape
                if shape[side] != base[side]:
                    raise BridgeError(
                        f"{self.path}: lora_{letter} of {module} is {list(shape)}, the model's layer is "
                        f"{list(base)}: it is an adapter of another model; use its base model"
                    )
                if shape[1 - side] != rank:
                    raise BridgeError(
                        f"{self.path}: lora_{letter} of {module} is {list(shape)}, but {CONFIG} gives it the rank "
                        f"{rank} (r, rank_pattern): the files do not belong together; fetch both files of one adapter"
                    )


class _Patterns:
    """``rank_pattern`` and ``alpha_pattern`` of an adapter, matched as PEFT does (``get_pattern_key`` of
    peft/utils/other.py)."""

    def __init__(self, path: Path, config: AdapterConfig) -> None:
        self.path, self.config, values = path, config, read_json(path)
        self.ranks, self.alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
        self.parameters = [str(each) for each in values.get("target_parameters") or ()]

    def of(self, module: str) -> AdapterConfig:
        """Return rank and alpha of a module, by transformers' name."""
        rank, alpha = self._found(self.ranks, module), self._found(self.alphas, module)
        return replace(
            self.config,
            rank=self.config.rank if rank is None else int(rank),
            alpha=self.config.alpha if alpha is None else float(alpha),
        )

    def is_parameter(self, name: str) -> bool:
        """Return whether the adapter is of a parameter (``target_parameters``), not of a module."""
        return any(name == each or name.endswith(f".{each}") for each in self.parameters)

    def _found(self, patterns: Mapping[str, Any], module: str) -> Any:
        try:
            return next((each for key, each in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
        except re.error as error:
            raise BridgeError(
                f"{self.path}: rank_pattern or alpha_pattern has no regular expression: {error}; fetch {CONFIG} again"
            ) from error


def _names_on_disk(plan: Plan) -> dict[str, str]:
    """Return module in transformers' model → module on disk, where the two differ."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # loads much, for adapters alone
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        renaming
        for renaming in get_checkpoint_conversion_mapping(plan.family.model_type) or ()
        if isinstance(renaming, WeightRenaming)
    ]
    names = {name: rename_source_key(name, renamings, [])[0] for name in plan.hf} if renamings else {}
    return {
        memory.removesuffix(".weight"): disk.removesuffix(".weight")
        for disk, memory in names.items()
        if memory != disk
    }


def tensor_on_disk(module: str, letter: str, factor: Tensor) -> tuple[str, Tensor]:
    """Return name and tensor in an adapter folder for a factor: ``A`` [rank, in] or ``B`` [out, rank]."""
    if module.endswith(f".{_EMBEDDING}"):
        return f"{PREFIX}{module}.lora_embedding_{'BA'['AB'.index(letter)]}", factor.t().contiguous()
    return f"{PREFIX}{module}.lora_{letter}.weight", factor


def _read_config(path: Path) -> AdapterConfig:
    values = read_json(path)
    if values.get("peft_type") != "LORA":
        raise BridgeError(
            f"{path}: peft_type={values.get('peft_type')}; only LORA is supported: merge the adapter with PEFT first"
        )
    for key, off in _UNSUPPORTED.items():
        if key in values and values[key] not in off:
            raise BridgeError(
                f"{path}: {key}={values[key]} is not supported; only plain A and B factors are: merge the adapter "
                "with PEFT first"
            )
    check_adapter_fields(values, str(path))
    rank, alpha = values["r"], float(values["lora_alpha"])
    return AdapterConfig(rank, alpha, bool(values.get("use_rslora")), values.get("base_model_name_or_path"))


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
    scale: float,
    modules: list[str],
    base: str | None,
    revision: str | None = None,
) -> bytes:
    """Return the content of ``adapter_config.json``.

    ``scale``: the factor of B·A. It is written as a plain ``lora_alpha`` of scale · rank: with ``use_rslora`` PEFT
    would scale gate and up of experts by √2 more, because it joins their factors into one pair of twice the rank. The
    dropout is 0, because PEFT opens no adapter of experts with another. ``modules``: names, or suffixes of names, of
    the adapted projections. ``base``: the model's folder, or its name on the Hugging Face hub with its commit as
    ``revision``.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": round(scale * rank) if math.isclose(scale * rank, round(scale * rank)) else scale * rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
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


EMBEDDING = "model.embed_tokens"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, of_parameter: bool = False) -> Tensor:
    """Return weight + scale · B·A in fp32, rounded to the weight's dtype.

    ``of_parameter``: round B·A to that dtype before, as PEFT does for experts (``ParamWrapper``).
    """
    delta = (b.float() @ a.float()) * scale
    if of_parameter:
        delta = delta.to(weight.dtype)
    return (weight.float() + delta.float()).to(weight.dtype)


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
        if not (drop_mtp and plan.is_prediction(name))
    }
    if untied := f"{EMBEDDING}.weight" in plan.copies.values() and EMBEDDING in left:
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"]
        config = with_changes(config, {"tie_word_embeddings": False})
        warnings.warn(
            f"{adapter} adapts {EMBEDDING}, which {hf} also uses as output layer. PEFT adds the adapter to the "
            "embedding only, so the merged model has a separate output layer (tie_word_embeddings: false, "
            "lm_head.weight)",
            stacklevel=2,
        )
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    progress = Progress(total, "merge", stream)
    with staged(out, total) as folder:
        writer = HfWriter(folder, tensors, max_shard_size, form=source.form)

        def convert(worker: int, name: str) -> None:
            module = name.removesuffix(".weight")
            tensor = source.read(f"{EMBEDDING}.weight" if untied and module == "lm_head" else name)
            if name in factors.whole:
                tensor = factors.added_to(name, tensor)
            elif module in left:
                tensor = factors.added_to_layer(module, tensor)
            progress.add(writer.write(name, tensor))

        try:
            in_threads(shares(list(tensors), lambda name: math.prod(tensors[name][0]), max(1, workers)), convert)
            copy_assets(hf, folder, config)
            writer.finish()
        finally:
            writer.close()
    progress.finish()
    from bridges.convert import Report

    return Report(str(out), plan.family.model_type, len(tensors), progress.done, progress.seconds)
