"""What the settings of a GPU run are worth: on paper, and measured on one GPU against the setting they replace.

    python benchmarks/run.py gpu_costs [--layers 2] [--only gradients] [--paper]

On paper: Qwen3-30B-A3B as its recipe has it, on 8 H100, from what ``--check`` counts and the published peaks below.
``tests/runtime/test_gpu_costs.py`` asserts the counts. Measured: ``gpu_train.py`` with one setting changed at a time,
in a process each; the rival is the setting in the first column. ``gpu_pairs.py`` and ``gpu_exchange.py`` measure what
no setting of ``gpu_train.py`` shows. Without a GPU only the paper is printed; ``--smoke`` tries a pair on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HBM, PCIE, HOST = 3.35e12, 50e9, 400e9
"""Bytes/s of an H100's memory, of its PCIe 5 link as measured with pinned memory, of a node's memory."""
NVLINK = 300e9
"""Bytes/s that a GPU sends in an all-to-all over NVLink 4: two thirds of the 450 GB/s of one direction."""
LAUNCH = 10e-6
"""Seconds of the host for an operation that Python starts: 5 to 20 µs."""
ADAM_BYTES = 28
"""Bytes that Adam moves per parameter in fp32: master, two moments read and written, the gradient read."""
CORES, GPUS = 104, 8
CORE_ADAM = 1.35e9
"""Parameters/s of torch's fused Adam on one core (measured)."""


@dataclass(frozen=True)
class OnPaper:
    """A count before and after, and the seconds of an RL step that it is worth."""

    name: str
    counted: str
    before: float
    after: float
    seconds_before: float
    seconds_after: float


def recipe(folder: Path) -> tuple[object, object]:
    """The recipe's configuration with the model's ``config.json``, and the policy's model as ``--check`` sees it."""
    from gpu_train import QWEN3_30B_A3B

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import RoleModel

    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": 48}))
    cfg = SkyRLTrainConfig.from_cli_overrides(
        ["--config", str(ROOT / "skyrl_megatron/recipes/qwen3-30b-a3b.yaml"), f"trainer.policy.model.path={folder}"]
    )
    return cfg, RoleModel.of(cfg, "policy", parameter_tables(cfg)["policy"])


def on_paper() -> Iterator[OnPaper]:
    """Yield each setting's worth in an RL step of the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        cfg, model = recipe(Path(folder))
    trainer, engine = cfg.trainer, cfg.generator.inference_engine  # type: ignore[attr-defined]
    layers, own = 48, model.parameters(0).parameters  # type: ignore[attr-defined]
    updates = trainer.train_batch_size // trainer.policy_mini_batch_size
    responses = cfg.generator.sampling_params.max_generate_length  # type: ignore[attr-defined]
    kernels = 15 * layers  # norms, projections, rotation, attention, router, experts of a decode step
    for sequences in (256, 8):
        visited = 1 - (1 - 8 / 128) ** sequences  # share of the experts
        read = visited * 2 * 30.5e9 / engine.tensor_parallel_size / HBM
        seconds = [responses * max(read, launches * LAUNCH) for launches in (kernels, 1)]
        yield OnPaper(f"CUDA graphs, {sequences} sequences", "launches of a decoded token", kernels, 1, *seconds)

    tokens = trainer.train_batch_size * cfg.generator.n_samples_per_prompt * (1024 + responses) // 2 // GPUS  # type: ignore[attr-defined]
    micro_batches = -(-tokens // trainer.max_tokens_per_microbatch)
    matrices = layers * (2 + 2 * 128 // 8)
    traffic = [own * width / HBM * micro_batches for width in (12, 8)]
    yield OnPaper(
        "gradients added in the GEMM",
        "additions of a micro-batch",
        matrices,
        0,
        traffic[0] + matrices * LAUNCH * micro_batches,
        traffic[1],
    )

    on_host = own // 2
    copies = on_host * 4 / PCIE
    one, all_cores = (
        max(on_host / CORE_ADAM / threads, on_host * ADAM_BYTES * GPUS / HOST) for threads in (1, CORES // GPUS)
    )
    yield OnPaper("cores of the host Adam", "threads of a rank", 1, CORES // GPUS, updates * one, updates * all_cores)
    yield OnPaper(
        "copies of the host Adam, overlapped",
        "updates before the first copy back",
        matrices // 2,
        1,
        updates * (2 * copies + all_cores),
        updates * max(copies, all_cores),
    )

    exchanges, sent = 4 * layers, 8 * 2 * 2048 * (GPUS - 1) / GPUS  # bytes of a token's 8 copies that leave the rank
    whole = exchanges * tokens * sent / NVLINK
    yield OnPaper(
        "exchange of experts beside a micro-batch",
        "exchanges that nothing overlaps",
        exchanges * micro_batches,
        exchanges * updates,
        whole,
        whole * updates / micro_batches,
    )
    ranks_met = GPUS * (1 - (1 - 1 / GPUS) ** 8)
    yield OnPaper(
        "DeepEP: a token once to a rank", "copies of 1,000 tokens", 8e3, ranks_met * 1e3, whole, whole * ranks_met / 8
    )

    optimizer = model.state(0).optimizer  # type: ignore[attr-defined]
    yield OnPaper(
        "offload of the optimizer, started early",
        "waits for the device",
        2,
        0,
        optimizer / PCIE,
        max(
            optimizer / PCIE - 0.3, 0.0
        ),  # what the driver does between the last update and the sync, in the embedded run
    )
    nets, micro_batch = 36, 16384  # Qwen3-Next-80B-A3B, a micro-batch of sequences of 8,192 tokens
    ours = 3 * 4846  # forward of one sequence, as the test counts it, and about twice as many backward
    yield OnPaper(
        "gated delta nets by kernels, a micro-batch",
        "launches of a layer, both ways",
        ours,
        19,
        nets * ours * LAUNCH,
        nets * max(19 * LAUNCH, micro_batch * 7e6 / 400e12),
    )
    heads, width, length, sunk = 64, 64, 8192, 36  # gpt-oss-120b, the same micro-batch
    scores = heads * length
    passes = 2 * sunk * micro_batch / HBM * 3  # forward, and twice as much backward
    yield OnPaper(
        "attention with sinks by the flash kernel",
        "elements made for a query",
        5 * scores,
        heads * width,
        passes * (4 * 2 + 4) * scores / 2,
        passes * 2 * 4 * heads * width,
    )
    segments = 2 * optimizer / (20 << 20)
    yield OnPaper("caches emptied for others only", "emptied caches", updates + 1, 1, updates * segments * 1e-4, 0.0)


@dataclass(frozen=True)
class Pair:
    """A setting and the one that it replaces, as arguments and variables of ``gpu_train.py``."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    figure: str
    """The measurement of ``gpu_train.py`` in which they differ: a part of ``ms``, or another name."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the first alone."""
    needs: tuple[str, ...] = ()
    """Of ``tests/gpu/installed.py``; without a GPU, ``--smoke`` runs those that do not need one."""


