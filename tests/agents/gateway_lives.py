"""``python -m tests.agents.gateway_lives MODEL LOG PORT RECORD``: gateways that die (SIGKILL) at a given event.

A line ``NUMBER`` on stdin starts one in a forked process, which dies at that event; 0: never. It prints ``ready`` once
it serves, and ``ended`` when it is gone. Events are: an answer is sampled, is about to be logged, is on disk, is sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import skyrl_megatron_agents.gateway as agents
from skyrl_megatron.inference.vllm import wire_app  # noqa: F401  imported once, before the forks
from tests.agents.wires import Scripted, make_wire


def live(folder: str, log: str, port: int, record: str, die_at: int) -> None:
    from transformers import AutoTokenizer

    events = 0

    def event() -> None:
        nonlocal events
        events += 1
        if events == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    class Client(Scripted):
        async def generate(self, prompts, sampling, sessions=None, adapters=None):
            made = await super().generate(prompts, sampling, sessions)
            with open(record, "a") as file:
                for prompt, one in zip(prompts, made, strict=True):
                    file.write(json.dumps([list(prompt), one.token_ids]) + "\n")
            event()
            return made

    async def serve() -> None:
        wire = await make_wire(folder)
        client = Client(AutoTokenizer.from_pretrained(folder), seed=os.getpid())
        gateway = agents.Gateway(client, wire, log, secret="s", model="policy", sampling={"logprobs": 0}, port=port)
        add, answer_to = gateway.log.add, gateway.answer_to

        async def add_and_count(call):
            event()
            await add(call)
            event()

        async def answer_and_count(*arguments, **keys):
            made = await answer_to(*arguments, **keys)
            made.done.add_done_callback(lambda _: event())
            return made

        gateway.log.add, gateway.answer_to = add_and_count, answer_and_count
        for number in range(4):
            gateway.open(f"t{number}")
        await gateway.start()
        print("ready", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    model, calls, number, samples = sys.argv[1:]
    for line in sys.stdin:
        child = os.fork()
        if not child:
            live(model, calls, int(number), samples, int(line))
        print(f"pid {child}", flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
