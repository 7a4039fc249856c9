"""What the ladder may use of this machine: packages that are installed and that ``SKYRL_WITHOUT`` does not name."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Any

NEEDS = {"te": "transformer_engine", "vllm": "vllm", "ray": "ray", "fla": "fla"}
"""Short names of ``--without`` and ``SKYRL_WITHOUT`` → the package that is imported."""
GPU = "gpu"
"""In ``missing()`` where there is none; no name of ``--without``."""
ENGINE = "generator.inference_engine."


@functools.cache
def missing() -> frozenset[str]:
    """Return the short names of what is not installed or is to be left out. Imports none of it."""
    from skyrl_megatron import device

    without = {name.strip() for name in os.environ.get("SKYRL_WITHOUT", "").split(",")} - {""}
    if unknown := without - NEEDS.keys():
        raise ValueError(f"SKYRL_WITHOUT={os.environ['SKYRL_WITHOUT']}: {sorted(unknown)} are none of {sorted(NEEDS)}")
    found = {name for name, package in NEEDS.items() if name in without or find_spec(package) is None}
    if device.driver_gpu_count():
        return frozenset(found)
    return frozenset(found | {GPU} | ({"vllm"} if _vllm_is_for_gpus() else set()))


def _vllm_is_for_gpus() -> bool:
    """Return whether the installed vLLM starts no engine without a GPU; the build for CPUs has another name."""
    with suppress(metadata.PackageNotFoundError):
        return "cpu" not in metadata.version("vllm")
    return False


def lacking(needs: Iterable[str]) -> str:
    """Return what of ``needs`` this machine lacks, in words; "" where nothing is."""
    absent = sorted(missing().intersection(needs))
    return "no GPU" if GPU in absent else f"without {', '.join(absent)}" if absent else ""


def is_rehearsal() -> bool:
    """Return whether rungs run without a GPU as far as a CPU can (``launch/gpu_hour.sh --smoke``)."""
    return GPU in missing() and os.environ.get("SKYRL_SMOKE") == "1"


def layer_choices() -> list[str]:
    """Return the values of Megatron's ``transformer_impl`` that can be tried here."""
    return ["local"] if missing() & {"te", GPU} else ["local", "transformer_engine"]


def dtype() -> str:
    """Return the dtype of engines: that of GPU runs, and on CPU the one in which numbers are compared."""
    return "float32" if GPU in missing() else "bfloat16"


def engine_class() -> Any:
    """Return vLLM's engine, and where vLLM is missing the one over transformers."""
    if "vllm" in missing():
        from tests.gpu.generate_engine import GenerateEngine

        return GenerateEngine
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    return VLLMEngine


def run_settings() -> dict[str, str]:
    """Return the settings of a run of one policy rank, a reference and an engine: on one GPU they take turns."""
    found = {"trainer.placement.colocate_all": "false" if GPU in missing() else "true"}
    if "vllm" in missing():
        found |= {"trainer.plugins": "[tests.gpu.generate_engine]", f"{ENGINE}backend": "transformers"}
    return found
