"""Whether the weights that a run trains can be given to its engines as these hold them."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
from skyrl_megatron.errors import ConfigError, Problem


def engine_weights(run: PlannedRun) -> Iterator[Problem]:
    """Yield engines that quantise: the trainer sends bfloat16 weights without scales. An evaluation sends none."""
    engine = run.cfg.generator.inference_engine
    if not run.training or not engine.run_engines_locally:
        return
    if method := engine.engine_init_kwargs.get("quantization"):
        fix = "engines get bfloat16 weights without scales in training: leave it out"
        yield Problem("generator.inference_engine.engine_init_kwargs.quantization", method, fix)
    key, path = "trainer.policy.model.path", run.cfg.trainer.policy.model.path
    try:
        hf = (read_hf_config(run.cfg, "policy") if path else None) or {}
    except ConfigError:
        return  # the rules of the configuration say what is wrong with the file
    if quantised := hf.get("quantization_config"):
        method = quantised.get("quant_method", "quantised") if isinstance(quantised, dict) else "quantised"
        yield Problem(
            key,
            path,
            f"engines would build {method} layers of it and get bfloat16 weights in training: write it in bfloat16, "
            f"python -m bridges import --hf {path} --dtype bf16 --out MEGATRON, then python -m bridges export "
            f"--megatron MEGATRON --hf-template {path} --out FOLDER, and name that folder",
        )
