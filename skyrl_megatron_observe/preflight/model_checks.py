"""Check models: supported architecture, complete weight files, and whether engines can load the trained weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.quantisation import FP8, EngineForm
from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import reward_model, supervised
from skyrl_megatron.config.fields import source_of
from skyrl_megatron.config.hf_model import (
    ADAPTER,
    ENGINE_KWARGS,
    EXPERT_COUNTS,
    cached_folder,
    engines_quantise,
    read_hf_config,
)
from skyrl_megatron.config.roles import (
    active_roles,
    adapter_configs,
    has_value_head,
    is_frozen,
    role_layout,
    trains_draft,
)
from skyrl_megatron.config.rules.megatron_rules import MEASURE
from skyrl_megatron.config.rules.passthrough import distribution_changes
from skyrl_megatron.config.rules.role_rules import adapter_problems
from skyrl_megatron.config.rules.rollout_rules import returns_sampling_support
from skyrl_megatron.errors import ConfigError, ModelLoadError, Problem
from skyrl_megatron_observe.preflight.foreign_values import transformer_values

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import Head
    from skyrl_megatron.runtime.model.description import HfModel
    from skyrl_megatron_lora.targets import Selection


_CPU_BACKEND = {False: "vllm.v1.attention.backends.cpu_attn", True: "vllm.v1.attention.backends.mla.cpu_mla"}
"""Whether attention is multi-latent → vLLM's CPU attention module."""
_GPU_ONLY = {
    "deepseek_v32": "sparse attention",
    "glm_moe_dsa": "sparse attention",
    "mimo_v2_flash": "value heads of another size than key heads",
}
"""Families that vLLM's CPU attention (``platforms/cpu.py``, ``cpu_attn.py``) cannot run → the missing feature."""
_CPU_EXPERT_ROWS = 32
"""vLLM's CPU kernel for experts needs a hidden size that is a multiple of this."""