M = "trainer.policy.megatron_config."
K, O = f"{M}transformer_config_kwargs.", f"{M}optimizer_config_kwargs."  # noqa: E741
HOST_ADAM = (f"{O}optimizer_cpu_offload=true", f"{O}optimizer_offload_fraction=0.5")
SETTINGS = (
    Pair("gradients", (f"{K}gradient_accumulation_fusion=false",), (), "forward_backward", needs=("te", "gpu")),
    Pair("recompute", ("trainer.gradient_checkpointing=true",), (), "forward_backward"),
    Pair("caches", (f"{M}empty_cuda_cache=true",), (), "step_ms"),
    Pair("allocator", (), (), "peak_reserved_GiB", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ("gpu",)),
    Pair("host_threads", HOST_ADAM, HOST_ADAM, "optim_step", {"OMP_NUM_THREADS": "1"}, ("gpu",)),
    Pair(
        "host_copies",
        (*HOST_ADAM, f"{O}overlap_cpu_optimizer_d2h_h2d=false"),
        HOST_ADAM,
        "optim_step",
        needs=("gpu",),
    ),
)


def measured(pair: Pair, arguments: list[str]) -> dict[str, float]:
    """Run both sides of a pair, and return their figures and the ratio."""
    found = []
    for overrides, more in ((pair.before, pair.variables), (pair.after, {})):
        usual = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        command = [sys.executable, str(ROOT / "benchmarks/gpu_train.py"), *arguments, *overrides]
        run = subprocess.run(command, env=os.environ | usual | more, capture_output=True, text=True, timeout=240)
        if run.returncode:
            raise SystemExit(f"{pair.name}: {' '.join(command)} ended with {run.returncode}\n{run.stderr[-2000:]}")
        report = json.loads(run.stdout[run.stdout.index("\n{\n") :])
        found.append(float((report["ms"] | report)[pair.figure]))
    return {"before": found[0], "after": found[1], "ratio": round(found[1] / found[0], 3)}


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", choices=[pair.name for pair in SETTINGS], help="measure this pair, and nothing else")
    parser.add_argument("--paper", action="store_true", help="measure nothing")
    args = parse(parser)
    if args.only is None:
        print_paper()
    if args.paper:
        return

    from tests.gpu import installed

    beside = () if args.smoke else (installed.GPU,)
    chosen = [pair for pair in SETTINGS if args.only in (None, pair.name)]
    runnable = [pair for pair in chosen if not installed.lacking({*pair.needs, *beside})]
    if not runnable:
        print(f"{installed.lacking({*chosen[0].needs, *beside})}: nothing measured")
        return
    if args.smoke and args.only is None:
        runnable = runnable[:1]
    arguments = ["--smoke"] if args.smoke else ["--layers", str(args.layers), "--steps", "3"]
    arguments += [f"{K}transformer_impl=local"] if "te" in installed.missing() and not args.smoke else []
    report = {pair.name: measured(pair, arguments) for pair in runnable}
    print()
    print(json.dumps(report, indent=2))


def print_paper() -> None:
    """Print what each setting is worth on paper."""
    print(f"{'':46s}{'counted':36s}before     after   seconds of a step")
    for line in on_paper():
        print(
            f"{line.name:46s}{line.counted:36s}{line.before:6,.0f} {line.after:9,.0f} "
            f"{line.seconds_before:8.2f} → {line.seconds_after:.2f}"
        )


if __name__ == "__main__":
    main()
