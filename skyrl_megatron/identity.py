"""What a result was computed from: models, tokenizer, chat template, data, verb, environment, settings.

Checkpoints, recorded rollouts and calls, exports, evaluated rows and the log-probs of a reference carry the identity
of the run that wrote them. A run does not continue from, or write over, what has another identity:
:func:`refuse_other` names both sides, and ``trainer.resume_other`` allows the parts that may differ.

A part is compared by its content. A copy of a model in another folder, or of a data file with another name, is the
same. A part that one side does not have, or that cannot be read on this host, is not compared.

Settings belong to an identity by default, also those that a later version adds: :data:`NO_NUMBERS`,
:data:`ONLY_ROUNDING`, :data:`NOT_REFERENCE` and :data:`NOT_SAMPLED` list those that do not, each with the reason.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.files import read_json, weights_fingerprint
from bridges.source import ASSETS
from bridges.staging import write_file
from skyrl_megatron.config.derive import is_data_file, preferences, reward_model, supervised
from skyrl_megatron.config.fields import Section, field_types, get_path, members_of, sections_of
from skyrl_megatron.config.hf_model import ADAPTER, cached_folder, model_folder, model_repo
from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.config.roles import active_roles, policy_is_reference, teacher_addresses
from skyrl_megatron.config.schema.run import get_config_as_dict
from skyrl_megatron.config.table import ROLES
from skyrl_megatron.data.row_files import file_fingerprint
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.rollout.templates import load_template
from skyrl_megatron.runtime.checkpoint.manifest import versions

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


FILE = "identity.json"
"""File with the identity, in folders that have no other place for it."""
RESUME_OTHER = "trainer.resume_other"

NO_NUMBERS = {
    **dict.fromkeys(
        ("trainer.ckpt_path", "trainer.export_path", "trainer.log_path", "trainer.project_name", "trainer.run_name"),
        "says where results are, not what they are",
    ),
    **dict.fromkeys(
        ("trainer.logger", "trainer.prometheus_port", "trainer.opentelemetry_endpoint", "trainer.peak_flops_per_rank"),
        "says where metrics are sent",
    ),
    **dict.fromkeys(
        ("trainer.ckpt_interval", "trainer.hf_save_interval", "trainer.max_ckpts_to_keep", "trainer.dump_data_batch",
         "trainer.dump_eval_results", "trainer.samples_per_step", "trainer.samples_per_run"),
        "says what is kept",
    ),
    **dict.fromkeys(
        ("trainer.eval_batch_size", "trainer.eval_before_train", "trainer.eval_interval", "trainer.best_metric",
         "generator.eval_sampling_params.", "generator.eval_n_samples_per_prompt", "data.val_data", "data.eval_sets"),
        "held-out rows train nothing",
    ),
    **dict.fromkeys(("trainer.resume_mode", "trainer.resume_path", RESUME_OTHER), "says what a run starts from"),
    **dict.fromkeys(("trainer.epochs", "trainer.max_training_steps", "trainer.stop_when"), "says when a run ends"),
    "trainer.phase_timeout_s": "a deadline",
    "trainer.healing.": "a repeated step computes the same",
    "trainer.plugins": "what a plugin registers is named by other settings",
    "trainer.hub_commits": "the files of the commit are compared",
    **{
        f"trainer.{role}.{name}": why
        for role in ROLES
        for name, why in {
            "model.path": "the content of the folder is compared",
            "model.revision": "the content of the folder is compared",
            "megatron_config.torch_profiler_config.": "only observes",
        }.items()
    },
    "trainer.teacher.models": "the content of the folders is compared",
    "trainer.policy.model.lora.adapter_path": "the content of the folder is compared",
    "trainer.policy.record_memory": "only observes",
    "data.train_data": "the content of the files is compared",
    "data.row_cache_gb": "the tokens are the same",
}  # fmt: skip
"""Setting, or section that ends with a dot, that changes no number that a step computes → why."""
_LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage ddp_config. empty_cuda_cache dist_ckpt_optim_fully_reshardable "
    "transformer_config_kwargs.recompute_granularity transformer_config_kwargs.recompute_modules "
    "transformer_config_kwargs.recompute_method transformer_config_kwargs.recompute_num_layers "
    "moe_token_dispatcher_type moe_balance_experts moe_expert_moves async_dist_ckpt_save"
)
_ENGINES = (
    "num_engines tensor_parallel_size pipeline_parallel_size expert_parallel_size data_parallel_size max_num_seqs "
    "max_num_batched_tokens gpu_memory_utilization weight_sync_backend"
)
_ELSEWHERE = "remote_urls external_proxy_url external_server_urls run_engines_locally"
"""Settings of engines that the run does not start. It sends them its weights; an evaluation does not."""
ONLY_ROUNDING = {
    "trainer.placement.": "loss and gradient do not depend on the number of ranks",
    "trainer.micro_train_batch_size_per_gpu": "they do not depend on how a batch is cut",
    "trainer.micro_forward_batch_size_per_gpu": "they do not depend on how a batch is cut",
    "trainer.max_tokens_per_microbatch": "they do not depend on how a batch is cut",
    "trainer.logprobs_chunk_size": "a limit of memory",
    **{
        f"generator.inference_engine.{name}": "says where tokens are sampled"
        for name in f"{_ENGINES} {_ELSEWHERE}".split()
    },
    "trainer.gradient_checkpointing": "a recomputed activation is the same",
    **{
        f"trainer.{role}.megatron_config.{name}": "they do not depend on the layout"
        for role in ROLES
        for name in _LAYOUT.split()
    },
}
"""Setting or section that changes a step by rounding only → why."""
NOT_REFERENCE = {
    "trainer.critic.": "another model",
    "trainer.teacher.": "another model",
    "trainer.fully_async.": "nothing is sampled",
    "trainer.oversampling.": "nothing is sampled",
    "generator.": "nothing is sampled; what the template makes of the rows is compared as tokens",
    "environment.": "nothing is sampled",
    "data.": "the tokens of the rows are compared",
    "sft.": "the tokens of the rows are compared",
    **{
        f"dpo.{name}": "the tokens of the rows are compared"
        for name in ("max_length", "long_rows", "turns", "invalid_rows")
    },
    **{
        f"dpo.{name}": "the loss comes after the log-probs"
        for name in ("loss", "beta", "desirable_weight", "undesirable_weight")
    },
    "dpo.reference_cache": "says where the log-probs are",
    "trainer.seed": "only says the order of the rows",
    "trainer.train_batch_size": "each row has its own log-probs",
    "trainer.policy_mini_batch_size": "each row has its own log-probs",
    "trainer.critic_mini_batch_size": "another model",
    "trainer.critic_warmup_steps": "another model",
    "trainer.update_epochs_per_batch": "a reference is not trained",
    "trainer.policy.optimizer_config.": "a reference is not trained",
    **{
        f"trainer.{role}.{name}": why
        for role in ("policy", "ref")
        for name, why in {
            "megatron_config.optimizer_config_kwargs.": "a reference is not trained",
            "megatron_config.lora_config.": "adapters are disabled",
            "model.lora.": "adapters are disabled",
        }.items()
    },
}
"""Setting or section that does not change the log-probs of a frozen reference → why."""
NOT_SAMPLED = {
    f"generator.inference_engine.{name}": why
    for names, why in (
        (_ENGINES, "says where tokens are sampled"),
        ("http_endpoint_host http_endpoint_port http_token_path registry_host registry_port registry_token_path",
         "an address of this host, or a file with a token"),
        ("enable_registry registry_min_engines registry_silence_s registry_drain_s restarts_per_hour",
         "says which engines there are; a request of a lost one starts again"),
        ("weight_sync_routes weight_sync_probe_interval weight_sync_probe_limit", "weights are loaded, not sent"),
        ("distributed_executor_backend fully_sharded_loras", "says which process of an engine computes what"),
        ("enable_ray_prometheus_stats", "only observes"),
        ("async_engine override_existing_update_group vllm_v1_disable_multiproc weight_transfer_threshold_cuda_ipc_GB",
         "has no effect"),
    )
    for name in names.split()
}  # fmt: skip
"""Setting of an engine that does not change, except by rounding, what an evaluation without training samples → why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a result depends on."""

    shown: str
    """How a message names it."""
    digest: str
    """Hash of its content, hexadecimal; "" if it cannot be read on this host."""


type Identity = dict[str, Part]
"""Name (``model``, ``data``, …) → part."""
NOT_ADAPTERS = {
    "adapter_path": "the content of the folder is compared with the model",
    "dropout": "a setting of training",
    "init_method": "says how factors begin",
    "lora_sync_path": "has no effect",
    "merge_lora": "says how adapters are sent",
    "sync_mode": "says how adapters are sent",
}
"""Setting of adapters that does not change what loaded factors compute → why."""


# ---------------------------------------------------------------------------------------------- of a run
def run_identity(cfg: SkyRLTrainConfig, data: Sequence[Mapping[str, Any]] | None = None) -> Identity:
    """Return what the weights of a run depend on besides its settings.

    ``data``: ``fingerprint`` of the training data; None: that of the files in the configuration; (): not compared.
    """
    parts = {"verb": Part(verb(cfg), verb(cfg))}
    for role in active_roles(cfg):
        name = {"ref": "reference", "policy": "model"}.get(role, role)
        parts[name] = _models(cfg, role)
    parts |= {"tokenizer": tokenizer_part(cfg), "template": template_part(cfg)}
    parts["data"] = _data(cfg.data.train_data, data)
    if supervised(cfg) is None:
        parts["environment"] = Part(str(cfg.environment.env_class), str(cfg.environment.env_class))
    parts |= {"adapters": _adapters(cfg), "optimizer": _optimizer(cfg, "policy")}
    parts["critic_optimizer"] = _optimizer(cfg, "critic")
    return {name: part for name, part in parts.items() if part.digest}


def sampled_identity(cfg: SkyRLTrainConfig) -> Identity:
    """Return what the tokens and log-probs of recorded samples belong to: model, tokenizer and template."""
    parts = {"model": _models(cfg, "policy"), "tokenizer": tokenizer_part(cfg), "template": template_part(cfg)}
    return {name: part for name, part in parts.items() if part.digest}


def sampled_part(identity: Identity) -> Identity:
    """Return :func:`sampled_identity` of a run with this identity."""
    return {name: identity[name] for name in ("model", "tokenizer", "template") if name in identity}


def _adapters(cfg: SkyRLTrainConfig) -> Part:
    """Return the part of the adapters: the settings that say which factors there are, and their scale."""
    policy = cfg.trainer.policy
    if not policy.model.lora.rank:
        return Part("none", "none")
    every = {**_plain_fields(policy.model.lora), **_plain_fields(policy.megatron_config.lora_config)}
    shared = _factors(every)
    named_adapters = {
        adapter: _factors({**every, **(changes or {})}) for adapter, changes in policy.model.lora.adapters.items()
    }
    shared["adapters"] = {
        adapter: {name: value for name, value in factors.items() if value != shared.get(name, value)}
        for adapter, factors in sorted(named_adapters.items())
    }
    sections = (policy.model.lora, policy.megatron_config.lora_config)
    usual = _factors({name: value for section in sections for name, value in _plain_fields(type(section)()).items()})
    named = [name for name in shared if name in ("rank", "alpha") or shared[name] != usual.get(name, {})]
    shown = "of " + ", ".join(f"{name} {_shown(shared[name])}" for name in named)
    return Part(shown, _hash(json.dumps(shared, sort_keys=True)))


def _factors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter that say which factors there are, with lists of modules in one order."""
    return {
        name: sorted(value.split(",")) if name.endswith("modules") and isinstance(value, str) else value
        for name, value in settings.items()
        if name not in NOT_ADAPTERS and name != "adapters"
    }


