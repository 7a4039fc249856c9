"""What routing replay costs: processor time of a training step, and tokens a second of an engine that returns routes.

    python benchmarks/run.py replay [--rounds 5] [--only step capture] [--large]

``step``: the model and the rows of ``lora.py`` (hidden size 1024, 32 experts top-4, 8 sequences of 1024 tokens), all
weights, in one process and thread. The rows come with the experts that the model would take itself, so that both sides
compute the same. Whole steps with and without are compared; what replay adds is far below what two such steps differ
by, so its own code (checks of the batch, packing of routes, and the choice in routers but for the model's own top-k)
is also timed by itself within them.

``capture``: two engines, one of which returns routes, take turns with the same prompts; the other one idles. Medians
of the rounds are compared. Both have ``rollout.py``'s model, or with ``--large`` ``weight_sync.py``'s of 425 M
parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import lora  # both make the package and the tests' support importable
import psutil
import rollout
import weight_sync

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import TrainingBatch

REPLAY = {"trainer__policy__megatron_config__moe_enable_routing_replay": True}


# ---------------------------------------------------------------------------------------------------------- step
class Stopwatch:
    """Processor seconds within some functions, but for those within others that they call."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **keywords)
            finally:
                self.seconds += sign * (time.process_time() - began)

        return call

    @contextmanager
    def around_replay(self) -> Iterator[None]:
        """Time the code of replay for the block."""
        from skyrl_megatron.runtime import engine, packed_inputs
        from skyrl_megatron.runtime import packed_inputs as batch_checks
        from skyrl_megatron.runtime.model.pass_inputs import RoutingReplay

        choose = RoutingReplay.get_replay_topk

        def without_the_models_own(
            replay: Any, scores: Any, topk: int, groups: int | None, group_topk: int | None, own: Callable[..., Any]
        ) -> Any:
            return choose(replay, scores, topk, groups, group_topk, self.timed(own, -1))

        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(RoutingReplay, "get_replay_topk", self.timed(without_the_models_own))
            )
            stack.enter_context(mock.patch.object(packed_inputs, "_routes", self.timed(packed_inputs._routes)))
            stack.enter_context(
                mock.patch.object(engine, "find_route_problem", self.timed(batch_checks.find_route_problem))
            )
            yield


def with_natural_routes(engine: MegatronEngine, batch: TrainingBatch) -> TrainingBatch:
    """Return the batch with the experts that the model takes, as of a pass over it."""
    import numpy as np
    import torch

    from skyrl_megatron.runtime.model.moe import TokenWeightedRouter

    chosen: list[torch.Tensor] = []
    routing = TokenWeightedRouter.routing

    def note(router: Any, *args: Any, **keywords: Any) -> Any:
        probs, routing_map = routing(router, *args, **keywords)
        chosen.append(routing_map.nonzero()[:, 1].view(len(routing_map), -1))
        return probs, routing_map

    with mock.patch.object(TokenWeightedRouter, "routing", note):
        engine.compute_logprobs(batch)
    layers = engine.model.config.num_layers
    passes = [torch.stack(chosen[start : start + layers], 1) for start in range(0, len(chosen), layers)]
    rows = torch.cat(passes).view(len(batch), lora.TOKENS, layers, -1).numpy().astype(np.uint8)
    return dataclasses.replace(batch, rollout_routes=[row[:-1] for row in rows])


def time_steps(rounds: int) -> None:
    """Print what replay adds to a step."""
    with tempfile.TemporaryDirectory() as folder:
        model = lora.write_model(Path(folder) / "model")
        lora.one_process()
        engines = lora.built(
            {
                "natural": partial(lora.build, "full", model, 0),
                "replayed": partial(lora.build, "full", model, 0, **REPLAY),
            }
        )
        batch = lora.make_batch()
        batches = {"natural": batch, "replayed": with_natural_routes(engines["natural"], batch)}
        watch = Stopwatch()
        with watch.around_replay():
            best = lora.race(engines, batches, rounds)
    own = watch.seconds / (rounds + 1)
    print(f"step with replay: {best['replayed'][1] / best['natural'][1]:.3f} of the step without")
    print(f"replay's own code: {own:.3f} s a step, {own / best['natural'][1]:.2%} of it (wanted: at most 3 %)")


