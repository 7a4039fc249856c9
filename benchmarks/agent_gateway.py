"""What the capture gateway adds to a call, with many trajectories at once.

    python benchmarks/run.py agent_gateway [--trajectories 1000] [--turns 4] [--engine-s 8]

Every trajectory is an agent with four calls over Chat Completions, each with the whole history. The engine is a fake
that answers after a fixed time with 24 scripted tokens, so that what is added can be measured: the time of a call at
the client, minus that time. The clients are in a process of their own and share the cores. The rival is the run's
plain endpoint of token requests (``/inference/v1/generate``) with the same engine, prompts and clients: no template,
no parsing, no record. Processor time per call does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from smoke import parse

from skyrl_megatron.inference.protocol import Generation

ANSWER = 24


class TimedEngine:
    """Answers after ``seconds`` with the same tokens. Also the client of the plain endpoint."""

    def __init__(self, answer: Sequence[int], seconds: float) -> None:
        self.answer, self.seconds = list(answer), seconds

    async def generate(
        self, prompts: Sequence[Any], sampling: Any, sessions: Any = None, adapters: Any = None
    ) -> list[Generation]:
        """See ``InferenceClient.generate``."""
        await asyncio.sleep(self.seconds)
        ids = self.answer
        return [Generation(list(ids), [-0.5] * len(ids), "stop", [("1", 0, len(ids))]) for _ in prompts]

    async def sample(self, prompt: Any, sampling: Any, session: Any = None, adapter: str = "") -> Generation:
        """See ``InferenceClient.sample``."""
        return (await self.generate([prompt], sampling))[0]

    @property
    def pool(self) -> Any:
        """See ``InferenceClient.pool``."""
        return type("Pool", (), {"published": "1"})


def main() -> None:
    """Measure both, and print medians and 99th percentiles."""
    parser = argparse.ArgumentParser(description="What the capture gateway adds to a call.")
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--engine-s", type=float, default=8.0, help="time of the engine for an answer")
    args = parse(parser, trajectories=8, turns=2, engine_s=0.2)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Serve the gateway and the rival in turn, with the same clients."""
    from transformers import AutoTokenizer

    from skyrl_megatron.inference.vllm.wire_app import WireApp
    from skyrl_megatron.tiny_model import write_embedded_model
    from skyrl_megatron_agents.gateway import Gateway
    from skyrl_megatron_agents.http_endpoint import HttpServer, build_app

    model = str(write_embedded_model(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    answer = tokenizer("the answer is " + "1" * (ANSWER - 15), add_special_tokens=False)["input_ids"]
    engine: Any = TimedEngine([*answer, tokenizer.eos_token_id], args.engine_s)
    wire = await WireApp.create(model, "policy", max_model_len=1024)
    gateway = Gateway(engine, wire, folder / "log", secret="s", model="policy", sampling={"max_tokens": ANSWER})
    await gateway.start()
    accesses = [gateway.open(f"t{number}").access for number in range(args.trajectories)]
    targets = [(f"{access.url}/v1/chat/completions", access.key) for access in accesses]
    port = int(gateway.server.url.rpartition(":")[2])
    before = time.process_time()
    captured = await clients(args, port, targets, tokens=0)
    cpu_ms = (time.process_time() - before) / len(captured) * 1e3
    metrics = gateway.counts.metrics()
    await gateway.stop()
    server = HttpServer(build_app(engine, "policy", "token"), "127.0.0.1", 0)
    await server.start()
    plain = [(f"{server.url}/inference/v1/generate", "token")] * args.trajectories
    rival = await clients(args, int(server.url.rpartition(":")[2]), plain, tokens=len(tokenizer.get_vocab()))
    await server.stop()
    for name, added in (("gateway", captured), ("plain tokens", rival)):
        print(f"{name}: {np.median(added):.2f} ms added at the median, {np.percentile(added, 99):.2f} ms at p99")
    rate, calls = metrics["agents/token_in_rate"], int(metrics["agents/calls"])
    print(f"{calls} calls of {args.trajectories} trajectories at once, token-in rate {rate:.4f}")
    print(
        f"in the gateway itself: {metrics['agents/own_ms_median']:.2f} ms, p99 {metrics['agents/own_ms_p99']:.2f} ms"
    )
    print(f"processor time of the server: {cpu_ms:.2f} ms per call")
    print(f"ratio at the median: {np.median(captured) / np.median(rival):.2f}")


async def clients(args: argparse.Namespace, port: int, targets: list[tuple[str, str]], tokens: int) -> np.ndarray:
    """Return the milliseconds that each call took longer than the engine. ``tokens``: vocabulary of token requests;
    0: messages."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (queue, port, targets, args.turns, args.engine_s, tokens)
    process = context.Process(target=run_clients, args=arguments)
    process.start()
    found = await asyncio.to_thread(queue.get)
    process.join()
    return np.asarray(found)


def run_clients(
    queue: Any, port: int, targets: list[tuple[str, str]], turns: int, engine_s: float, tokens: int
) -> None:
    """Run all agents in this process, whose garbage collections would count as time of the server."""
    gc.disable()
    queue.put(asyncio.run(_agents(port, targets, turns, engine_s, tokens)))


async def _agents(port: int, targets: list[tuple[str, str]], turns: int, engine_s: float, tokens: int) -> list[float]:
    each = [
        _agent(port, *target, number / len(targets) * engine_s, turns, engine_s, tokens)
        for number, target in enumerate(targets)
    ]
    return [value for values in await asyncio.gather(*each) for value in values]


async def _agent(
    port: int, url: str, key: str, wait_s: float, turns: int, engine_s: float, tokens: int
) -> list[float]:
    """Make the calls of one agent, who begins after ``wait_s``. Sockets without a library: it would cost more than the
    gateway."""
    await asyncio.sleep(wait_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Mapping[str, str]] = [{"role": "user", "content": "What is 12 + 34?"}]
    prompt, added = [token % tokens for token in range(20)] if tokens else [], []
    path = "/" + url.split("/", 3)[3]
    for turn in range(turns):
        asked: dict[str, Any] = {"model": "policy"}
        asked |= {"token_ids": prompt, "sampling_params": {}} if tokens else {"messages": messages}
        body = json.dumps(asked).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        content = await reader.readexactly(length)
        added.append((time.perf_counter() - started - engine_s) * 1e3)
        if b" 200 " not in status:
            raise SystemExit(f"{status!r}: {content[:300]!r}")
        choice = json.loads(content)["choices"][0]
        if tokens:
            prompt = [*prompt, *choice["token_ids"]]
        else:
            messages = [
                *messages,
                {"role": "assistant", "content": choice["message"]["content"]},
                {"role": "user", "content": f"And {turn}?"},
            ]
    writer.close()
    return added


if __name__ == "__main__":
    main()