def _plain_fields(section: Section) -> dict[str, Any]:
    return {name: getattr(section, name) for name in field_types(type(section))}


def _optimizer(cfg: SkyRLTrainConfig, role: str) -> Part:
    """Return the part of a role's optimizer: another one has other moments."""
    name = getattr(cfg.trainer, role).optimizer_config.optimizer if role in active_roles(cfg) else ""
    return Part(name, name)


def verb(cfg: SkyRLTrainConfig) -> str:
    """Return the command that trains with a configuration: ``train``, ``sft``, ``dpo`` or ``reward``."""
    if supervised(cfg) is None:
        return "train"
    return "dpo" if preferences(cfg) is not None else "reward" if reward_model(cfg) is not None else "sft"


def _models(cfg: SkyRLTrainConfig, role: str) -> Part:
    """Return the part of a role's model, with its initial adapter, or of all teachers on ranks."""
    if role == "teacher" and cfg.trainer.teacher.models:
        elsewhere = teacher_addresses(cfg)  # not compared: each job has other addresses
        roles = [f"teacher/{name}" for name in cfg.trainer.teacher.models if name not in elsewhere]
    else:
        roles = [role, *([ADAPTER] if role == "policy" and cfg.trainer.policy.model.lora.adapter_path else [])]
    parts = [model_part(cfg, one) for one in roles]
    digest = _hash(*(part.digest for part in parts)) if all(part.digest for part in parts) else ""
    return parts[0] if len(parts) == 1 else Part(" and ".join(part.shown for part in parts), digest)