# ------------------------------------------------------------------------------------------------------- capture
def serve(pipe: Any, model: Path, routes: bool) -> None:
    """Sample what the pipe asks for; answer with tokens, seconds and bytes of routes."""
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    async def work() -> None:
        settings = dataclasses.replace(rollout.settings_of(model), enable_return_routed_experts=routes)
        pool = EnginePool([lambda: VLLMEngine(settings)])
        await pool.start()
        gc.collect()
        gc.freeze()  # as the engine's actor does
        client = InferenceClient(pool)
        pipe.send("up")
        while (count := await asyncio.to_thread(pipe.recv)) is not None:
            prompts, sampling = rollout.prompts_and_sampling("long", count)
            began, used = time.perf_counter(), processor_time()
            answers = await client.generate(prompts, sampling)
            seconds = time.perf_counter() - began
            used = {name: after - used[name] for name, after in processor_time().items()}
            sizes = [a.routed_experts.nbytes for a in answers if a.routed_experts is not None]
            pipe.send((sum(len(a.token_ids) for a in answers), seconds, sum(sizes), used))
        await pool.shutdown()

    asyncio.run(work())


def processor_time() -> dict[str, float]:
    """Seconds of the processor that the client, the engine's core and its worker have used."""
    here = psutil.Process()
    used = {"client": sum(here.cpu_times()[:2]), "core": 0.0, "worker": 0.0}
    for process in here.children(recursive=True):
        name = " ".join(process.cmdline()[:1])
        for part, title in (("core", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
            used[part] += sum(process.cpu_times()[:2]) if name.startswith(title) else 0.0
    return used


def time_capture(rounds: int, requests: int, sizes: dict[str, Any]) -> None:
    """Print the rates of both engines, and where the processor's time goes."""
    from tests.support.tiny_models import write_tiny_model

    context = multiprocessing.get_context("spawn")
    sides: dict[bool, Any] = {}
    rates: dict[bool, list[float]] = {False: [], True: []}
    parts: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model("qwen3_moe", Path(folder) / "model", **sizes)
        for routes in (False, True):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, model, routes))
            process.start()
            if not pipe.poll(600) or pipe.recv() != "up":
                raise SystemExit(f"routes={routes}: the engine did not start")
            sides[routes] = pipe, process
        for number in range(rounds + 1):
            for routes, (pipe, _) in sides.items():
                pipe.send(requests)
                tokens, seconds, nbytes, used = pipe.recv()
                size = nbytes or size
                if number:  # the first warms up
                    rates[routes].append(tokens / seconds)
                    parts[routes].append({name: spent / tokens for name, spent in used.items()})
        for pipe, process in sides.values():
            pipe.send(None)
            process.join(30)
            process.kill()
    medians = {routes: statistics.median(values) for routes, values in rates.items()}
    print(
        f"{requests} requests: {medians[True]:.0f} tokens/s with routes ({size / requests / 1e3:.1f} kB a sample), "
        f"{medians[False]:.0f} without, ratio {medians[True] / medians[False]:.3f} (wanted: at least 0.95)"
    )
    for name in parts[True][0]:
        without, along = (statistics.median(each[name] for each in parts[side]) * 1e6 for side in (False, True))
        print(f"  {name}: {along:.0f} us of the processor a token with routes, {without:.0f} without")


def main() -> None:
    """Run what is asked for."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--large", action="store_true", help="capture on a model of 425 M parameters")
    parser.add_argument("--only", nargs="+", choices=["step", "capture"], default=["step", "capture"])
    args = parse(parser, rounds=1, requests=8, only=["capture"])
    if "step" in args.only:
        time_steps(args.rounds)
    if "capture" in args.only:
        time_capture(args.rounds, args.requests, weight_sync.LARGE if args.large else rollout.MODEL)


if __name__ == "__main__":
    main()
