"""What adapters cost and save against training all weights: time of a step, optimizer state, memory.

    python benchmarks/lora.py [--rank 16] [--rounds 5] [--only memory step]

A Qwen3-MoE of hidden size 1024 with 32 experts top-4 (2 layers, 124 million parameters) in fp32, one process, as many
threads as ``OMP_NUM_THREADS`` says (1). Both sides are a ``MegatronEngine`` of the same folder, one of them with
adapters on every linear map, and take the same step: 8 sequences of 1024 tokens in one micro-batch, log-probs,
objective, gradients, Adam. Rounds alternate; the fastest of each side are compared, as noise only ever adds. Seconds
are processor time, which with one thread is what a quiet machine takes.

``memory`` runs each side in a process of its own and counts the bytes of all tensors that are alive after a step, and
by how much the process has grown: a second copy of the frozen weights would show in both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
SIDES = ("full", "adapters")


def write_model(folder: Path) -> Path:
    """Write a model of the embedded one's tokenizer and the sizes above."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, tie_word_embeddings=False, **MODEL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
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
    if side == "adapters":
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
def time_steps(model: Path, rank: int, rounds: int) -> None:
    """Print the processor seconds of forward and backward and of the whole step, and the ratios."""
    from megatron.core import parallel_state

    engines = {}
    for side in SIDES:
        parallel_state.destroy_model_parallel()  # an engine makes its own; those of the first live on in it
        engines[side] = build(side, model, rank)
    batch = make_batch()
    best: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for side, engine in engines.items():
            began = time.process_time()
            engine.forward_backward(batch)
            middle = time.process_time()
            engine.optim_step()
            taken = [middle - began, time.process_time() - began]
            print(f"  round {number}, {side}: {taken[0]:.2f} s, {taken[1]:.2f} s", flush=True)
            if number:  # the first warms up
                best[side] = [min(pair) for pair in zip(best.get(side, taken), taken, strict=True)]
    for side, (passes, step) in best.items():
        print(f"{side:<9} forward and backward {passes:6.2f} s   step {step:6.2f} s")
    for number, (name, wanted) in enumerate((("forward and backward", 0.80), ("step", 0.75))):
        ratio = best["adapters"][number] / best["full"][number]
        print(f"{name}: {ratio:.3f} of training all weights (wanted: at most {wanted:.2f})")


# -------------------------------------------------------------------------------------------------------- memory
def memory_of(side: str, model: Path, rank: int) -> dict[str, int]:
    """Return bytes after a step of one sequence, and how many values are trained."""
    import psutil
    import torch

    import skyrl_megatron.runtime.engine  # noqa: F401  (imported later it would count as growth)

    process = psutil.Process()
    before = process.memory_info().rss
    engine = build(side, model, rank)
    engine.forward_backward(make_batch().select([0]))
    engine.optim_step()
    gc.collect()
    alive = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
    parameters = list(engine.model.chunks[0].parameters())
    factors = {id(factor.tensor) for factor in engine.adapters.factors()} if engine.adapters else set()
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    state = [value for each in optimizers for of in each.optimizer.state.values() for value in of.values()]
    return {
        "weights": sum(each.nbytes for each in parameters if id(each) not in factors),
        "trained": sum(each.numel() for each in parameters if each.requires_grad),
        "state": sum(value.nbytes for value in state if value.dim()),
        "alive": sum(storages.values()),
        "grown": process.memory_info().rss - before,
    }


def compare_memory(model: Path, rank: int) -> None:
    """Print what each side has, each in a process of its own."""
    found: dict[str, Mapping[str, int]] = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--as", side, "--model", str(model), "--rank", str(rank)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
        found[side] = each = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{side:<9} {each['trained']:,} trained values; MB: weights {each['weights'] / 1e6:,.1f}, optimizer state "
            f"{each['state'] / 1e6:,.1f}, all tensors {each['alive'] / 1e6:,.1f}, process {each['grown'] / 1e6:,.1f}"
        )
    full, ours = found["full"], found["adapters"]
    same = full["state"] * ours["trained"] == ours["state"] * full["trained"]
    print(f"optimizer state: {ours['state'] / ours['trained']:g} bytes a trained value, on both sides alike: {same}")
    more = ours["alive"] - ours["weights"]
    print(
        f"beside the weights: {more / ours['weights']:.3f} of them, {more / ours['trained']:.1f} bytes a trained value"
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["memory", "step"], default=["memory", "step"])
    parser.add_argument("--as", dest="side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        one_process()
        print(json.dumps(memory_of(args.side, args.model, args.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        if "memory" in args.only:
            compare_memory(model, args.rank)
        if "step" in args.only:
            one_process()
            time_steps(model, args.rank, args.rounds)


if __name__ == "__main__":
    main()