def model_part(cfg: SkyRLTrainConfig, role: str = "policy") -> Part:
    """Return the part of one model: its weights and its configuration."""
    repo = model_repo(cfg, role)
    folder = cached_folder(cfg, role)
    named = str(folder) if repo is None else f"{repo.name} of the hub"
    digest = "" if folder is None else model_digest(folder)
    if digest and (changes := _model_changes(cfg, role)):
        digest = _hash(digest, json.dumps(changes, sort_keys=True, default=str))
    return Part(f"{named} ({digest[:8]})", digest)


def _model_changes(cfg: SkyRLTrainConfig, role: str) -> dict[str, Any]:
    """Return what the configuration changes of a model's ``config.json``."""
    section = getattr(cfg.trainer, role, None)
    if section is None:
        return {}
    changes = {
        "model_config_kwargs": {**section.model_config_kwargs, **section.megatron_config.model_config_kwargs},
        "rope_scaling": cfg.trainer.rope_scaling,
        "rope_theta": cfg.trainer.rope_theta,
    }
    return {name: value for name, value in changes.items() if value}


def model_digest(folder: Path) -> str:
    """Return a hash of the weights (:func:`~bridges.files.weights_fingerprint`) and the configuration of
    a folder; "" if it has no weights."""
    paths = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*config.json"))]
    if not any(path.suffix == ".safetensors" for path in paths):
        return ""
    states = [path.stat() for path in paths]
    return _model_digest(folder, tuple((state.st_size, state.st_mtime_ns) for state in states))


