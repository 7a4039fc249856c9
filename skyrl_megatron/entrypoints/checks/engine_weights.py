"""Whether the weights that a run trains can be given to its engines as these hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.rules.role_layout import trains_draft
from skyrl_megatron.config.rules.sampling import support_travels, truncations
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import ConfigError, Problem

KWARGS = "generator.inference_engine.engine_init_kwargs"


def engine_weights(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield engines that quantise: the trainer sends bfloat16 weights without scales; and those that draft tokens with
    what syncs leave out. An evaluation sends none."""
    engine = run.cfg.generator.inference_engine
    if not run.training or not engine.run_engines_locally:
        return
    if method := engine.engine_init_kwargs.get("quantization"):
        fix = "engines get bfloat16 weights without scales in training: leave it out"
        yield Problem("generator.inference_engine.engine_init_kwargs.quantization", method, fix)
    if drafting := engine.engine_init_kwargs.get("speculative_config"):
        yield from _drafting(run, drafting)
    key, path = "trainer.policy.model.path", run.cfg.trainer.policy.model.path
    try:
        hf = (read_hf_config(run.cfg, "policy") if path else None) or {}
    except ConfigError:
        return  # the rules of the configuration say what is wrong with the file
    if quantised := hf.get("quantization_config"):
        method = quantised.get("quant_method", "quantised") if isinstance(quantised, dict) else "quantised"
        lora = run.cfg.trainer.policy.model.lora
        if lora.rank and lora.sync_mode == "merged" and _get_dequantised(engine.engine_init_kwargs):
            return
        plain = (
            f"write it in bfloat16, python -m bridges import --hf {path} --dtype bf16 --out MEGATRON, then python -m "
            f"bridges export --megatron MEGATRON --hf-template {path} --out FOLDER, and name that folder"
        )
        if lora.rank:
            plain = (
                "its base can stay as it is if engines start without weights and get them merged: "
                "trainer.policy.model.lora.sync_mode=merged "
                f"{KWARGS}.load_format=dummy {KWARGS}.hf_overrides.quantization_config=null; or {plain}"
            )
        yield Problem(
            key, path, f"engines would build {method} layers of it and get bfloat16 weights in training: {plain}"
        )


def _drafting(run: PlannedRun, drafting: Any) -> Iterator[Problem | NotChecked]:
    """Yield what engines draft with, unless it is the layer that is trained (``weight_sync/vllm_drafts.py``), and
    samples whose log-probs would be others than the sampler's."""
    cfg = run.cfg
    key = f"{KWARGS}.speculative_config"
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


def _get_dequantised(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether engines of a quantised folder are built without quantisation, and without its weights."""
    overrides = kwargs.get("hf_overrides")
    plain = isinstance(overrides, Mapping) and overrides.get("quantization_config", overrides) is None
    return plain and kwargs.get("load_format") == "dummy"
