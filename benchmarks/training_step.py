"""The cost of the policy-gradient step over Megatron's bare schedule with ``vocab_parallel_cross_entropy``.

    python benchmarks/run.py training_step [--rounds 7] [--rows 64]

One process, one thread, the tiny Qwen3-MoE of the embedded default. Both sides run the same packed micro-batches
through ``get_forward_backward_func`` and the same optimizer; ours adds log-probs, objective, metrics, checks and
packing. Rounds alternate; the medians are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=64)
    args = parse(parser, rounds=1, rows=8)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.tiny_model import write_embedded_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_embedded_model(Path(folder) / "model")
        engine = MegatronEngine(
            SkyRLTrainConfig.from_cli_overrides(
                {
                    "trainer.policy.model.path": str(model),
                    "trainer.algorithm.use_kl_loss": False,
                    "trainer.gradient_checkpointing": False,
                    "trainer.max_tokens_per_microbatch": 1024,
                }
            )
        )
        batch = make_batch(args.rows)
        sides: dict[str, Callable[[], None]] = {
            "ours": lambda: our_step(engine, batch),
            "bare": lambda: bare_step(engine, batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for round_number in range(args.rounds + 1):
            for name, step in sides.items():
                start = time.perf_counter()
                step()
                if round_number:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    tokens = int(batch.lengths.sum())
    for name, median in medians.items():
        print(f"{name:<6} {median * 1e3:8.1f} ms/step  {tokens / median:10.0f} tokens/s")
    print(f"ratio  {medians['ours'] / medians['bare']:.3f} (wanted: at most 1.1)")


def make_batch(rows: int) -> TrainingBatch:
    """Rows of 20 prompt tokens and 16 to 64 response tokens."""
    import torch

    from skyrl_megatron.data.batch import collate

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 65, (rows,), generator=g).tolist()
    batch = collate(
        torch.randint(0, 80, (rows, 20), generator=g).tolist(),
        [torch.randint(0, 80, (n,), generator=g).tolist() for n in lengths],
        uids=[str(row) for row in range(rows)],
        rewards=[0.0] * rows,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -4.0 * batch.response_mask
    return batch


def our_step(engine: MegatronEngine, batch: TrainingBatch) -> None:
    engine.forward_backward(batch)
    engine.optim_step()


def bare_step(engine: MegatronEngine, batch: TrainingBatch) -> None:
    """The same micro-batches through Megatron's schedule with its own cross entropy, then the same optimizer."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from skyrl_megatron.runtime.forward_step import run_schedule

    def forward_step(iterator: Any, model: Any) -> Any:
        packed = next(iterator).packed
        logits = model(**packed.model_arguments())

        def loss(logits: Any) -> Any:
            per_token = vocab_parallel_cross_entropy(logits.transpose(0, 1).clone(), packed.targets[:, None])
            return per_token.sum() / 1000.0, torch.zeros((), dtype=torch.int), per_token.detach().sum()

        return logits, loss

    for chunk in engine.chunks:
        chunk.train()
    micro_batches = engine._micro_batches(batch, 1)
    run_schedule(forward_step, micro_batches, engine.chunks, engine.groups, forward_only=False)
    finalize_model_grads(engine.chunks, None, pg_collection=engine.groups.collection)
    engine.optimizer.step()
    engine.clear_gradients()


if __name__ == "__main__":
    main()
