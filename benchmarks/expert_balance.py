"""Micro-batches levelled by expert against the plan by tokens alone: load of EP ranks, planning time, time of a step.

    python benchmarks/run.py expert_balance [--only plan step recorded] [--zipf 1.0 1.2 1.5] [--dump FILE ...]

``plan``: made routes of 4,096 sequences (lognormal lengths, at most 8,000 tokens) on 8 replicas that share 128 experts
over EP 8, micro-batches of at most 16,384 tokens, 8 experts per token, drawn without replacement with weights
1 / rank^s (Zipf). ``likings`` is the number of different orders of popularity: 4096 gives each sequence its own, 64
one to every 64 prompts' topic, 1 the same to all. Printed are the busiest EP rank's tokens over the mean, with both
plans and at the bound that no choice of micro-batches can pass (``experts/levelling.py`` has the proof): with one
liking for all, only moving experts helps. The time is processor time of one rank, which plans for all
replicas.

``step``: a training step of two EP ranks on CPU. The rows of a micro-batch, as they come, all need the experts of one
rank. Rounds of both plans alternate; the fastest are compared. It needs two idle processors.

``recorded``: the same figures from the routes of ``--dump``: batches that a run with routing replay wrote with
``trainer.dump_data_batch=true``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from skyrl_megatron.data.splitting import pack_by_tokens, split_for_dp, split_to_count
from skyrl_megatron_parts.experts.levelling import Imbalance, ReplicaRows, balance_experts, rank_loads

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

EXPERTS, RANKS, TOPK, CAP = 128, 8, 8, 16_384
WORK = 8.0
"""FLOPs of a layer outside of its experts, in those of one token in one expert: about that of Qwen3-30B-A3B."""


# ----------------------------------------------------------------------------------------------------------- plan
def made_loads(lengths: np.ndarray, layers: int, zipf: float, likings: int, seed: int = 0) -> np.ndarray:
    """Return the tokens of each sequence that go to each EP rank, [n, layers, RANKS]."""
    rng = np.random.default_rng(seed)
    weights = -zipf * np.log(np.arange(1, EXPERTS + 1))
    drawn = np.argpartition(-(rng.gumbel(size=(4000, EXPERTS)) + weights), TOPK, 1)[:, :TOPK]  # without replacement
    visits = np.bincount(drawn.ravel(), minlength=EXPERTS) / drawn.size
    liking = rng.integers(likings, size=len(lengths)) if likings < len(lengths) else np.arange(len(lengths))
    loads = np.zeros((len(lengths), layers, RANKS), np.int64)
    for layer in range(layers):
        order = np.argsort(rng.random((min(likings, len(lengths)), EXPERTS)), axis=1)
        share = visits[order].reshape(len(order), RANKS, -1).sum(-1)
        loads[:, layer] = rng.multinomial(lengths * TOPK, share[liking] / share[liking].sum(-1, keepdims=True))
    return loads


def rows_of(lengths: np.ndarray, loads: np.ndarray, replicas: int, cap: int) -> list[ReplicaRows]:
    """Split the sequences over replicas and plan each by tokens, as training does."""
    work = (loads.shape[1] * WORK * lengths * (1 + lengths / 16_000)).astype(np.int64)
    shares = split_for_dp(work.astype(np.float64), replicas)
    plans = [pack_by_tokens(lengths[own], cap) for own in shares]
    count = max(map(len, plans))
    return [
        ReplicaRows(split_to_count(plan, lengths[own], count), lengths[own], work[own], loads[own])
        for plan, own in zip(plans, shares, strict=True)
    ]


def timed(replicas: list[ReplicaRows], cap: int, rounds: int) -> tuple[Imbalance, float, float]:
    """Return (imbalance, least processor seconds of the plan by experts, of the plan by tokens alone)."""
    found, ours, plain = None, [], []
    for _ in range(rounds):
        began = time.process_time()
        _, found = balance_experts(replicas, max_tokens=cap)
        ours.append(time.process_time() - began)
        began = time.process_time()
        for each in replicas:
            pack_by_tokens(each.tokens, cap)
        plain.append(time.process_time() - began)
    assert found is not None
    return found, min(ours), min(plain)


def described(found: Imbalance) -> str:
    """Return the figures of a plan as text."""
    gained = (found.plain - found.balanced) / max(found.plain - found.bound, 1e-9)
    return (
        f"max/mean {found.plain:.3f} by tokens, {found.balanced:.3f} levelled, bound {found.bound:.3f} "
        f"({gained:.0%} of what is possible), expert time {found.plain / found.balanced:.3f}x"
    )


def plan(sequences: int, exponents: list[float], layers: list[int], rounds: int) -> None:
    """Print the loads of made routes."""
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(7.2, 0.7, sequences)), 8000).astype(np.int64) + 16
    for zipf in exponents:
        for likings in (sequences, 64, 1):
            for depth in layers:
                replicas = rows_of(lengths, made_loads(lengths, depth, zipf, likings), RANKS, CAP)
                found, ours, plain = timed(replicas, CAP, rounds)
                print(
                    f"Zipf {zipf}, {likings} likings, {depth} layers: {described(found)}; "
                    f"{ours * 1e3:.0f} ms (by tokens {plain * 1e3:.0f} ms)"
                )


# ----------------------------------------------------------------------------------------------------------- step
def routed_batch(rows: int, tokens: int, choose: Callable[[np.random.Generator, int], np.ndarray]) -> TrainingBatch:
    """Return rows of random tokens whose experts are ``choose(random, row)``, [tokens − 1, 2, 2]."""
    import torch

    from skyrl_megatron.data.batch import collate

    g, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    ids = torch.randint(0, 512, (rows, tokens), generator=g).tolist()
    batch = collate([r[:8] for r in ids], [r[8:] for r in ids], uids=list(map(str, range(rows))), rewards=[0.0] * rows)
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -6.0 * batch.response_mask
    batch.rollout_routes = [choose(rng, row).astype(np.uint8) for row in range(rows)]
    return batch


def two_rank_engine(model: str, micro_batch: int, **settings: Any) -> MegatronEngine:
    """Return the engine of one of two EP ranks that replay routes. ``settings``: of ``megatron_config``."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    settings |= {"expert_model_parallel_size": 2, "moe_enable_routing_replay": True}
    return MegatronEngine(
        SkyRLTrainConfig.from_cli_overrides(
            {
                "trainer.policy.model.path": model,
                "trainer.algorithm.use_kl_loss": False,
                "trainer.gradient_checkpointing": False,
                "trainer.bf16": False,
                "trainer.micro_train_batch_size_per_gpu": micro_batch,
                "trainer.placement.policy_num_gpus_per_node": 2,
                **{f"trainer.policy.megatron_config.{name}": value for name, value in settings.items()},
            }
        )
    )