@functools.lru_cache(maxsize=16)
def _model_digest(folder: Path, states: tuple[tuple[int, int], ...]) -> str:
    """``states``: size and time of each file, so that a changed folder is read again."""
    configs = [(folder / name) for name in ("config.json", "adapter_config.json")]
    return _hash(weights_fingerprint(folder), *(path.read_bytes() for path in configs if path.is_file()))


def tokenizer_part(cfg: SkyRLTrainConfig) -> Part:
    """Return the part of the policy's tokenizer, without its chat template."""
    folder = cached_folder(cfg, weights=False)
    if folder is None:
        return Part("", "")
    patterns = [name for name in ASSETS if not name.startswith(("generation_", "chat_template", "*processor_"))]
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.suffix not in _TEXTS})
    hashed: list[str | bytes] = []
    for path in (path for path in paths if path.is_file() and path.suffix != ".safetensors"):
        content = path.read_bytes()
        if path.name == _CONFIG and isinstance(described := _json(path), dict):
            described.pop("chat_template", None)
            content = json.dumps(described, sort_keys=True).encode()
        hashed += [path.name, content]
    digest = _hash(*hashed) if hashed else ""
    return Part(f"that of {folder} ({digest[:8]})", digest)


_CONFIG = "tokenizer_config.json"
_TEXTS = {".md", ""}
"""Suffixes of the licence and of the model card, which are copied with a tokenizer."""


def template_part(cfg: SkyRLTrainConfig) -> Part:
    """Return the part of the chat template, with its arguments."""
    wanted, folder = cfg.generator.chat_template, cached_folder(cfg, weights=False)
    text = load_template(wanted)
    shown = str(wanted.name_or_path)
    if text is None:
        if folder is None:
            return Part("", "")
        files = [path for path in sorted(folder.glob("chat_template*")) if path.is_file()]
        described = _json(folder / _CONFIG)
        in_config = described.get("chat_template") if isinstance(described, dict) else None
        text = "\n".join([*(path.read_text(errors="replace") for path in files), json.dumps(in_config)])
        shown = f"that of {folder}"
    digest = _hash(text, json.dumps(cfg.generator.chat_template_kwargs, sort_keys=True, default=str))
    return Part(f"{shown} ({digest[:8]})", digest)


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (BridgeError, ValueError):  # reported where the tokenizer is loaded
        return None


