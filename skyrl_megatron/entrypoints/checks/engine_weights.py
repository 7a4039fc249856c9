"""Whether the weights that a run trains can be given to its engines as these hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridges.engine_form import FP8, EngineForm
from bridges.errors import BridgeError
from skyrl_megatron.config.hf_model import ENGINE_KWARGS, engines_quantise, read_hf_config
from skyrl_megatron.config.rules.role_layout import trains_draft
from skyrl_megatron.config.rules.sampling import support_travels, truncations
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import ConfigError, Problem

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
    """Yield what engines draft with, unless it is the layer that is trained (``weight_sync/vllm_drafts.py``), and
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
