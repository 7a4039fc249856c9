"""A lost rank on the embedded job against the start of a rank, and what copies of the state cost a step.

    python benchmarks/run.py recovery [healing] [copies] [watch] [--tokens 8192] [--layers 8]

``healing``: the embedded job loses a policy rank in its fourth update. The time from its loss being known to the
repeated step's begin (``timing/heal``), over that of starting one rank with the same model, process and imports
included, in the same run. ``copies``: the 425 M-parameter model of ``weight_sync.py``, experts over two ranks. The
time of a copy with its way to the neighbour, over that of an update (pass and optimizer step) on ``--tokens`` tokens;
medians of the rounds. Two ranks and their copies take 19 GB; fewer ``--layers`` less, at much the same ratio.
``watch``: CPU seconds that the driver's threads spend on looking for stragglers, for memory that runs out and for
engines that are gone, over those of all processes of the run, in steps of the embedded job.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
LOST_AT, STEPS, ROUNDS, LENGTH, WATCHED = 3, 6, 3, 512, 12


def healing(home: Path) -> dict[str, float]:
    """Lose a rank in a run, and start one beside it."""
    import ray

    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.config.resolve import run_folder
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.trainer.callbacks import TrainerCallback
    from skyrl_megatron.workers.megatron_worker import MegatronWorker
    from skyrl_megatron_tools.embedded.embedded import arguments

    measured: dict[str, float] = {}

    class LoseOne(TrainerCallback):
        def on_step_start(self, trainer: Any) -> None:
            if trainer.global_step == LOST_AT:
                threading.Thread(target=self.lose, args=(trainer,), daemon=True).start()

        def lose(self, trainer: Any) -> None:
            while "policy_train" not in trainer.phases.so_far():
                time.sleep(0.01)
            os.kill(trainer.policy.ranks[1].pid, 9)

        def on_train_end(self, trainer: Any) -> None:
            policy = trainer.cfg.trainer.policy
            megatron = replace(policy.megatron_config, expert_model_parallel_size=1)
            placement = replace(trainer.cfg.trainer.placement, policy_num_gpus_per_node=1)
            alone = replace(trainer.cfg.trainer, policy=replace(policy, megatron_config=megatron), placement=placement)
            began = time.perf_counter()
            rank: Any = MegatronWorker.options(num_cpus=0).remote(0, 1)
            address = ray.get(rank.address.remote())
            ray.get(rank.build.remote(replace(trainer.cfg, trainer=alone), "policy", address, 100))
            measured["start"] = time.perf_counter() - began
            ray.kill(rank)

    class Experiment(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            trainer = super().get_trainer(*args, **kwargs)
            trainer.callbacks.append(LoseOne())
            return trainer

    os.environ["SKYRL_MEGATRON_HOME"] = str(home)
    keys = ["eval_interval=0", "ckpt_interval=0", "eval_before_train=false", f"max_training_steps={STEPS}"]
    keys += ["healing.enabled=true"]
    cfg, _ = load_config(SkyRLTrainConfig, arguments([f"trainer.{key}" for key in keys], local_hardware()))
    run_experiment(cfg, Experiment)
    lines = [json.loads(line) for line in (run_folder(cfg) / "metrics.jsonl").read_text().splitlines()]
    assert [line["trainer/healings"] for line in lines] == [float(line["step"] == LOST_AT + 1) for line in lines]
    measured["healing"] = sum(line.get("timing/heal", 0.0) for line in lines)
    return measured


def watch(home: Path) -> dict[str, float]:
    """Clock what watches a run, and the run."""
    import psutil

    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.inference.client import HealthMonitor
    from skyrl_megatron.inference.engine_pool import EngineSlot
    from skyrl_megatron.trainer.callbacks import TrainerCallback
    from skyrl_megatron.workers.worker_group import WorkerGroup
    from skyrl_megatron_observe.memory_forecast import MemoryForecast
    from skyrl_megatron_observe.stragglers import Stragglers
    from skyrl_megatron_tools.embedded.embedded import arguments

    clocked, used = [0.0], dict[int, float]()

    def clock(of: Any, name: str) -> None:
        work = getattr(of, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                clocked[0] += time.thread_time() - began

        setattr(of, name, timed)

    class Clocked:
        """A coroutine whose own CPU time is counted, not what others take while it waits."""

        def __init__(self, coroutine: Any) -> None:
            self.coroutine = coroutine

        def __await__(self) -> Any:
            steps, sent = self.coroutine.__await__(), None
            while True:
                began = time.thread_time()
                try:
                    waited = steps.send(sent)
                except StopIteration as end:
                    return end.value
                finally:
                    clocked[0] += time.thread_time() - began
                sent = yield waited

    check, probe, looks = HealthMonitor.check, EngineSlot.probe, [0]

    async def checked(self: HealthMonitor) -> None:
        await Clocked(check(self))

    async def probed(self: EngineSlot, timeout_s: float) -> Any:  # a task of its own
        looks[0] += 1
        return await Clocked(probe(self, timeout_s))

    HealthMonitor.check, EngineSlot.probe = checked, probed  # type: ignore[method-assign]
    for of, name in ((MemoryForecast, "check"), (Stragglers, "look"), (WorkerGroup, "take_own_seconds")):
        clock(of, name)

    def cpu_seconds() -> dict[int, float]:
        found = {}
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
        return found

    class Clock(TrainerCallback):
        def on_train_start(self, trainer: Any) -> None:
            clocked[0] = 0.0
            used.update(cpu_seconds())

        def on_train_end(self, trainer: Any) -> None:
            measured["watch"], measured["looks"] = clocked[0], looks[0]
            measured["run"] = sum(seconds - used.get(pid, 0.0) for pid, seconds in cpu_seconds().items())

    class Experiment(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            trainer = super().get_trainer(*args, **kwargs)
            trainer.callbacks.append(Clock())
            return trainer

    measured: dict[str, float] = {}
    os.environ["SKYRL_MEGATRON_HOME"] = str(home)
    keys = ["eval_interval=0", "ckpt_interval=0", "eval_before_train=false", f"max_training_steps={WATCHED}"]
    cfg, _ = load_config(SkyRLTrainConfig, arguments([f"trainer.{key}" for key in keys], local_hardware()))
    run_experiment(cfg, Experiment)
    return measured


def rank_of_two(rank: int, port: int, folder: str, tokens: int, pipe: Any) -> None:
    """One of two ranks: an update and a copy, some times; sends seconds and bytes."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.peer_checkpoint import PeerCheckpoints
    from skyrl_megatron.types import TrainingBatch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, 2, rank == 0), rank=rank, world_size=2)
    keys = {
        "trainer.policy.model.path": folder,
        "trainer.policy.megatron_config.expert_model_parallel_size": 2,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.max_tokens_per_microbatch": 4 * LENGTH,
    }
    engine = MegatronEngine(SkyRLTrainConfig.from_cli_overrides(keys), total_steps=100)
    rows = tokens // LENGTH // 2
    generator = torch.Generator().manual_seed(rank)
    sequences = torch.randint(0, engine.model.vocab_size, (rows, LENGTH), generator=generator)
    lengths = np.full(rows, LENGTH)
    mask = torch.ones(rows * (LENGTH - 16), dtype=torch.bool)
    uids = [str(n) for n in range(rows)]
    batch = TrainingBatch(sequences.flatten().int(), lengths, lengths - 16, mask, mask, uids)
    batch.advantages = torch.randn(mask.shape, generator=generator)
    batch.old_logprobs = batch.rollout_logprobs = torch.full(mask.shape, -7.0)
    copies, seconds = PeerCheckpoints(), dict[str, list[float]](update=[], copy=[])
    held = 0
    for _ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        engine.forward_backward(batch)
        engine.optim_step()
        dist.barrier()
        seconds["update"].append(time.perf_counter() - began)
        began = time.perf_counter()
        held = copies.keep(engine, 1)
        dist.barrier()
        seconds["copy"].append(time.perf_counter() - began)
    pipe.send(({name: statistics.median(times[1:]) for name, times in seconds.items()}, copies.own.nbytes, held))
    dist.barrier()