def model_files(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield models that Megatron or the engines cannot build, and weight files that are missing, truncated or of
    another model."""
    seen: dict[str, HfModel | None] = {}
    for role in active_roles(run.cfg):
        path, key = getattr(run.cfg.trainer, role).model.path, f"trainer.{role}.model.path"
        if not path or path in seen:
            yield from _megatron(run, role, seen.get(path))
            continue
        seen[path] = None
        with_weights = cached_folder(run.cfg, role)
        folder = with_weights or cached_folder(run.cfg, role, weights=False)
        if with_weights is None:
            yield NotChecked(f"{key}={path}", "the run downloads the weights when it starts")
        if folder is None or not (folder / "config.json").is_file():
            continue  # the checks of hub names and the rules report a wrong name or folder
        if with_weights is not None and run.awaits_files(with_weights):
            missing = "the folder has no *.safetensors yet, so names and shapes of the weights are not checked"
            yield NotChecked(f"{key}={path}", missing)
            with_weights = None
        model, why = _read(run, role, folder)
        seen[path], problem = model, why
        if model is not None and with_weights is not None and problem is None:
            head: Head = "value" if has_value_head(run.cfg, role) else "lm"
            problem = _weights(model, with_weights, head, run.cfg.trainer.algorithm.value_head_prefix)
        if problem is not None:
            yield _of_the_change(run, role, problem) or Problem(key, path, problem)
        yield from _megatron(run, role, model)
        for name in (
            ("rope_scaling", "rope_theta") if model is not None and model.config.get("rope_parameters") else ()
        ):
            if change := _changes(run, role).get(name):
                fix = "config.json has rope_parameters, which are read instead: change those, or set trainer." + name
                yield Problem(*change, fix)
        if model is not None and role == "policy":
            yield from _adapters(run, model, with_weights)
        if model is not None and role == "policy":
            yield from _engine_model(run, model, key, path)
            yield from _reward_model(run, key, path, model)
        if model is not None and role == "policy" and _runs_on_cpu(run):
            yield from _cpu_engine(key, path, model.plan.family.config(model.config).to_dict())


def _changes(run: PlannedRun, role: str) -> dict[str, tuple[str, Any]]:
    """Return key of ``config.json`` → (the key of the configuration that changes it, value)."""
    settings, section = getattr(run.cfg.trainer, role), f"trainer.{role}."
    parts = {"": settings.model_config_kwargs, "megatron_config.": settings.megatron_config.model_config_kwargs}
    return {
        name: (f"{section}{part}model_config_kwargs.{name}", value)
        for part, changes in parts.items()
        for name, value in changes.items()
    }


def _of_the_change(run: PlannedRun, role: str, problem: str) -> Problem | None:
    """Return the problem under the key that changes the value that it names; None if no change is the reason."""
    for name, (key, value) in _changes(run, role).items():
        if re.search(rf"\b{re.escape(name)}[=.']", problem):
            return Problem(key, value, problem.removesuffix("; fetch the file again"))
    return None


def _engine_model(run: PlannedRun, model: HfModel, key: str, path: str) -> Iterator[Problem]:
    """Yield values of the policy's ``config.json`` that vLLM does not honour, and keys that it needs."""
    from skyrl_megatron_observe.preflight.engine_models import engine_model_faults, overrides_of_engines

    engine = run.cfg.generator.inference_engine
    if supervised(run.cfg) is not None or engine.backend != "vllm" or not engine.run_engines_locally:
        return
    overrides = engine.engine_init_kwargs.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        yield Problem(f"{ENGINE_KWARGS}.hf_overrides", overrides, "must be a mapping of keys of config.json")
        return
    family = model.plan.family
    config = family.config(model.config)
    if isinstance(inner := overrides.get("text_config"), Mapping) and "text_config" in model.written:
        overrides = {**{name: value for name, value in overrides.items() if name != "text_config"}, **inner}
    if run.training:
        trainer_values = {**config.to_dict(), **model.config, **overrides_of_engines(family.model_type, overrides)}
        for name, value in overrides.items():
            if trainer_values.get(name, ...) != value:
                fix = (
                    "engines would compute another model than the trainer: set trainer.policy.model_config_kwargs, "
                    "which engines get too, and remove this key"
                )
                yield Problem(f"{ENGINE_KWARGS}.hf_overrides.{name}", value, fix)
    for fault in engine_model_faults(family.model_type, config, {**model.config, **overrides}):
        yield Problem(key, path, fault)


def _reward_model(run: PlannedRun, key: str, path: str, model: HfModel) -> Iterator[Problem]:
    """Yield why nothing could load the reward model that a run would export."""
    if reward_model(run.cfg) is None:
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    from bridges.families import SUPPORTED

    kind = str(model.config["model_type"])
    if kind not in CLASSES:
        loadable = ", ".join(family for family in SUPPORTED if family in CLASSES)
        fix = f"transformers has no sequence classification for {kind}, so no program could load the reward model"
        yield Problem(key, path, f"{fix}: use a model of {loadable}")


def _read(run: PlannedRun, role: str, folder: Path) -> tuple[HfModel | None, str | None]:
    """Return the description of the model that Megatron would build, or why it cannot be built."""
    from skyrl_megatron.runtime.model.description import read_hf_model

    changes = {name: value for name, (_, value) in _changes(run, role).items()}
    trust, draft = run.cfg.trainer.trust_remote_code, trains_draft(run.cfg, role)
    try:
        return read_hf_model(folder, changes=changes, trust_remote_code=trust, draft=draft), None
    except ModelLoadError as error:
        return None, str(error)


def _megatron(run: PlannedRun, role: str, model: HfModel | None) -> Iterator[Problem]:
    """Yield what Megatron's optimizer and layers cannot do with the model of a role."""
    if model is not None:
        yield from transformer_values(run, role, model)
        yield from _optimizer(run, role, model)


def _optimizer(run: PlannedRun, role: str, model: HfModel) -> Iterator[Problem]:
    """Yield why Muon cannot train the model of a trained role, and why ``qk_clip`` cannot clip its attention, as this
    run builds it."""
    from bridges.rules import without_split
    from skyrl_megatron.runtime.model.description import (
        LOCAL,
        unsupported_by_te,
        without_max_logit,
        without_qk_clip,
    )

    if is_frozen(role):
        return
    settings = getattr(run.cfg.trainer, role)
    if run.training and settings.optimizer_config.optimizer == "muon":
        for unknown in without_split(model.plan.entries):
            yield Problem(f"trainer.{role}.optimizer_config.optimizer", "muon", unknown)
    options = settings.megatron_config.transformer_config_kwargs
    local = options.get("transformer_impl") == LOCAL or unsupported_by_te(model) is not None
    use_te = not run.hardware.is_cpu and not local
    if options.get("qk_clip") and (why := without_qk_clip(model, role_layout(run.cfg, role).tp, use_te)):
        yield Problem(f"trainer.{role}.megatron_config.transformer_config_kwargs.qk_clip", True, why)
    elif options.get(MEASURE) and (why := without_max_logit(use_te)):
        yield Problem(f"trainer.{role}.megatron_config.transformer_config_kwargs.{MEASURE}", True, why)


def _adapters(run: PlannedRun, model: HfModel, weights: Path | None) -> Iterator[Problem | NotChecked]:
    """Yield every problem of adapters on the policy's model: module names, ranks, the folder to start from."""
    if not run.cfg.trainer.policy.model.lora.rank or any(adapter_problems(run.cfg)):
        return
    from skyrl_megatron_lora.targets import configured_selection, expert_rank, rank_problems

    for cfg in adapter_configs(run.cfg).values():
        try:
            selection = configured_selection(cfg, model.plan)
            of_experts = expert_rank(cfg, model.megatron.transformer.get("moe_router_topk"))
        except ConfigError as error:
            yield from error.problems
            continue
        rank = cfg.trainer.policy.model.lora.rank
        yield from rank_problems(model.plan, selection, rank, of_experts, role_layout(cfg, "policy"))
        from skyrl_megatron_observe.preflight.adapter_checks import engine_adapters

        yield from engine_adapters(cfg, model.plan, selection, of_experts)
        if path := cfg.trainer.policy.model.lora.adapter_path:
            yield from _adapter_folder(cfg, path, selection, model, weights)


def _adapter_folder(
    cfg: SkyRLTrainConfig, path: str, selection: Selection, model: HfModel, weights: Path | None
) -> Iterator[Problem | NotChecked]:
    from bridges.peft import AdapterConfig, PeftFolder
    from skyrl_megatron_lora.targets import adapter_mismatches, base_mismatch

    lora, folder = cfg.trainer.policy.model.lora, cached_folder(cfg, ADAPTER)
    key = "trainer.policy.model.lora.adapter_path"
    if folder is None:
        yield NotChecked(f"{key}={path}", "the run downloads it when it starts")
        return
    wanted = AdapterConfig(lora.rank, lora.alpha, lora.use_rslora, None)
    try:
        peft = PeftFolder(folder, model.plan)
        problems = [*adapter_mismatches(peft, wanted, selection, model.plan)]
        other = base_mismatch(folder, weights) if weights is not None else None
        problems += [other] if other else []
    except (BridgeError, OSError) as error:
        problems = [str(error)]
    for problem in problems:
        yield Problem(key, path, problem)


def _weights(model: HfModel | None, folder: Path, head: Head, prefix: str) -> str | None:
    """Return what is wrong with index, headers, names or shapes of the weight files; None if nothing is. Reads no
    weights."""
    from bridges.source import open_hf
    from skyrl_megatron.runtime.model.description import check_tensors

    try:
        source = open_hf(folder)
        if model is not None:
            check_tensors(model.plan, source, head, prefix)
    except (BridgeError, OSError) as error:
        return str(error)
    return None


def _runs_on_cpu(run: PlannedRun) -> bool:
    engine = run.cfg.generator.inference_engine
    return run.hardware.is_cpu and engine.run_engines_locally and engine.backend == "vllm"


def _cpu_engine(key: str, path: str, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield sizes that vLLM's CPU kernels do not support, before an engine fails at its start."""
    if lacks := _GPU_ONLY.get(str(hf.get("model_type"))):
        yield Problem(key, path, f"on CPU vLLM's attention does not support {lacks}; use another model, or GPUs")
        return
    latent = bool(hf.get("kv_lora_rank"))
    size = (
        hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
        if latent
        else hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    )
    possible = _head_sizes(_CPU_BACKEND[latent])
    if possible and size not in possible:
        what = "kv_lora_rank + qk_rope_head_dim" if latent else "head_dim"
        fix = (
            f"{what}={size}: on CPU vLLM's attention supports {', '.join(map(str, possible))}; use another model, or "
            "GPUs"
        )
        yield Problem(key, path, fix)
    experts = any(hf.get(name) for name in EXPERT_COUNTS)
    if experts and hf["hidden_size"] % _CPU_EXPERT_ROWS:
        fix = f"hidden_size={hf['hidden_size']}: on CPU vLLM's experts need a multiple of {_CPU_EXPERT_ROWS}"
        yield Problem(key, path, f"{fix}; use another model, or GPUs")


def _head_sizes(module: str) -> list[int]:
    """Return the list that ``get_supported_head_sizes`` of a vLLM module returns; [] if it is not a literal list."""
    tree = source_of(module)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            for statement in node.body:
                if isinstance(statement, ast.Return) and isinstance(statement.value, ast.List):
                    return [item.value for item in statement.value.elts if isinstance(item, ast.Constant)]  # type: ignore[misc]
    return []


PLAIN = f"{ENGINE_KWARGS}.load_format=dummy {ENGINE_KWARGS}.hf_overrides.quantization_config=null"
"""Settings of engines that hold bfloat16 weights of a quantised model: they start without weights."""


def engine_weights(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield every reason why engines cannot use the weights that the trainer sends: quantisation by the engine,
    formats without a conversion or kernel, and draft models that weight sync does not update."""
    engine = run.cfg.generator.inference_engine
    if not run.training or not engine.run_engines_locally:
        return
    if method := engine.engine_init_kwargs.get("quantization"):
        fix = (
            "engines with online quantisation would receive weights without scales: remove this key; if the folder of "
            "trainer.policy.model.path has FP8 blocks or MXFP8, engines receive its format"
        )
        yield Problem(f"{ENGINE_KWARGS}.quantization", method, fix)
    if drafting := engine.engine_init_kwargs.get("speculative_config"):
        yield from _drafting(run, drafting)
    path = run.cfg.trainer.policy.model.path
    if not path:
        return
    try:
        hf = read_hf_config(run.cfg, "policy") or {}
    except ConfigError:
        return  # the rules of the configuration report the file
    if hf.get("quantization_config"):
        yield from _quantised(run, hf, path)


def _quantised(run: PlannedRun, hf: Mapping[str, Any], path: str) -> Iterator[Problem | NotChecked]:
    """Yield every problem of engines of a quantised model folder."""
    key, lora = "trainer.policy.model.path", run.cfg.trainer.policy.model.lora
    plain = (
        f"convert it to bfloat16 (python -m bridges import --hf {path} --dtype bf16 --out MEGATRON, then python -m "
        f"bridges export --megatron MEGATRON --hf-template {path} --out FOLDER) and use that folder"
    )
    if not engines_quantise(run.cfg, hf):
        if run.cfg.generator.inference_engine.engine_init_kwargs.get("load_format") != "dummy":
            why = "engines that hold bfloat16 weights cannot load this quantised folder"
            yield Problem(key, path, f"{why}: start them without weights ({PLAIN}), or {plain}")
        elif lora.rank and lora.sync_mode != "merged":
            why = "engines that start without weights never receive the base model"
            yield Problem(key, path, f"{why}: set trainer.policy.model.lora.sync_mode=merged")
        return
    quantisation = hf["quantization_config"]
    method = quantisation.get("quant_method", "quantised") if isinstance(quantisation, dict) else "quantised"
    if lora.rank:
        fix = (
            f"engines would use {method} layers, which support no adapter: start them without weights and send merged "
            f"weights (trainer.policy.model.lora.sync_mode=merged {PLAIN}), or {plain}"
        )
        yield Problem(key, path, fix)
        return
    unquantised = f"start engines without weights and send bfloat16 ({PLAIN}), or {plain}"
    try:
        form = EngineForm.of(hf, path)
    except BridgeError as error:
        yield Problem(key, path, f"engines would use {method} layers. {error}: {unquantised}")
        return
    assert form is not None
    if lacking := _lacking_kernel(run, form):
        yield Problem(key, path, f"engines would use {method} layers. {lacking}: {unquantised}")
        return
    why = (
        "weights are sent in the format of vLLM's quantisers; tests verified format and loading on CPU, and the probe "
        "of the first weight sync verifies the kernels"
    )
    yield NotChecked(f"engines of {path} in {method}", why)


def _lacking_kernel(run: PlannedRun, form: EngineForm) -> str:
    """Return why vLLM has no kernel for this format on the run's CPU; empty if it may have one."""
    if not run.hardware.is_cpu or run.cfg.generator.inference_engine.backend != "vllm":
        return ""
    if form.method != FP8:
        return f"vLLM has no kernels for {form.method} on CPUs"
    if form.block[1] != 128 or form.block[0] % 32:
        return f"vLLM's FP8 kernels for CPUs need blocks of 128 columns, not weight_block_size={list(form.block)}"
    flags = Path("/proc/cpuinfo")
    if flags.is_file() and "amx_tile" not in flags.read_text():
        return "vLLM's FP8 kernels for CPUs need AMX (Sapphire Rapids or newer), which this processor lacks"
    return ""


def _drafting(run: PlannedRun, drafting: Any) -> Iterator[Problem | NotChecked]:
    """Yield a draft model that weight sync does not update (``weight_sync/vllm_backend.py``), and sampling parameters
    for which drafted tokens have wrong log-probs."""
    cfg = run.cfg
    key = f"{ENGINE_KWARGS}.speculative_config"
    drafts = drafting if isinstance(drafting, Mapping) else {}
    model, method = drafts.get("model"), str(drafts.get("method", ""))
    drafts_itself = (method == "mtp" or method.endswith("_mtp")) and model in (None, cfg.trainer.policy.model.path)
    if not drafts_itself:
        why = "weight sync does not update the draft model, so fewer drafts are accepted as training proceeds"
        yield NotChecked(f"{key}={drafting}", why)
    elif not trains_draft(cfg, "policy"):
        why = (
            "weight sync updates the multi-token-prediction layer only with trainer.policy.megatron_config.mtp.train="
            "true; otherwise fewer drafts are accepted as training proceeds"
        )
        yield NotChecked(f"{key}={drafting}", why)
    cut = distribution_changes(cfg.generator.sampling_params)
    if cut and (run.hardware.is_cpu or not returns_sampling_support(cfg.generator)):
        fix = (
            f"with {cut[0]} the log-probs of drafted tokens are not those of the sampling distribution: remove "
            f"generator.sampling_params.{cut[0]}, or remove this key"
        )
        yield Problem(key, drafting, fix)
