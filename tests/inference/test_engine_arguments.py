"""Every engine argument that is passed on is in the configuration that an engine runs with, and vLLM's own types judge
its value at ``--check``."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.shown_keys import IN_AN_ENGINES_CONFIGURATION
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm
SIZES = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 25)
NAMES = {"attention_backend": "backend", "kv_cache_dtype": "cache_dtype"}
"""Arguments that vLLM's configuration has under another name."""


def attributes(config, seen):
    """(name, value as text) of every attribute below a configuration of vLLM."""
    if id(config) not in seen and hasattr(config, "__dict__"):
        seen.add(id(config))
        for name, value in vars(config).items():
            yield name, str(getattr(value, "name", value))
            if type(value).__module__.startswith(("vllm", "transformers")):
                yield from attributes(value, seen)


@pytest.fixture
def configurations(tmp_path, monkeypatch):
    """``configurations(**arguments)`` → the attributes of an engine's configuration, and those before vLLM's CPU
    platform replaces what GPUs alone can do."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms.cpu import CpuPlatform

    model, seen, real = write_tiny_model("qwen3_moe", tmp_path), [], CpuPlatform.check_and_update_config.__func__

    def recorded(cls, config):
        seen.append(list(attributes(config, set())))
        return real(cls, config)

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(recorded))
    monkeypatch.setattr(CpuPlatform, "use_custom_allreduce", classmethod(lambda cls: True))  # as GPUs say

    def made(**arguments):
        seen.clear()
        config = AsyncEngineArgs(model=str(model), **{**SIZES, **arguments}).create_engine_config()
        return [*seen[0], *attributes(config, set())]

    return made


def test_arguments_are_in_the_configuration_of_the_engine(configurations):
    plain, unseen = configurations(), {}
    for name, value in IN_AN_ENGINES_CONFIGURATION.items():
        asked = configurations(**{name: value})
        for inner, each in value.items() if isinstance(value, dict) else [(NAMES.get(name, name), value)]:
            before, after = ([found for key, found in every if key == inner] for every in (plain, asked))
            if after == before or not any(text.endswith(str(each)) for text in after):
                unseen[f"{name}.{inner}"] = (before, after)
    assert unseen == {}


def test_slots_of_adapters_reach_the_engine(tmp_path):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.inference.vllm.settings import engine_settings

    def arguments(**options):
        lora = {
            f"trainer.policy.model.{key}": value
            for key, value in {"lora.rank": 8, "lora.sync_mode": "memory", "path": str(model)}.items()
        }
        options = {"generator.inference_engine.engine_init_kwargs": options}
        return engine_settings(SkyRLTrainConfig.from_cli_overrides(lora | options)).arguments()

    model = write_tiny_model("qwen3_moe", tmp_path)
    assert arguments()["max_loras"] != 5 == arguments(max_loras=5)["max_loras"]


ENGINE, SAMPLING = "generator.inference_engine.engine_init_kwargs.", "generator.sampling_params.additional_kwargs."
REFUSED = {
    f"{ENGINE}kv_cache_dtype=banana": "one of auto, float16",
    f"{ENGINE}attention_backend=banana": "Valid options are: FLASH_ATTN",
    f"{ENGINE}compilation_config.mode=banana": "VLLM_COMPILE",
    f"{ENGINE}compilation_config.banana=1": "Unexpected keyword",
    f"{ENGINE}load_format=banana": "must be one of auto, dummy",
    f"{ENGINE}max_logprobs=-7": "greater than or equal to -1",
    f"{ENGINE}num_gpu_blocks_override=-2": "must be at least 1",
    f"{ENGINE}optimization_level=9": "0, 1, 2 or 3",
    f"{ENGINE}profiler_config.profiler=banana": "'torch', 'cuda' or 'proton'",
    f"{ENGINE}speculative_config.method=banana": "'ngram'",
    f"{ENGINE}watermark=5": "less than 1",
    f"{SAMPLING}bad_words=['']": "empty string",
    f"{SAMPLING}min_tokens=-5": "greater than or equal to 0",
    f"{SAMPLING}min_tokens=5000": "less than or equal to max_tokens",
    f"{SAMPLING}presence_penalty=7": "in [-2, 2]",
    f"{SAMPLING}repetition_detection.max_pattern_size=3": "min_count",
    f"{SAMPLING}structured_outputs={{regex: a, choice: [a]}}": "only use one kind",
}
"""Argument of a command → what the one problem says, under its whole key."""
CHECK = """
import json, os, sys, warnings
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.checks import run_checks
from skyrl_megatron_observe.preflight.foreign_values import foreign_values
from skyrl_megatron.checks import PlannedRun
from skyrl_megatron_observe.preflight.option_checks import foreign_options
from skyrl_megatron.config.validate import find_problems

warnings.simplefilter("ignore")
found, before = {}, {}
WARN = "generator.unaccounted_sampling=warn"
for argument in [None, *json.loads(sys.argv[1])]:
    assert argument is not None or "vllm" not in sys.modules
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.logger=console", *([argument, WARN] if argument else [])])
    run = PlannedRun(cfg, Hardware(8))
    problems = [*find_problems(cfg, run.hardware), *foreign_options(run), *foreign_values(run)]
    found[str(argument)] = [(each.key, each.fix) for each in problems]
    before = before if argument else dict(os.environ)
print(json.dumps([found, sorted({*before.items()} ^ {*os.environ.items()})]))
"""


@pytest.mark.process
def test_values_that_vllm_refuses_are_problems_at_check():
    """In a process of its own, which a command without such keys leaves without vLLM."""
    command = [sys.executable, "-W", "ignore", "-c", CHECK, json.dumps([*REFUSED])]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found, changed = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("None") == [] == changed
    for argument, says in REFUSED.items():
        ((key, fix),) = found[argument]
        whole = argument.partition("=")[0]
        assert key == whole or whole.startswith(key), found[argument]
        assert says in fix and "\n" not in fix, (argument, fix)
