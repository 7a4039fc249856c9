"""Check models: supported architectures, whole weights, and whether engines can take what the run trains."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.errors import BridgeError
from bridges.quantisation import FP8, EngineForm
from skyrl_megatron import hub
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import source_of
from skyrl_megatron.config.hf_model import ENGINE_KWARGS, EXPERT_COUNTS, engines_quantise, read_hf_config
from skyrl_megatron.config.roles import active_roles, adapter_configs, adapter_problems, role_layout, trains_draft
from skyrl_megatron.config.rules.rollout_rules import support_travels, truncations
from skyrl_megatron.errors import ConfigError, ModelLoadError, Problem
from skyrl_megatron.hub import ADAPTER, cached_folder
from skyrl_megatron.preflight.option_checks import NotChecked, PlannedRun

if TYPE_CHECKING:
    from skyrl_megatron.runtime.lora.targets import Selection
    from skyrl_megatron.runtime.model.build import Head
    from skyrl_megatron.runtime.model.description import HfModel


_CPU_BACKEND = {False: "vllm.v1.attention.backends.cpu_attn", True: "vllm.v1.attention.backends.mla.cpu_mla"}
"""Whether attention is multi-latent → vLLM's module that computes it on CPU."""
_ON_GPUS_ALONE = {
    "deepseek_v32": "a choice of keys",
    "glm_moe_dsa": "a choice of keys",
    "mimo_v2_flash": "values of another size than keys",
}
"""Families of which vLLM's attention for CPU (``platforms/cpu.py``, ``cpu_attn.py``) lacks something: what."""
_CPU_EXPERT_ROWS = 32
"""vLLM's CPU kernel for experts takes hidden sizes that are a multiple of this."""


def model_files(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield models that Megatron or the engines cannot build, and files that are missing, cut off or another's."""
    seen: set[str] = set()
    for role in active_roles(run.cfg):
        path, key = getattr(run.cfg.trainer, role).model.path, f"trainer.{role}.model.path"
        if not path or path in seen:
            continue
        seen.add(path)
        whole = cached_folder(run.cfg, role)
        folder = whole or cached_folder(run.cfg, role, weights=False)
        if whole is None:
            yield NotChecked(f"{key}={path}", "its weights are fetched when the run starts")
        if folder is None or not (folder / "config.json").is_file():
            continue  # a name or a folder that is wrong is reported with the hub's names and by the rules
        if whole is not None and run.awaits_files(whole):
            yield NotChecked(f"{key}={path}", "no *.safetensors there yet: names and shapes of the weights")
            whole = None
        model, why = _read(run, role, folder)
        if why is None and whole is not None:
            why = _weights(
                model, whole, "value" if role == "critic" else "lm", run.cfg.trainer.algorithm.value_head_prefix
            )
        if why is not None:
            yield Problem(key, path, why)
        if model is not None and role == "policy":
            yield from _adapters(run, model, whole)
        if model is not None and role == "policy" and _runs_on_cpu(run):
            yield from _cpu_engine(key, path, model.plan.family.config(model.config).to_dict())


def _read(run: PlannedRun, role: str, folder: Path) -> tuple[HfModel | None, str | None]:
    """Return the model as Megatron would build it, or why it cannot."""
    from skyrl_megatron.runtime.model.description import read_hf_model

    settings = getattr(run.cfg.trainer, role)
    changes = {**settings.model_config_kwargs, **settings.megatron_config.model_config_kwargs}
    trust, draft = run.cfg.trainer.trust_remote_code, trains_draft(run.cfg, role)
    try:
        return read_hf_model(folder, changes=changes, trust_remote_code=trust, draft=draft), None
    except ModelLoadError as error:
        return None, str(error)


def _adapters(run: PlannedRun, model: HfModel, weights: Path | None) -> Iterator[Problem | NotChecked]:
    """Yield what stands against low-rank adapters on the policy's model: names, ranks, the folder to start from."""
    from skyrl_megatron.runtime.lora.targets import configured_selection, expert_rank, rank_problems

    if not run.cfg.trainer.policy.model.lora.rank or any(adapter_problems(run.cfg)):
        return
    for cfg in adapter_configs(run.cfg).values():
        try:
            selection = configured_selection(cfg, model.plan)
            of_experts = expert_rank(cfg, model.megatron.transformer.get("moe_router_topk"))
        except ConfigError as error:
            yield from error.problems
            continue
        rank = cfg.trainer.policy.model.lora.rank
        yield from rank_problems(model.plan, selection, rank, of_experts, role_layout(cfg, "policy"))
        from skyrl_megatron.preflight.adapter_checks import engine_adapters

        yield from engine_adapters(cfg, model.plan, selection, of_experts)
        if path := cfg.trainer.policy.model.lora.adapter_path:
            yield from _adapter_folder(cfg, path, selection, model, weights)


def _adapter_folder(
    cfg: SkyRLTrainConfig, path: str, selection: Selection, model: HfModel, weights: Path | None
) -> Iterator[Problem | NotChecked]:
    from bridges.errors import BridgeError
    from bridges.peft import AdapterConfig, PeftFolder
    from skyrl_megatron.runtime.lora.targets import base_misfit, misfits

    lora, folder = cfg.trainer.policy.model.lora, cached_folder(cfg, ADAPTER)
    key = "trainer.policy.model.lora.adapter_path"
    if folder is None:
        yield NotChecked(f"{key}={path}", "it is fetched when the run starts")
        return
    wanted = AdapterConfig(lora.rank, lora.alpha, lora.use_rslora, None)
    try:
        peft = PeftFolder(folder, model.plan)
        problems = [*misfits(peft, wanted, selection, model.plan)]
        other = base_misfit(folder, weights) if weights is not None else None
        problems += [other] if other else []
    except (BridgeError, OSError) as error:
        problems = [str(error)]
    for problem in problems:
        yield Problem(key, path, problem)


def _weights(model: HfModel | None, folder: Path, head: Head, prefix: str) -> str | None:
    """Say what is wrong with index, headers, names or shapes of the weights; no weight is read."""
    from bridges.errors import BridgeError
    from bridges.source import open_hf
    from skyrl_megatron.runtime.hf_weights import check_tensors

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
    """Yield sizes that vLLM's kernels for CPU do not take; an engine would find out when it starts."""
    if lacks := _ON_GPUS_ALONE.get(str(hf.get("model_type"))):
        yield Problem(key, path, f"on CPU vLLM's attention lacks {lacks}; take another model or GPUs")
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
            f"{what}={size}: on CPU vLLM's attention takes {', '.join(map(str, possible))}; take another model or GPUs"
        )
        yield Problem(key, path, fix)
    experts = any(hf.get(name) for name in EXPERT_COUNTS)
    if experts and hf["hidden_size"] % _CPU_EXPERT_ROWS:
        fix = f"hidden_size={hf['hidden_size']}: on CPU vLLM's experts need a multiple of {_CPU_EXPERT_ROWS}"
        yield Problem(key, path, f"{fix}; take another model or GPUs")