def _data(sources: Sequence[str], files: Sequence[Mapping[str, Any]] | None) -> Part:
    """Return the part of data files: their contents, in their order. Without ``files``, only local files are read."""
    if files is None:
        paths = [Path(source).expanduser() for source in sources]
        if not all(is_data_file(source) and path.is_file() for source, path in zip(sources, paths, strict=True)):
            return Part("", "")
        files = [file_fingerprint(path) for path in paths]
    digest = _hash(*(str(file["sha256"]) for file in files)) if files else ""
    return Part(f"{', '.join(str(file['name']) for file in files)} ({digest[:8]})", digest)


def evaluation_identity(cfg: SkyRLTrainConfig) -> Identity:
    """Return what the rows of an evaluation without training depend on. Of the hub, names and commits are compared:
    before the evaluation, weights and data need not be in the cache."""
    commits = json.dumps(dict(cfg.trainer.hub_commits), sort_keys=True)
    identity = {"verb": Part("evaluate", "evaluate"), "model": model_part(cfg)}
    if (repo := model_repo(cfg, "policy")) is not None:
        commit = cfg.trainer.hub_commits.get(repo.key, "")
        identity["model"] = Part(f"{repo.name} of the hub", _hash(repo.key, commit))
    identity |= {"tokenizer": tokenizer_part(cfg), "template": template_part(cfg)}
    settings = _without(get_config_as_dict(cfg), NOT_SAMPLED)
    kept = {key: value for key, value in settings if key.startswith(("generator.", "environment."))}
    sets = [cfg.data.val_data, *(one.get("data", ()) for one in cfg.data.eval_sets.values() if isinstance(one, dict))]
    sources = [source for part in sets for source in part]
    identity["data"] = _data(sources, None)
    if sources and not identity["data"].digest:
        identity["data"] = Part(", ".join(sources), _hash(*sources, commits))
    identity["settings"] = Part("", _hash(json.dumps(kept, sort_keys=True, default=str)))
    return {name: part for name, part in identity.items() if part.digest}


# ---------------------------------------------------------------------------------------------- of settings
def settings_of(cfg: SkyRLTrainConfig) -> dict[str, Any]:
    """Return key → value of the settings that change the numbers of a step by more than rounding."""
    roles = active_roles(cfg)
    others = tuple(f"trainer.{role}." for role in ROLES if role not in roles)
    values, unwanted = get_config_as_dict(cfg), {*NO_NUMBERS, *ONLY_ROUNDING, *others}
    # An option that is a dictionary is one setting: two runs need not have the same entries of it.
    options = list(_dict_options(cfg))
    kept = dict(_without(values, {*unwanted, *options}))
    excluded = tuple(f"{name.removesuffix('.')}." for name in unwanted)
    return kept | {key: get_path(cfg, key) for key in options if not f"{key}.".startswith(excluded)}


def changes_numbers(key: str) -> bool:
    """Return whether a setting changes the numbers of a step by more than rounding."""
    return any(_without({key: None}, {*NO_NUMBERS, *ONLY_ROUNDING}))