def on_two_ranks(race: Callable[..., Any], rounds: int, smoke: bool) -> Any:
    """Run ``race(model, rows, tokens, rounds)`` on two ranks and return what rank 0 found. Most of the time of a step
    of the model, which has 8 experts, is that of its experts."""
    import tempfile

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.rank_pool import RankPool

    width = 64 if smoke else 512
    sizes = dict(
        vocab_size=512,
        hidden_size=width,
        moe_intermediate_size=4 * width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=8,
        num_experts_per_tok=2,
    )
    rows, tokens = (16, 32) if smoke else (32, 256)
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, **sizes)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            return pool(2, race, folder, rows, tokens, rounds, timeout_s=800)[0]
    finally:
        pool.close()


def race(model: str, rows: int, tokens: int, rounds: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Return (seconds of steps by tokens alone, levelled, metrics of a levelled one). Runs on each of two ranks.

    The first half of the rows need experts 0 to 3, those of EP rank 0, the others 4 to 7.
    """
    import torch.distributed as dist

    def choose(rng: np.random.Generator, row: int) -> np.ndarray:
        return rng.random((tokens - 1, 2, 4)).argsort(-1)[..., :2] + 4 * (row >= rows // 2)

    engine = two_rank_engine(model, 2, moe_balance_experts=True)
    batch, parts = routed_batch(rows, tokens, choose), engine.parts
    others = [part for part in parts if part.name != "expert_balance"]
    part = batch.select(range(engine.dp_rank, rows, 2))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    metrics: dict[str, float] = {}
    for number in range(rounds + 1):
        for levelled in (False, True):
            engine.parts = parts if levelled else others
            dist.barrier()
            began = time.perf_counter()
            found = engine.forward_backward(part)
            engine.optim_step()
            dist.barrier()
            if number:  # the first warms up
                seconds[levelled].append(time.perf_counter() - began)
            metrics = found if levelled else metrics
    return seconds[False], seconds[True], metrics


def step(rounds: int, smoke: bool) -> None:
    """Print the time of a training step with planted skew."""
    plain, levelled, metrics = on_two_ranks(race, rounds, smoke)
    kinds = [f"{metrics[f'moe_microbatch_imbalance{kind}']:.2f}" for kind in ("_plain", "", "_bound")]
    print(
        f"step, EP 2, one rank's rows together: max/mean {kinds[0]} by tokens, {kinds[1]} levelled, bound {kinds[2]}"
    )
    print(f"    {min(plain):.3f} s by tokens, {min(levelled):.3f} s levelled: {min(plain) / min(levelled):.2f}x")
    print(f"    planning {metrics['moe_balance_s'] * 1e3:.0f} ms of a step (wanted: at least 1.25x)")


# ------------------------------------------------------------------------------------------------------- recorded
def recorded(files: list[Path], rounds: int) -> None:
    """Print the loads of recorded routes, for each EP degree that divides the experts."""
    from skyrl_megatron_observe.dump import read_dump

    for file in files:
        batch, _ = read_dump(file)
        known = [routes for routes in batch.rollout_routes if routes is not None and len(routes)]
        if not known:
            raise SystemExit(f"{file}: the batch has no routes; its run needs moe_enable_routing_replay")
        layers, experts = known[0].shape[1], 1 << max(int(routes.max()) for routes in known).bit_length()
        lengths = batch.lengths
        cap = max(int(lengths.max()) * 2, int(lengths.sum()) // 16)
        for ranks in (2, 4, 8):
            if len(lengths) >= ranks and experts % ranks == 0:
                table = np.tile(np.arange(experts) // (experts // ranks), (layers, 1))
                loads = rank_loads(batch.rollout_routes, lengths, range(layers), table)
                replicas = rows_of(lengths, loads, ranks, cap)
                found, ours, _ = timed(replicas, cap, rounds)
                sizes = f"{len(lengths)} rows, {experts} experts, EP {ranks}"
                print(f"{file.name}: {sizes}: {described(found)}; {ours:.3f} s")


def main() -> None:
    """Run what is asked for."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["plan", "step", "recorded"], default=["plan", "step"])
    parser.add_argument("--zipf", nargs="+", type=float, default=[1.0, 1.2, 1.5])
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 4, 48])
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dump", nargs="+", type=Path, default=[], help="batches of a run: dump_data_batch=true")
    args = parse(parser, sequences=256, zipf=[1.2], layers=[2], rounds=1)
    if "plan" in args.only:
        plan(args.sequences, args.zipf, args.layers, args.rounds)
    if "step" in args.only:
        step(args.rounds, args.smoke)
    if "recorded" in args.only or args.dump:
        recorded(args.dump, args.rounds)


if __name__ == "__main__":
    main()