def _head_sizes(module: str) -> list[int]:
    """Return the list that ``get_supported_head_sizes`` of a vLLM module returns; empty where it is no plain list."""
    tree = source_of(module)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            for statement in node.body:
                if isinstance(statement, ast.Return) and isinstance(statement.value, ast.List):
                    return [item.value for item in statement.value.elts if isinstance(item, ast.Constant)]  # type: ignore[misc]
    return []


def pin_hub_names(run: PlannedRun) -> list[Problem]:
    """Fill ``trainer.hub_commits`` and return a problem for each name that is misspelt or cannot be asked for.

    Before the rules are looked at, which read the models' ``config.json`` from the cache.
    """
    cfg = run.cfg
    derive(cfg)  # the reference's model is the policy's unless it is named
    lists = {"data.train_data": cfg.data.train_data if run.training else [], "data.val_data": cfg.data.val_data}
    asked = [*hub.models(cfg, active_roles(cfg))]
    asked += [each for key, entries in lists.items() for each in hub.data_sets(key, entries)]
    if not asked:
        return []
    from skyrl_megatron.trainer.checkpoints import recorded_hub_commits  # torch, which few need to wait for

    return hub.pin(cfg, asked, recorded_hub_commits(cfg), lambda line: print(line, file=sys.stderr, flush=True))


PLAIN = f"{ENGINE_KWARGS}.load_format=dummy {ENGINE_KWARGS}.hf_overrides.quantization_config=null"
"""Engines of a quantised folder that hold bfloat16 weights: they start without any."""


