"""What agents that flood the gateway cost the other agents.

    python benchmarks/run.py gateway_hostile [--trajectories 50] [--turns 6] [--engine-s 0.5]

Ordinary agents make calls over Chat Completions, each with its whole history, to a fake engine that answers after a
fixed time. At the same time one agent sends the same hostile request again and again, over eight connections: too many
tools, messages, items, samples, biases or stops, as many as are allowed, long text, unfinished bodies, or connections
that it holds through the relay of its sandbox. Printed is what an ordinary call took longer than the engine, without a
hostile agent (the rival) and with each. The clients are in a process of their own and share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from agent_gateway import ANSWER, TimedEngine, clients
from smoke import parse

CONTEXT = 32768
HOSTILE_CONNECTIONS = 8
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
UNFINISHED, HELD = "unfinished bodies", "1,000 connections held"


def bodies(size: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return hostile requests by name. ``size``: their number of tools; the other sizes are multiples of it."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema}} for n in range(size)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a"] * (size // 4)}}}
    said: Mapping[str, Any] = {"messages": [user]}
    return {
        "tools": (CHAT, {**said, "tools": tools}),
        "tools within the bound": (CHAT, {**said, "tools": tools[:1000]}),
        "messages": (CHAT, {"messages": [user, answer] * (size * 5 // 2)}),
        "messages within the bound": (CHAT, {"messages": [user, answer] * min(size // 4, 2000)}),
        "answers": (CHAT, {"messages": [user, *[answer] * (size * 5)]}),
        "items": (RESPONSES, {"input": [user, answer] * (size * 5 // 2)}),
        "items within the bound": (RESPONSES, {"input": [user, answer] * min(size // 4, 2000)}),
        "samples": (CHAT, {**said, "n": size // 2}),
        "samples within the bound": (CHAT, {**said, "n": 100}),
        "biases": (CHAT, {**said, "logit_bias": {str(n): 1 for n in range(size)}}),
        "stops": (CHAT, {**said, "stop": [f"x{n}" for n in range(size)]}),
        "words within the bound": (CHAT, {**said, "bad_words": [f"x{n}" for n in range(min(size, 250))]}),
        "schema": (CHAT, {**said, "response_format": form}),
        "text": (CHAT, {"messages": [{"role": "user", "content": "word " * size * 6}]}),
        "prompt of tokens": (COMPLETIONS, {"prompt": [5] * size * 5}),
        UNFINISHED: (CHAT, {}),
        HELD: ("", {}),
    }


def main() -> None:
    """Measure all, and print medians and 99th percentiles."""
    parser = argparse.ArgumentParser(description="What agents that flood the gateway cost the other agents.")
    parser.add_argument("--trajectories", type=int, default=50)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--engine-s", type=float, default=0.5, help="time of the engine for an answer")
    parser.add_argument("--size", type=int, default=20_000, help="number of tools; other sizes are multiples of it")
    parser.add_argument("--only", default="", help="part of the names of the hostile requests")
    args = parse(parser, trajectories=4, turns=2, engine_s=0.1, size=1200)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Serve the gateway, and run the ordinary agents and each hostile one."""
    from transformers import AutoTokenizer

    from skyrl_megatron.inference.vllm.wire_app import WireApp
    from skyrl_megatron.tiny_model import write_embedded_model
    from skyrl_megatron_agents.gateway import Gateway

    model = write_embedded_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    answer = tokenizer("the answer is " + "1" * (ANSWER - 15), add_special_tokens=False)["input_ids"]
    engine: Any = TimedEngine([*answer, tokenizer.eos_token_id], args.engine_s)
    wire = await WireApp.create(str(model), "policy", max_model_len=CONTEXT, tool_call_parser="hermes")
    gateway = Gateway(engine, wire, folder / "log", secret="s", model="policy", sampling={"max_tokens": ANSWER})
    await gateway.start()
    port, count = int(gateway.server.url.rpartition(":")[2]), 0

    async def ordinary() -> np.ndarray:
        nonlocal count
        count += 1
        opened = [gateway.open(f"t{count}-{number}").access for number in range(args.trajectories)]
        added: np.ndarray = await clients(args, port, [(f"{each.url}{CHAT}", each.key) for each in opened], tokens=0)
        return added

    await ordinary()  # the first calls compile the template
    rival = await ordinary()
    report("no hostile agent", rival, rival)
    worst = rival
    for number, (name, (path, body)) in enumerate(bodies(args.size).items()):
        if args.only not in name:
            continue
        access = gateway.open(f"hostile-{number}").access
        async with hostile_agent(name, port, f"/hostile-{number}{path}", access.key, {"model": "policy", **body}):
            found = await ordinary()
        report(name, found, rival)
        worst = max(worst, found, key=lambda added: float(np.percentile(added, 99)))
    await gateway.stop()
    print(f"ratio at p99, worst: {np.percentile(worst, 99) / np.percentile(rival, 99):.1f}")


def report(name: str, added: np.ndarray, rival: np.ndarray) -> None:
    """Print what calls took longer than the engine."""
    median, late = np.median(added), np.percentile(added, 99)
    ratio = late / np.percentile(rival, 99)
    print(f"{name:26s} {median:8.1f} ms added at the median, {late:8.1f} ms at p99 ({ratio:.1f} times)", flush=True)


@contextlib.asynccontextmanager
async def hostile_agent(name: str, port: int, path: str, key: str, body: Mapping[str, Any]) -> Any:
    """Run the hostile agent, as a process of its own, until the block ends."""
    from skyrl_megatron_agents.sandboxes.relay import Relay

    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    async with contextlib.AsyncExitStack() as stack:
        if name == HELD:
            listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            sandbox: Any = SimpleNamespace(name="hostile", listener=listener)
            relay = await stack.enter_async_context(Relay(sandbox, "127.0.0.1", port))
            port = int(relay.url.rpartition(":")[2])
        process = context.Process(target=flood, args=(name, port, path, key, json.dumps(body).encode(), ready))
        process.start()
        await asyncio.to_thread(ready.wait, 60)
        try:
            yield
        finally:
            process.terminate()
            await asyncio.to_thread(process.join, 30)


def flood(name: str, port: int, path: str, key: str, body: bytes, ready: Any) -> None:
    """Send a request again and again, or hold connections."""
    gc.disable()
    if name == HELD:
        held = []
        for _ in range(1000):
            made = socket.socket()
            made.setblocking(False)
            made.connect_ex(("127.0.0.1", port))
            held.append(made)
        ready.set()
        asyncio.run(asyncio.sleep(600))
    asyncio.run(_flood(name, port, path, key, body, ready))


async def _flood(name: str, port: int, path: str, key: str, body: bytes, ready: Any) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-length: "

    async def agent() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                if name == UNFINISHED:
                    writer.write(head.encode() + b"500000\r\n\r\n" + b" " * 499_000)
                    await writer.drain()
                    ready.set()
                    await reader.read()
                while name != UNFINISHED:
                    writer.write(head.encode() + f"{len(body)}\r\n\r\n".encode() + body)
                    await writer.drain()
                    ready.set()
                    length, more = 0, True
                    while (line := await reader.readline()) != b"\r\n":
                        if not line:
                            raise ConnectionResetError
                        more = more and b"close" not in line.lower()
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split(b":")[1])
                    await reader.readexactly(length)
                    if not more:
                        break
                writer.close()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(agent() for _ in range(HOSTILE_CONNECTIONS)))


if __name__ == "__main__":
    main()
