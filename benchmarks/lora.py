"""What adapters cost and save against training all weights: time of a step, optimizer state, memory.

    python benchmarks/run.py lora [--rank 16] [--rounds 5] [--only memory step several]

A Qwen3-MoE of hidden size 1024 with 32 experts top-4 (2 layers, 124 million parameters) in fp32, one process, as many
threads as ``OMP_NUM_THREADS`` says (1). Both sides are a ``MegatronEngine`` of the same folder, one of them with
adapters on every linear map, and take the same step: 8 sequences of 1024 tokens in one micro-batch, log-probs,
objective, gradients, Adam. Rounds alternate; the fastest of each side are compared, as noise only ever adds. Seconds
are processor time, which with one thread is what a quiet machine takes.

``several`` takes the same rows with one adapter, and with two that have half of them each, in two micro-batches both
times. ``quantised`` compares adapters on this base and on the same in FP8 blocks of 128 × 128, which stays so.

``memory`` runs each side in a process of its own and counts the bytes of all tensors that are alive after a step, and
by how much the process has grown: a second copy of the frozen weights would show in both.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

MODEL = dict(
    vocab_size=8192,
    hidden_size=1024,
    moe_intermediate_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
)
SEQUENCES, PROMPT, TOKENS = 8, 64, 1024
SIDES = ("full", "adapters", "quantised")
"""All weights; adapters; adapters on a base in FP8."""


def write_model(folder: Path) -> Path:
    """Write a model of the embedded one's tokenizer and the sizes above."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, tie_word_embeddings=False, **MODEL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_quantised(model: Path) -> Path:
    """Write the model beside itself with linear layers in FP8, in blocks of 128 × 128."""
    import torch
    from safetensors.torch import load_file, save_file

    block, tensors = 128, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if weight.dim() != 2 or "layers" not in name or name.endswith("mlp.gate.weight"):
            tensors[name] = weight.bfloat16()
            continue
        rows, columns = weight.shape[0] // block, weight.shape[1] // block
        blocks = weight.view(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    folder = model.with_name("quantised")
    shutil.copytree(model, folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_batch() -> TrainingBatch:
    """Return rows of equal length with random tokens and advantages."""
    import torch

    from skyrl_megatron.data.batch import collate

    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL["vocab_size"], (SEQUENCES, TOKENS), generator=g)
    batch = collate(
        tokens[:, :PROMPT].tolist(),
        tokens[:, PROMPT:].tolist(),
        uids=[str(row) for row in range(SEQUENCES)],
        rewards=[0.0] * SEQUENCES,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -9.0 * batch.response_mask
    return batch


def build(side: str, model: Path, rank: int, **more: object) -> MegatronEngine:
    """Build a side's engine; ``more``: keys with double underscores for dots."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    keys: dict[str, Any] = {
        "trainer.policy.model.path": str(model),
        "trainer.policy.optimizer_config.lr": 1e-4,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.gradient_checkpointing": False,
        "trainer.bf16": False,
        "trainer.max_tokens_per_microbatch": SEQUENCES * TOKENS,
        "trainer.max_prompt_length": PROMPT,
        "generator.sampling_params.max_generate_length": TOKENS - PROMPT,
    }
    if side != "full":
        keys |= {"trainer.policy.model.lora.rank": rank, "trainer.policy.model.lora.alpha": 2 * rank}
    return MegatronEngine(
        SkyRLTrainConfig.from_cli_overrides(keys | {k.replace("__", "."): v for k, v in more.items()})
    )


def one_process() -> None:
    """Join a process group of one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


# ---------------------------------------------------------------------------------------------------------- time
def race(
    engines: Mapping[str, MegatronEngine], batches: Mapping[str, TrainingBatch], rounds: int
) -> dict[str, list[float]]:
    """Return the fewest processor seconds of each side's forward and backward pass, and of its whole step."""
    best: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for side, engine in engines.items():
            began = time.process_time()
            engine.forward_backward(batches[side])
            middle = time.process_time()
            engine.optim_step()
            taken = [middle - began, time.process_time() - began]
            print(f"  round {number}, {side}: {taken[0]:.2f} s, {taken[1]:.2f} s", flush=True)
            if number:  # the first warms up
                best[side] = [min(pair) for pair in zip(best.get(side, taken), taken, strict=True)]
    for side, (passes, step) in best.items():
        print(f"{side:<9} forward and backward {passes:6.2f} s   step {step:6.2f} s")
    return best


def built(sides: Mapping[str, Callable[[], MegatronEngine]]) -> dict[str, MegatronEngine]:
    """Build engines beside each other: each makes process groups of its own, and those of the others live on."""
    from megatron.core import parallel_state

    engines = {}
    for side, make in sides.items():
        parallel_state.destroy_model_parallel()
        engines[side] = make()
    return engines


def time_steps(models: Mapping[str, Path], rank: int, rounds: int, sides: Sequence[str]) -> None:
    """Print the seconds of ``sides`` and the ratios of the second to the first."""
    engines = built({side: partial(build, side, models[side], rank) for side in sides})
    best = race(engines, dict.fromkeys(sides, make_batch()), rounds)
    first, second = sides
    for number, name in enumerate(("forward and backward", "step")):
        wanted = f" (wanted: at most {(0.80, 0.75)[number]:.2f})" if first == "full" else ""
        print(f"{name}: {best[second][number] / best[first][number]:.3f} of {first}{wanted}")


def time_several(model: Path, rank: int, rounds: int) -> None:
    """Print the seconds of a step of one adapter, and of two that share its rows."""
    names, half = ("first", "second"), SEQUENCES // 2
    limit: dict[str, Any] = {"trainer__max_tokens_per_microbatch": half * TOKENS}
    keys: dict[str, dict[str, Any]] = {
        "one": limit,
        "two": limit | {"trainer__policy__model__lora__adapters": {name: {} for name in names}},
    }
    engines = built({side: partial(build, "adapters", model, rank, **more) for side, more in keys.items()})
    batch = make_batch()
    batches = {"one": batch, "two": dataclasses.replace(batch, adapters=[name for name in names for _ in range(half)])}
    best = race(engines, batches, rounds)
    print(f"two adapters in a step: {best['two'][1] / best['one'][1]:.3f} of one (wanted: at most 1.15)")


# -------------------------------------------------------------------------------------------------------- memory
def resident(kind: str) -> int:
    """Return the bytes of this process's own memory (``RssAnon``), or of mapped files (``RssFile``)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(kind)).split()[1]) * 1024


def memory_of(side: str, model: Path, rank: int) -> dict[str, int]:
    """Return bytes after a step of one sequence, and how many values are trained."""
    import torch

    import skyrl_megatron.runtime.engine  # noqa: F401  (imported later it would count as growth)
    from skyrl_megatron.runtime.model.scaled_weights import scaled_buffers
    from skyrl_megatron_lora.attach import Adapters

    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    engine = build(side, model, rank)
    loaded = resident("RssFile") - before["RssFile"]
    engine.forward_backward(make_batch().select([0]))
    engine.optim_step()
    gc.collect()
    alive = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
    adapters = engine.adapters
    factors = {id(factor.tensor) for factor in adapters.factors()} if isinstance(adapters, Adapters) else set()
    parameters = [each for each in engine.model.chunks[0].parameters() if id(each) not in factors]
    base = [each.untyped_storage() for each in [*parameters, *scaled_buffers(engine.model.chunks[0])]]
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    state = [value for each in optimizers for of in each.optimizer.state.values() for value in of.values()]
    grown = resident("RssAnon") - before["RssAnon"]
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {
        "weights": sum({each.data_ptr(): each.nbytes() for each in base}.values()),
        "trained": sum(each.numel() for each in engine.model.chunks[0].parameters() if each.requires_grad),
        "state": sum(value.nbytes for value in state if value.dim()),
        "alive": sum(storages.values()),
        "grown": grown,
        "kept": grown - (resident("RssAnon") - before["RssAnon"]),
        "mapped": max(loaded, resident("RssFile") - before["RssFile"]),
    }


def memory_beside_others(side: str, model: Path, rank: int) -> dict[str, int]:
    """Return what :func:`memory_of` does in this process, which had other engines before."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return memory_of(side, model, rank)


def in_own_process(side: str, model: Path, rank: int) -> dict[str, int]:
    """Return what :func:`memory_of` does in a new process."""
    command = [sys.executable, __file__, "--as", side, "--model", str(model), "--rank", str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_memory(
    models: Mapping[str, Path], rank: int, measure: Callable[[str, Path, int], Mapping[str, int]]
) -> None:
    """Print what each side has."""
    found: dict[str, Mapping[str, int]] = {}
    for side in SIDES:
        found[side] = each = measure(side, models[side], rank)
        print(
            f"{side:<9} {each['trained']:,} trained values; MB: weights {each['weights'] / 1e6:,.1f}, optimizer state "
            f"{each['state'] / 1e6:,.1f}, all tensors {each['alive'] / 1e6:,.1f}, process {each['grown'] / 1e6:,.1f} "
            f"(of which the C library keeps {each['kept'] / 1e6:,.1f} free), mapped files {each['mapped'] / 1e6:,.1f}"
        )
    full = found["full"]
    for side in SIDES[1:]:
        ours = found[side]
        same = full["state"] * ours["trained"] == ours["state"] * full["trained"]
        print(f"{side}: optimizer state {ours['state'] / ours['trained']:g} bytes a trained value, as full: {same}")
        more = ours["alive"] - ours["weights"]
        print(f"{side}: beside the weights {more / 1e6:,.1f} MB, {more / ours['trained']:.1f} bytes a trained value")
    print(f"base in FP8: {found['quantised']['weights'] / found['adapters']['weights']:.3f} of the base in fp32")


def main() -> None:
    """Run what is asked for."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    every = ["memory", "step", "several", "quantised"]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--as", dest="side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parse(parser, rounds=1, rank=4, only=["step"])
    if args.smoke:
        global TOKENS
        TOKENS = 128
        MODEL.update(vocab_size=512, hidden_size=128, num_experts=4, moe_intermediate_size=128, intermediate_size=128)
    if args.side:
        one_process()
        print(json.dumps(memory_of(args.side, args.model, args.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        models = {"full": model, "adapters": model, "quantised": write_quantised(model)}
        if args.smoke:
            one_process()  # a process of its own for each side imports for 10 s
            compare_memory(models, args.rank, memory_beside_others)
        elif "memory" in args.only:
            compare_memory(models, args.rank, in_own_process)
        if not args.smoke:
            one_process()
        if "step" in args.only:
            time_steps(models, args.rank, args.rounds, ("full", "adapters"))
        if "several" in args.only:
            time_several(model, args.rank, args.rounds)
        if "quantised" in args.only:
            time_steps(models, args.rank, args.rounds, ("adapters", "quantised"))


if __name__ == "__main__":
    main()