def engine_weights(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield engines that quantise weights themselves, or in a form that the trainer's cannot be brought into; those
    that no kernel here computes; and those that draft tokens with what syncs leave out. An evaluation sends none."""
    engine = run.cfg.generator.inference_engine
    if not run.training or not engine.run_engines_locally:
        return
    if method := engine.engine_init_kwargs.get("quantization"):
        fix = (
            "engines that quantise for themselves would get weights without scales: leave it out; engines of a folder "
            "in FP8 blocks or MXFP8 (trainer.policy.model.path) get theirs in its form"
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
        return  # the rules of the configuration say what is wrong with the file
    if hf.get("quantization_config"):
        yield from _quantised(run, hf, path)


def _quantised(run: PlannedRun, hf: Mapping[str, Any], path: str) -> Iterator[Problem | NotChecked]:
    """Yield what is wrong with engines of a quantised folder."""
    key, lora = "trainer.policy.model.path", run.cfg.trainer.policy.model.lora
    plain = (
        f"write it in bfloat16, python -m bridges import --hf {path} --dtype bf16 --out MEGATRON, then python -m "
        f"bridges export --megatron MEGATRON --hf-template {path} --out FOLDER, and name that folder"
    )
    if not engines_quantise(run.cfg, hf):
        if run.cfg.generator.inference_engine.engine_init_kwargs.get("load_format") != "dummy":
            why = "engines that hold it in bfloat16 cannot load it"
            yield Problem(key, path, f"{why}: let them start without weights, {PLAIN}; or {plain}")
        elif lora.rank and lora.sync_mode != "merged":
            why = "engines that start without weights get no base"
            yield Problem(key, path, f"{why}: trainer.policy.model.lora.sync_mode=merged")
        return
    found = hf["quantization_config"]
    method = found.get("quant_method", "quantised") if isinstance(found, dict) else "quantised"
    if lora.rank:
        fix = (
            f"engines would build {method} layers of it, to which no adapter is added: its base can stay as it is if "
            f"engines start without weights and get them merged, trainer.policy.model.lora.sync_mode=merged {PLAIN}; "
            f"or {plain}"
        )
        yield Problem(key, path, fix)
        return
    unquantised = f"let engines start without weights and get them in bfloat16, {PLAIN}; or {plain}"
    try:
        form = EngineForm.of(hf, path)
    except BridgeError as error:
        yield Problem(key, path, f"engines would build {method} layers of it. {error}: {unquantised}")
        return
    assert form is not None
    if lacking := _lacking_kernel(run, form):
        yield Problem(key, path, f"engines would build {method} layers of it. {lacking}: {unquantised}")
        return
    why = (
        "weights are sent as vLLM's quantisers make them, which was compared on CPU, as was what its loaders make of "
        "them; what kernels compute with them shows in the probe of the first sync"
    )
    yield NotChecked(f"engines of {path} in {method}", why)


def _lacking_kernel(run: PlannedRun, form: EngineForm) -> str:
    """Say what vLLM has no kernel for on the run's processors; nothing, if it may have one."""
    if not run.hardware.is_cpu or run.cfg.generator.inference_engine.backend != "vllm":
        return ""
    if form.method != FP8:
        return f"vLLM has no kernels for {form.method} on CPUs"
    if form.block[1] != 128 or form.block[0] % 32:
        return f"vLLM's FP8 kernels for CPUs want blocks of 128 columns, not weight_block_size={list(form.block)}"
    flags = Path("/proc/cpuinfo")
    if flags.is_file() and "amx_tile" not in flags.read_text():
        return "vLLM's FP8 kernels for CPUs need AMX (Sapphire Rapids or newer), which this processor lacks"
    return ""


def _drafting(run: PlannedRun, drafting: Any) -> Iterator[Problem | NotChecked]:
    """Yield what engines draft with, unless it is the layer that is trained (``weight_sync/vllm_backend.py``), and
    samples whose log-probs would be others than the sampler's."""
    cfg = run.cfg
    key = f"{ENGINE_KWARGS}.speculative_config"
    drafts = drafting if isinstance(drafting, Mapping) else {}
    model, method = drafts.get("model"), str(drafts.get("method", ""))
    own = (method == "mtp" or method.endswith("_mtp")) and model in (None, cfg.trainer.policy.model.path)
    if not own:
        why = "syncs do not send what engines draft with: it stays as it was, and fewer drafts are accepted"
        yield NotChecked(f"{key}={drafting}", why)
    elif not trains_draft(cfg, "policy"):
        why = (
            "syncs send the layer that engines draft with where trainer.policy.megatron_config.mtp.train trains it: "
            "it stays as it was, and fewer drafts are accepted"
        )
        yield NotChecked(f"{key}={drafting}", why)
    cut = truncations(cfg.generator.sampling_params)
    if cut and (run.hardware.is_cpu or not support_travels(cfg)):
        fix = (
            f"log-probs of drafted tokens would not be of what {cut[0]} samples from: sample from all, or leave it out"
        )
        yield Problem(key, drafting, fix)