def copies(home: Path, tokens: int, sizes: dict[str, int]) -> dict[str, float]:
    """Time updates and copies in two ranks."""
    import skyrl_megatron.runtime.engine  # noqa: F401  (once, for both ranks)
    from benchmarks.step import large_model
    from benchmarks.weight_sync import LARGE
    from skyrl_megatron.workers.runtime_env import free_port

    folder, port = large_model(home / "large", {**LARGE, **sizes}), free_port()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=rank_of_two, args=(rank, port, str(folder), tokens, theirs)) for rank in range(2)]
    for each in ranks:
        each.start()
    theirs.close()
    found = [ours.recv() for _ in ranks]
    for each in ranks:
        each.join()
    seconds, nbytes, held = max(found, key=lambda each: float(each[0]["copy"]))
    return {**seconds, "nbytes": nbytes, "held": held}


def main() -> None:
    """Run the command."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("healing", "copies", "watch", []), metavar="PART")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    args = parse(parser, tokens=2 * LENGTH, layers=1)
    sizes = {"num_hidden_layers": args.layers}
    if args.smoke:
        sizes |= {"hidden_size": 256, "num_experts": 4, "moe_intermediate_size": 128}
    parts = args.parts or (["copies"] if args.smoke else ["copies", "healing", "watch"])
    with tempfile.TemporaryDirectory() as home:
        if "copies" in parts:
            got = copies(Path(home), args.tokens, sizes)
            print(
                f"copies: {got['copy']:.2f} s for {got['nbytes'] / 1e9:.2f} GB of a rank, sent to its neighbour too, "
                f"{got['copy'] / got['update']:.3f} of an update of {args.tokens} tokens ({got['update']:.1f} s); "
                f"{got['held'] / 1e9:.1f} GB are held a rank"
            )
        if "healing" in parts:
            got = healing(Path(home))
            print(
                f"healing: {got['healing']:.1f} s, {got['healing'] / got['start']:.2f} of the start of one rank "
                f"({got['start']:.1f} s)"
            )
        if "watch" in parts:
            got = watch(Path(home))
            print(
                f"watch: {1e3 * got['watch']:.1f} ms of {got['run']:.1f} s of the CPU in {WATCHED} steps, "
                f"{got['watch'] / got['run']:.5f} ({got['looks']:.0f} looks at engines)"
            )


if __name__ == "__main__":
    main()
