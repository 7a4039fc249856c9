"""``launch/doctor.sh``: check what a run needs from this machine. Each problem is printed with its fix."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyrl_megatron import device
from skyrl_megatron.command import run_command
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import set_up
from skyrl_megatron_tools.doctor import Finding
from skyrl_megatron_tools.doctor.machine import (
    checkpoint_folder,
    cluster,
    gpus,
    locked_memory,
    ports,
    ray_token,
    shared_memory,
)
from skyrl_megatron_tools.doctor.self_test import self_test
from skyrl_megatron_tools.doctor.software import Imported, import_all, packages, software

EPILOG = """\
ok: works · --: missing but not required · warn: a run starts, but works less well · FAIL: a run cannot start
The exit code is 1 if any check is FAIL. On a machine with GPUs, the checks are those of a GPU run, and a self-test of
about a minute follows: an all-reduce, a layer compared with fp32, a weight sync between two processes, and an engine
that samples."""


def findings(cfg: SkyRLTrainConfig, *, gpu: bool, test: bool) -> Iterator[Finding]:
    """Check everything that a run of ``cfg`` needs from this machine, and yield each finding immediately."""
    imported = import_all(packages(gpu=gpu))
    yield from software(imported, gpu=gpu)
    devices = imported["torch"].facts.get("devices", [])
    if gpu:
        yield from attention(imported, devices, deterministic=bool(cfg.trainer.deterministic))
        if devices:
            yield from gpus(devices)
    yield shared_memory(gpu=gpu)
    if gpu:
        yield locked_memory(cfg.trainer.placement.policy_num_nodes)
    engine = cfg.generator.inference_engine
    yield ports(engine.http_endpoint_port if engine.enable_http_endpoint else 0)
    yield checkpoint_folder(Path(cfg.trainer.ckpt_path), gpu=gpu)
    yield ray_token(os.environ, Path.home())
    if os.environ.get("RAY_ADDRESS") and imported["Ray"].works:
        yield from cluster()
    if test:
        yield from self_test(gpu=gpu)


def attention(
    imported: dict[str, Imported], devices: Sequence[object], *, deterministic: bool = False
) -> Iterator[Finding]:
    """Report the attention kernels that Transformer Engine chooses here."""
    if not (imported["Transformer Engine"].works and devices):
        return
    from skyrl_megatron.runtime.model.attention_kernels import CASES, attention_kernels

    for name, case in CASES.items():
        kernels = attention_kernels(dataclasses.replace(case, deterministic=deterministic))
        if kernels:
            yield Finding("attention", "ok", f"{name}: {kernels[0]}")
        else:
            fix = f"use a GPU of compute capability 8.0 or later, and the locked cuDNN version ({set_up('gpu')})"
            yield Finding("attention", "FAIL", f"{name}: Transformer Engine has no kernel", fix)


def main(argv: Sequence[str] | None = None) -> int:
    """Print all findings. Return the exit code: 0, 1 if a run cannot start, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="skyrl-megatron doctor",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="check for a CPU run, even if there are GPUs")
    kind.add_argument("--gpu", action="store_true", help="check for a GPU run, even if no GPU is visible")
    tests = parser.add_mutually_exclusive_group()
    tests.add_argument("--self-test", action="store_true", help="run the self-test also for a CPU run")
    tests.add_argument("--no-self-test", action="store_true", help="skip the self-test")
    parser.add_argument("--config", help="YAML file of the run, for its checkpoint folder and ports")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run")
    args = parser.parse_args(argv)

    def work() -> int:
        settings = ([f"--config={args.config}"] if args.config else []) + args.settings
        cfg = SkyRLTrainConfig.from_cli_overrides(settings)
        gpu = args.gpu or (not args.cpu and device.driver_gpu_count() > 0)
        if not gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        print(f"a {'GPU' if gpu else 'CPU'} run on {platform.node()}, {sys.prefix}", flush=True)
        failed = 0
        for finding in findings(cfg, gpu=gpu, test=args.self_test or (gpu and not args.no_self_test)):
            print(finding, flush=True)
            failed += finding.state == "FAIL"
        if failed:
            print(f"{failed} problem(s) to fix before a run can start", flush=True)
        return 1 if failed else 0

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
