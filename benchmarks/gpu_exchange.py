"""Exchange of tokens between experts over the GPUs of a machine: Megatron's all-to-all against its overlap and DeepEP.

    python benchmarks/run.py gpu_exchange [--ranks 0] [--layers 4] [--sequences 16] [--length 4096]

A slice of Qwen3-30B-A3B with its experts over all ranks (``--ranks 0``: the GPUs that there are). Milliseconds of
forward and backward, of the slowest rank, by ``alltoall`` (the rival), with the exchange beside the other pass of
another micro-batch (``overlap_moe_expert_parallel_comm``), and by DeepEP's and HybridEP's dispatchers; in place of a
way that cannot run here is what it lacks. Gradients must be those of the rival. On one GPU it says so and ends.
``--smoke``: a tiny model, on a CPU in fp32 over two ranks, where nothing overlaps and DeepEP does not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

M = "trainer.policy.megatron_config."
K = f"{M}transformer_config_kwargs."
OVERLAP, DISPATCHER = f"{K}overlap_moe_expert_parallel_comm=true", f"{M}moe_token_dispatcher_type=flex"
WAYS = {
    "alltoall": (),
    "overlapped": (OVERLAP,),
    "deepep": (DISPATCHER,),
    "hybridep": (DISPATCHER, f"{K}moe_flex_dispatcher_backend=hybridep"),
}
NEAR = {"bf16": 0.02, "fp32": 1e-4}
"""Largest difference of the gradient's norm from the rival's, of its size."""


def overrides(args: argparse.Namespace, ranks: int, way: str) -> list[str]:
    """Settings of a way."""
    from tests.gpu import installed

    layers = [f"{K}transformer_impl=local"] if "te" in installed.missing() else []
    return [
        f"{M}expert_model_parallel_size={ranks}",
        f"{M}moe_enable_routing_replay=false",
        f"trainer.placement.policy_num_gpus_per_node={ranks}",
        f"trainer.bf16={'false' if 'gpu' in installed.missing() else 'true'}",
        f"trainer.max_tokens_per_microbatch={args.tokens_per_microbatch}",
        *layers,
        *WAYS[way],
    ]


def why_not(args: argparse.Namespace, ranks: int, way: str) -> str:
    """Return what a way lacks here, in the words of the configuration's rules; "" if it can run. The overlap needs a
    GPU for its sake alone."""
    from skyrl_megatron import device
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.rules.exchange_rules import exchange_problems

    gpus = device.driver_gpu_count()
    if way == "overlapped" and not gpus:
        return ""
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides(args, ranks, way))
    megatron, here = cfg.trainer.policy.megatron_config, Hardware(ranks if gpus else 0, 1)
    return "; ".join(problem.fix for problem in exchange_problems(cfg, "policy", megatron, M, here))


def measure(args: argparse.Namespace, ranks: int, way: str) -> dict[str, float]:
    """Milliseconds of forward and backward on the slowest rank, and the gradient's norm. On every rank."""
    import torch
    import torch.distributed as dist

    from benchmarks.gpu_train import best_of, load_engine, make_batch
    from skyrl_megatron import device

    settings = overrides(args, ranks, way)
    on_cpu = not device.has_cuda()
    if on_cpu:  # Megatron overlaps on GPUs in 16 bits alone, which it checks when its config is made
        settings = [each for each in settings if each != OVERLAP]
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    engine = load_engine(args.layers, 1, settings, smoke=args.smoke)
    if on_cpu:
        engine.model.config.overlap_moe_expert_parallel_comm = way == "overlapped"
    batch = make_batch(args.sequences, args.length, engine.model.vocab_size)

    def both_passes() -> None:
        engine.clear_gradients()
        engine.forward_backward(batch)

    seconds = best_of(args.steps, both_passes)
    norm = float(engine.optim_step().grad_norm)
    slowest = torch.tensor(seconds, device=device.device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"ms": round(float(slowest) * 1e3, 2), "grad_norm": norm}


def rank(number: int, args: argparse.Namespace, ranks: int, port: int, ways: list[str], out: Path) -> None:
    """One of the processes; rank 0 writes ``out`` after each way."""
    from benchmarks.gpu_train import join_group
    from skyrl_megatron import device
    from skyrl_megatron.runtime import parallel_state

    join_group(number, ranks, port)
    found: dict[str, dict[str, float]] = {}
    for way in ways:
        found[way] = measure(args, ranks, way)
        parallel_state.end_groups()
        device.empty_cache()
        if number == 0:
            out.write_text(json.dumps(found))


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    args = parse(parser, layers=2, sequences=4, length=64, tokens_per_microbatch=128, steps=1)

    from skyrl_megatron import device

    gpus = device.driver_gpu_count()
    if gpus < 2 and (gpus or not args.smoke):
        print("experts over several ranks need 2 GPUs: nothing measured" if gpus else "no GPU: nothing measured")
        return
    ranks = args.ranks or 1 << (min(gpus or 2, 8).bit_length() - 1)
    lacking = {way: reason for way in WAYS if (reason := why_not(args, ranks, way))}
    ways = [way for way in WAYS if way not in lacking]

    import torch.multiprocessing as processes

    from tests.support.rank_pool import lasting_port

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        processes.spawn(rank, (args, ranks, lasting_port(), ways, out), nprocs=ranks)
        found = json.loads(out.read_text())
    report: dict[str, Any] = {"ranks": ranks, **found}
    for way in ways[1:]:
        report[way]["ratio"] = round(report[way]["ms"] / report["alltoall"]["ms"], 3)
    print(json.dumps(report | {way: f"not runnable: {reason}" for way, reason in lacking.items()}, indent=2))
    exact, near = report["alltoall"]["grad_norm"], NEAR["bf16" if gpus else "fp32"]
    wrong = [way for way in ways if abs(report[way]["grad_norm"] / exact - 1) > near]
    if wrong:
        raise SystemExit(f"gradients of {', '.join(wrong)} are not those of alltoall, within {near:g}")


if __name__ == "__main__":
    main()
