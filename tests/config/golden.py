"""Named configurations whose resolved values are recorded in ``tests/data/resolved``.

A file lists the keys whose resolved value differs from the default of the field. After an intended change:
``python -m tests.config.golden`` rewrites them.
"""

import os
import warnings
from pathlib import Path

import yaml

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import default_of, field_types, sections_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.validate import find_problems

FOLDER = Path(__file__).parents[1] / "data" / "resolved"
GPUS = Hardware(gpus_per_node=8, nodes=2)
CPU = Hardware(gpus_per_node=0, nodes=1)
_MEGATRON = "trainer.policy.megatron_config"

RUNS = {
    "cpu_default": (CPU, []),
    "gpu_quick_start": (
        GPUS,
        [
            "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct",
            "trainer.strategy=fsdp2",
            "trainer.placement.colocate_all=true",
            "trainer.placement.policy_num_gpus_per_node=4",
            "generator.backend=vllm",
            "generator.num_inference_engines=4",
            "generator.inference_engine_tensor_parallel_size=1",
            "generator.weight_sync_backend=nccl",
            "trainer.logger=console",
        ],
    ),
    "gpu_moe_30b": (
        GPUS,
        [
            "trainer.policy.model.path=Qwen/Qwen3-30B-A3B",
            f"{_MEGATRON}.tensor_model_parallel_size=4",
            f"{_MEGATRON}.pipeline_model_parallel_size=2",
            f"{_MEGATRON}.expert_model_parallel_size=8",
            f"{_MEGATRON}.expert_tensor_parallel_size=1",
            "trainer.placement.policy_num_nodes=2",
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.train_batch_size=128",
            "trainer.policy_mini_batch_size=64",
            "trainer.max_prompt_length=1024",
            "generator.sampling_params={max_generate_length: 3072, temperature: 0.7}",
            "generator.inference_engine={num_engines: 2, tensor_parallel_size: 8, gpu_memory_utilization: 0.6}",
            "trainer.logger=tensorboard",
        ],
    ),
}


def resolved(name: str) -> dict[str, object]:
    """Dotted key → resolved value, where it is not the default of its field; the home folder as ``~``."""
    hardware, args = RUNS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg = SkyRLTrainConfig.from_cli_overrides(args)
        assert find_problems(cfg, hardware) == []
    return dict(_differences(cfg, SkyRLTrainConfig, None, ""))


def _differences(section, cls, base, at):
    """(dotted key, value) where a section differs from ``base``, the one that its parent makes by default."""
    for name in field_types(cls):
        value = getattr(section, name)
        default = default_of(cls, name) if base is None else getattr(base, name)
        if name in sections_of(cls) and value is not None:
            yield from _differences(value, sections_of(cls)[name], default, f"{at}{name}.")
        elif value != default:
            yield f"{at}{name}", value


def text(name: str) -> str:
    """What the file of a run holds."""
    body = yaml.safe_dump(resolved(name), sort_keys=False, width=119)
    return body.replace(os.path.expanduser("~/"), "~/")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        (FOLDER / f"{run}.yaml").write_text(text(run))
