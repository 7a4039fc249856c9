"""Run one full training step of a tiny model: ``skyrl-megatron one-step [--seed N] [--dir DIR]``

It uses a tiny seeded Qwen3-MoE, local Ray, one vLLM engine and two Megatron ranks (expert parallel). It samples,
scores, takes one GRPO step in Megatron's schedule, and syncs the weights to the engine. It checks that engine and
trainer give the same log-probs before the step and after the sync, and different ones in between.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.command import require_memory, run_command

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.types import TrainingBatch

RANKS, PROMPTS, SAMPLES = 2, 8, 4
AGREE = 1e-4
"""Largest allowed difference between two fp32 log-probs of the same token, nats."""
START_TIMEOUT_S, CALL_TIMEOUT_S = 600.0, 300.0
NEEDED_GIB = 6.0


@dataclass(frozen=True, slots=True)
class LogprobDifferences:
    """Largest |trainer − engine| over the log-probs of all sampled tokens, nats."""

    before: float
    """Before the step: both have the same weights."""
    unsynced: float
    """After the step, while the engine still has the old weights."""
    synced: float
    """After the step and the weight sync."""

    @property
    def as_expected(self) -> bool:
        """Whether both agree with the same weights, and disagree without the sync."""
        return self.before <= AGREE and self.synced <= AGREE < self.unsynced


def run(folder: Path, seed: int = 0) -> LogprobDifferences:
    """Run the step and print a line for each phase. Raises LaunchError, EngineError, WeightSyncError."""
    from skyrl_megatron.tiny_model import write_embedded_model
    from skyrl_megatron.trainer.console import StartUp
    from skyrl_megatron.workers.ray_setup import local_ray

    require_memory(NEEDED_GIB, "one step of the embedded model")
    phases = StartUp(partial(print, flush=True))
    model = write_embedded_model(folder / "model", seed)
    phases.done(f"model: {model}")
    with local_ray(slots=RANKS + 1 + 4):
        phases.done("ray: local, loopback, token")
        step = _Step(model, seed)
        try:
            step.start()
            phases.done(f"started: 1 vLLM engine, {RANKS} Megatron ranks (ep={RANKS})")
            batch = step.rollout()
            phases.done(f"rollout: {len(batch)} samples, {int(batch.response_mask.sum())} tokens")
            assert batch.rollout_logprobs is not None
            before = step.difference(batch, batch.rollout_logprobs)
            phases.done(f"log-probs before the step: largest difference {before:.1e}")
            metrics = step.train(batch)
            numbers = ", ".join(f"{name} {metrics[name]:.4f}" for name in ("policy_loss", "grad_norm", "lr"))
            phases.done(f"GRPO step: {numbers}")
            unsynced = step.difference(batch, step.engine_logprobs(batch))
            phases.done(f"log-probs without a sync: largest difference {unsynced:.1e}")
            megabytes, seconds = step.sync("1")
            phases.done(f"weight sync: {megabytes:.1f} MB in {seconds * 1e3:.0f} ms, checksums equal, version 1")
            synced = step.difference(batch, step.engine_logprobs(batch))
            phases.done(f"log-probs after the sync: largest difference {synced:.1e}")
        finally:
            step.stop()
    return LogprobDifferences(before, unsynced, synced)


class _Step:
    """The policy ranks, the engine, and the phases of the step."""

    def __init__(self, model: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        from skyrl_megatron import device
        from skyrl_megatron.config import SkyRLTrainConfig
        from skyrl_megatron.inference.client import InferenceClient
        from skyrl_megatron.inference.engine_pool import EnginePool
        from skyrl_megatron.inference.vllm.vllm_engine import EngineSettings
        from skyrl_megatron.workers.engines import RayEngine
        from skyrl_megatron.workers.placement import BundleAllocation, reserve
        from skyrl_megatron.workers.policy_rank import weight_synchronizer
        from skyrl_megatron.workers.worker_group import WorkerGroup

        self.seed = seed
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.cfg = SkyRLTrainConfig.from_cli_overrides(
            {
                "trainer.policy.model.path": str(model),
                "trainer.seed": seed,
                "trainer.placement.policy_num_gpus_per_node": RANKS,
                "trainer.placement.colocate_all": False,
                "generator.inference_engine.weight_sync_backend": device.collective_backend(),
                "trainer.policy.megatron_config.expert_model_parallel_size": RANKS,
                "trainer.policy.optimizer_config.lr": 1e-2,
                "trainer.algorithm.use_kl_loss": False,
                "trainer.max_tokens_per_microbatch": 512,
                "trainer.phase_timeout_s": CALL_TIMEOUT_S,
            }
        )
        settings = EngineSettings(
            str(model), dtype="float32", max_model_len=256, max_num_seqs=64, kv_cache_bytes=64 << 20, seed=seed
        )
        make: Any = partial(RayEngine, settings)
        self.pool = EnginePool([make], wait_s=CALL_TIMEOUT_S)
        self.client, self.runner = InferenceClient(self.pool), asyncio.Runner()
        group = reserve("the policy", [{"CPU": 1.0}] * RANKS)
        self.policy = WorkerGroup(self.cfg, "policy", BundleAllocation(group, tuple(range(RANKS))))
        self.weights = weight_synchronizer(self.cfg, self.policy, self.pool, dtype=settings.dtype)

    def start(self) -> None:
        self.policy.start_building()
        self._run(self.pool.start(), START_TIMEOUT_S)
        self.policy.finish_building()

    def rollout(self) -> TrainingBatch:
        """Sample answers to additions. The reward is the share of digits in a response."""
        from skyrl_megatron.algorithms.advantages import batch_advantages
        from skyrl_megatron.data.batch import collate
        from skyrl_megatron.data.tokenizer import render

        prompts, uids, sampling = [], [], []
        for prompt in range(PROMPTS):
            message = [{"role": "user", "content": f"{11 + 7 * prompt}+{23 + 5 * prompt}=?"}]
            ids = render(self.tokenizer, message, template=None, add_generation_prompt=True)["input_ids"]
            for sample in range(SAMPLES):
                seed = self.seed + 100 * prompt + sample
                prompts.append(ids)
                uids.append(f"prompt-{prompt}")
                sampling.append({"temperature": 1.0, "max_tokens": 8 + 4 * sample, "seed": seed})
        samples = self._run(self.client.generate(prompts, sampling))
        texts = [self.tokenizer.decode(sample.token_ids) for sample in samples]
        rewards = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]
        batch = collate(
            prompts,
            [sample.token_ids for sample in samples],
            uids=uids,
            rewards=rewards,
            rollout_logprobs=[sample.logprobs for sample in samples],
        )
        batch.advantages, batch.returns = batch_advantages(batch, "grpo", self.cfg.trainer.algorithm)
        return batch

    def engine_logprobs(self, batch: TrainingBatch) -> Tensor:
        """Return log-probs [R] under the engine's weights."""
        import torch

        rows = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
        out = torch.zeros(len(batch.response_mask))

        async def score() -> list[list[float]]:
            return await asyncio.gather(*(self.client.score(ids) for ids in rows))

        for row, scores in enumerate(self._run(score())):
            tokens = batch.responses.of(row)
            out[tokens] = torch.tensor(scores[len(scores) - (tokens.stop - tokens.start) :])
        return out

    def difference(self, batch: TrainingBatch, engine: Tensor) -> float:
        """Return the largest |trainer − engine| over the response tokens, nats."""
        difference = (self.policy.compute_logprobs(batch) - engine).abs() * batch.response_mask
        return float(difference.max())

    def train(self, batch: TrainingBatch) -> dict[str, float]:
        """Take an optimizer step with the trainer's own log-probs as the old ones."""
        batch.old_logprobs = self.policy.compute_logprobs(batch)
        return self.policy.train_mini_batch(self.policy.dispatch(batch))

    def sync(self, version: str) -> tuple[float, float]:
        """Sync the weights and return (megabytes, seconds). Raises WeightSyncError if a checksum differs."""
        report = self._run(self.weights.sync(version))
        return report.nbytes / 1e6, report.total_seconds

    def stop(self) -> None:
        """End the engine's processes. Ray ends the actors."""
        with self.runner:
            try:
                self._run(self.pool.shutdown(), 30)
            except Exception as error:
                print(f"the engine did not shut down: {error}", file=sys.stderr)

    def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        from skyrl_megatron.errors import DistributedError

        async def within() -> Any:
            async with asyncio.timeout(timeout_s):
                return await work

        try:
            return self.runner.run(within())
        except TimeoutError as error:
            raise DistributedError(
                f"no answer within {timeout_s:.0f} s: a worker hangs or the machine is overloaded: end other "
                "programs, and try again"
            ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if log-probs agree and differ as expected, else 1."""
    parser = argparse.ArgumentParser(prog="one_step", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of sampling (default 0)")
    parser.add_argument("--dir", type=Path, help="folder for the model (default: a temporary folder)")
    args = parser.parse_args(argv)

    def one_step() -> int:
        with tempfile.TemporaryDirectory(prefix="skyrl-megatron-") as temporary:
            result = run(args.dir or Path(temporary), args.seed)
        ok = "OK: log-probs agree with equal weights, and differ without the sync"
        print(ok if result.as_expected else f"FAILED: {result}")
        return 0 if result.as_expected else 1

    return run_command(one_step)


if __name__ == "__main__":
    sys.exit(main())
