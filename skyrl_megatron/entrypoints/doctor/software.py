"""Python and packages: do they import, and do their versions go together?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from skyrl_megatron.entrypoints.doctor.finding import Finding
from skyrl_megatron.entrypoints.doctor.imports import TIMED_OUT, Imported

SET_UP = "launch/setup.sh"
PYTHONS = ((3, 12), (3, 13))
OPTIONAL = {
    "flash-attn": "Transformer Engine takes cuDNN's attention without it",
    "apex": "Transformer Engine has the same fused kernels",
    "DeepEP": "needed for moe_token_dispatcher_type=flex",
}


def packages(*, gpu: bool) -> list[str]:
    """Return what to import, in an order in which a failure is blamed on its cause."""
    if not gpu:
        return ["torch", "megatron-core", "Ray", "vLLM"]
    return [
        *("torch", "Transformer Engine", "megatron-core", "Ray", "vLLM", "vLLM kernels"),
        *OPTIONAL,
    ]


def software(imported: Mapping[str, Imported], *, gpu: bool) -> Iterator[Finding]:
    """Judge what :func:`import_all` found for a GPU or CPU run."""
    yield python(sys.version_info[:2])
    yield requirements()
    for name in packages(gpu=gpu):
        found = imported[name]
        if name in OPTIONAL:
            yield _optional(name, found)
        elif name == "vLLM kernels":
            if not found.works:
                yield Finding(name, "FAIL", found.error, f"{SET_UP} gpu on this machine; the driver must be there")
        else:
            yield _needed(name, found, gpu=gpu)
        if name == "torch" and gpu and found.works:
            yield from cuda(found)


def python(version: tuple[int, int]) -> Finding:
    """Judge the interpreter's version."""
    text = ".".join(map(str, version))
    if version in PYTHONS:
        return Finding("Python", "ok", text)
    return Finding("Python", "FAIL", text, f"PYTHON=/path/to/python3.12 {SET_UP}")


def requirements() -> Finding:
    """Compare installed versions with those that this package asks for."""
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
            wrong.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    if wrong:
        return Finding(
            "packages", "FAIL", "; ".join(wrong), f"{SET_UP} in this checkout, and no pip install beside it"
        )
    return Finding("packages", "ok", "versions as required")


def _needed(name: str, found: Imported, *, gpu: bool) -> Finding:
    if found.works:
        return Finding(name, "ok", found.version)
    fix = f"{SET_UP} {'gpu' if gpu else 'cpu'}"
    if not found.installed:
        return Finding(name, "FAIL", "not installed", fix)
    if found.error.startswith(TIMED_OUT):
        fix = f"run this again when the machine is less busy (load {os.getloadavg()[0]:.0f}); if it still hangs, {fix}"
    elif name == "Transformer Engine":
        fix += ", which builds it with this environment's torch"
    return Finding(name, "FAIL", f"{found.version} does not import: {found.error}".lstrip(), fix)


def _optional(name: str, found: Imported) -> Finding:
    if found.works:
        return Finding(name, "ok", found.version)
    if not found.installed:
        return Finding(name, "--", f"not installed; {OPTIONAL[name]}")
    return Finding(
        name,
        "warn",
        f"does not import: {found.error}",
        f"build it with this torch, or remove it: pip uninstall {name}",
    )


def cuda(torch: Imported) -> Iterator[Finding]:
    """Judge driver, runtime and NCCL by what torch said of them."""
    (runtime, release), (driver, minor) = torch.facts["runtime"], torch.facts["driver"]
    theirs = f"driver's CUDA {driver}.{minor}" if driver else "no driver"
    text = f"{theirs}, torch's {runtime}.{release}"
    if not runtime:
        yield Finding("CUDA", "FAIL", "this torch is built without CUDA", f"{SET_UP} gpu")
    elif driver < runtime:
        yield Finding(
            "CUDA", "FAIL", text, f"install a driver of CUDA {runtime}.{release} or later (nvidia-smi shows it)"
        )
    elif torch.facts["reason"] or not torch.facts["devices"]:
        reason = torch.facts["reason"] or "no device is visible"
        yield Finding(
            "CUDA", "FAIL", f"{text}: {reason}", "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs"
        )
    elif (driver, minor) < (runtime, release):
        fix = f"update the driver to CUDA {runtime}.{release}: kernels compiled during a run may not load"
        yield Finding("CUDA", "warn", text, fix)
    else:
        yield Finding("CUDA", "ok", text)
    if torch.facts["collectives"]:
        yield Finding("NCCL", "ok", torch.facts["collectives"])
    else:
        yield Finding("NCCL", "FAIL", "this torch has none", f"{SET_UP} gpu")