def _dict_options(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the keys of options that are dictionaries."""
    for name in sections_of(type(section)):
        if isinstance(inner := getattr(section, name), Section):
            yield from _dict_options(inner, f"{prefix}{name}.")
    for name in field_types(type(section)):
        if isinstance(getattr(section, name), Mapping | None) and name not in sections_of(type(section)):
            kinds = members_of(field_types(type(section))[name])
            if any(kind is dict or typing.get_origin(kind) is dict for kind in kinds):
                yield f"{prefix}{name}"


def changed_settings(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return ``key=value (was value)`` of the settings that differ. A role whose setting follows the policy's is not
    repeated, and a setting that one side does not have is not compared."""
    changed = {
        key: f"{_shown(here[key])} (was {_shown(saved[key])})"
        for key in here
        if key in saved and _plain(saved[key]) != _plain(here[key])
    }
    roles = ("trainer.ref.", "trainer.critic.", "trainer.teacher.")
    return [
        f"{key}={text}"
        for key, text in changed.items()
        if not key.startswith(roles) or changed.get(f"trainer.policy.{key.split('.', 2)[2]}") != text
    ]


def reference_identity(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return what log-probs of the reference depend on, by name: its weights and ``config.json``, the settings that
    its ranks read, and the versions of the packages that compute them."""
    role = "policy" if policy_is_reference(cfg) else "ref"
    other = "trainer.ref." if role == "policy" else "trainer.policy."
    kept = dict(_without(get_config_as_dict(cfg), {*NO_NUMBERS, *ONLY_ROUNDING, *NOT_REFERENCE, other}))
    kept = {key.replace(f"trainer.{role}.", "model.", 1): value for key, value in kept.items()}
    return {
        "model": model_digest(model_folder(cfg, role)),
        "configuration": json.dumps(kept, sort_keys=True, default=str),
        "packages": json.dumps({name: value for name, value in versions().items() if name != "python"}),
    }


def _without(values: Mapping[str, Any], entries: Collection[str]) -> Iterator[tuple[str, Any]]:
    unwanted = tuple(f"{name.removesuffix('.')}." for name in entries)
    return ((key, value) for key, value in _flat(values) if not f"{key}.".startswith(unwanted))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, bool | list | dict) or value is None else str(value)


# ---------------------------------------------------------------------------------------------- comparison
def other_parts(saved: Identity, here: Identity, allowed: Collection[str] = ()) -> list[str]:
    """Return the names of the parts that both sides have and that differ, without ``allowed``."""
    names = [name for name in here if name in saved and saved[name].digest != here[name].digest]
    return [name for name in names if name not in allowed]


def refuse_other(
    key: str,
    where: str,
    saved: Identity,
    cfg: SkyRLTrainConfig,
    here: Identity,
    *,
    instead: str = "Set another folder or trainer.resume_mode=none to start a new run",
    to: str = "continue that one",
) -> None:
    """Raise ConfigError if ``where``, which ``key`` sets or is below the folder that it sets, is of another run than
    ``here``: it names each part that differs on both sides, and what to set: ``instead``, or ``trainer.resume_other``
    ``to`` use it nevertheless."""
    names = other_parts(saved, here, cfg.trainer.resume_other)
    if not names:
        return
    sides = "; ".join(
        f"its {name} {verb} {saved[name].shown}, this run's {verb} {here[name].shown}"
        for name in names
        for verb in ("are" if name == "adapters" else "is",)
    )
    fix = f"it is of another run: {sides}. {instead}, or {RESUME_OTHER}=[{','.join(names)}] to {to} nevertheless"
    if "adapters" in names:
        fix += "; factors of another rank or of other layers cannot be loaded"
    if {"optimizer", "critic_optimizer"} & {*names}:
        fix += "; moments that the other optimizer does not have start at zero"
    raise ConfigError([Problem(key, where, fix)])


def as_json(identity: Identity) -> dict[str, dict[str, str]]:
    """Return an identity as plain values."""
    return {name: {"shown": part.shown, "digest": part.digest} for name, part in identity.items()}


def from_json(values: Mapping[str, Mapping[str, str]]) -> Identity:
    """Return the identity of :func:`as_json`. Raises KeyError, TypeError for other values."""
    return {str(name): Part(str(part["shown"]), str(part["digest"])) for name, part in values.items()}


# ---------------------------------------------------------------------------------------------- of folders
def read_identity(folder: Path) -> Identity:
    """Return the identity in :data:`FILE` of a folder; {} if it has none."""
    try:
        return from_json(json.loads((folder / FILE).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_identity(folder: Path, identity: Identity) -> None:
    """Write :data:`FILE` of a folder, which exists. Raises OSError."""
    partial = folder / f".{FILE}.{os.getpid()}"
    try:
        write_file(partial, json.dumps(as_json(identity), indent=1).encode())
        partial.replace(folder / FILE)
    finally:
        partial.unlink(missing_ok=True)


def claim(key: str, folder: Path, cfg: SkyRLTrainConfig, identity: Identity) -> None:
    """Take a folder, which ``key`` sets, for the run. Raises ConfigError if it is of another run."""
    refuse_other(key, str(folder), read_identity(folder), cfg, identity)
    write_identity(private_folder(folder), identity)


def is_of_other(folder: Path, identity: Identity, allowed: Collection[str] = ()) -> bool:
    """Return whether a folder has the identity of another run; parts ``allowed`` may differ."""
    return bool(other_parts(read_identity(folder), identity, allowed))


def short(identity: Identity) -> str:
    """Return eight hexadecimal digits of an identity, for names of folders."""
    return _hash(*(f"{name} {part.digest}" for name, part in sorted(identity.items())))[:8]


def _hash(*parts: str | bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(f"{len(data)} ".encode() + data)
    return hasher.hexdigest()
