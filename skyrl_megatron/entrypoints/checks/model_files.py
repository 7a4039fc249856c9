"""Model folders: an architecture that is supported here and by the engines, and weights that are whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.adapters import adapter_configs, adapter_problems
from skyrl_megatron.config.declared_fields import source_of
from skyrl_megatron.config.hf_model import EXPERT_COUNTS
from skyrl_megatron.config.rules.role_layout import active_roles, role_layout, trains_draft
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import ConfigError, ModelLoadError, Problem
from skyrl_megatron.hub import ADAPTER, cached_folder

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.hf.model import HfModel
    from skyrl_megatron.runtime.lora.targets import Selection
    from skyrl_megatron.runtime.model.build import Head

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
    from skyrl_megatron.runtime.hf.model import read_hf_model

    settings = getattr(run.cfg.trainer, role)
    changes = {**settings.model_config_kwargs, **settings.megatron_config.model_config_kwargs}
    trust, draft = run.cfg.trainer.trust_remote_code, trains_draft(run.cfg, role)
    try:
        return read_hf_model(folder, changes=changes, trust_remote_code=trust, draft=draft), None
    except ModelLoadError as error:
        return None, str(error)


def _adapters(run: PlannedRun, model: HfModel, weights: Path | None) -> Iterator[Problem | NotChecked]:
    """Yield what stands against low-rank adapters on the policy's model: names, ranks, the folder to start from."""
    from skyrl_megatron.entrypoints.checks.engine_adapters import engine_adapters
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
        yield from engine_adapters(cfg, model.plan, selection, of_experts)
        if path := cfg.trainer.policy.model.lora.adapter_path:
            yield from _adapter_folder(cfg, path, selection, model, weights)


def _adapter_folder(
    cfg: SkyRLTrainConfig, path: str, selection: Selection, model: HfModel, weights: Path | None
) -> Iterator[Problem | NotChecked]:
    from bridges.errors import BridgeError
    from bridges.peft_folder import AdapterConfig, PeftFolder
    from skyrl_megatron.runtime.lora.folder_fit import base_misfit, misfits

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
    from skyrl_megatron.runtime.hf.value_head import check_tensors

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
