"""A gateway that is killed at any moment: clients that ask again lose no answer, and none is trained on twice."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from tests.agents.wires import write_folder

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.slow]
TRAJECTORIES = 4


class Conversation(threading.Thread):
    """A client that asks again until it is answered."""

    def __init__(self, url, key, turns):
        super().__init__(daemon=True)
        self.url, self.key, self.turns = url, key, turns
        self.answers, self.attempts, self.error = [], 0, None

    def run(self):
        messages = [{"role": "user", "content": "What is 3 + 4?"}]
        deadline = time.monotonic() + 500
        while len(self.answers) < self.turns and time.monotonic() < deadline:
            self.attempts += 1
            try:
                answer = httpx.post(
                    f"{self.url}/v1/chat/completions", json={"model": "policy", "messages": messages}, timeout=60,
                    headers={"x-api-key": self.key},
                )  # fmt: skip
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code != 200:
                self.error = answer.text
                return
            message = answer.json()["choices"][0]["message"]
            self.answers.append(message)
            messages += [{key: message[key] for key in ("role", "content")} | (
                {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            ), {"role": "user", "content": f"And {len(self.answers)}?"}]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "kills", "turns"),
    [(0, 6, 6), *(pytest.param(seed, 25, 12, marks=pytest.mark.full_matrix) for seed in (1, 2))],
)
def test_no_call_is_lost_and_none_is_trained_twice(tmp_path, seed, kills, turns):
    from skyrl_megatron_agents.call_log import CallLog
    from skyrl_megatron_agents.open_trajectory import Access, OpenTrajectory, restore_call
    from skyrl_megatron_agents.rows import rows_of

    rng, folder = random.Random(seed), write_folder(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.agents.gateway_lives", str(folder), str(tmp_path / "log"), str(port)]
    record = tmp_path / "record"
    process = subprocess.Popen(
        [*command, str(record)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    clients: list[Conversation] = []
    child = 0
    try:
        done = 0
        for life in range(kills + 1):
            last = life == kills
            # each life ends after a few events: an answer has four of them
            process.stdin.write(f"{0 if last else rng.randint(1, 4 * TRAJECTORIES * turns // kills)}\n")
            child = int(process.stdout.readline().split()[1])
            said = process.stdout.readline()
            if said == "ended\n":  # clients were answered, and killed it, before it said that it serves
                done += 1
                continue
            assert said == "ready\n"
            if not clients:
                for number in range(TRAJECTORIES):
                    key = _key(f"t{number}")
                    clients.append(Conversation(f"http://127.0.0.1:{port}/t{number}", key, turns))
                    clients[-1].start()
            if last:
                for client in clients:
                    client.join(500)
                os.kill(child, signal.SIGKILL)
            elif all(not client.is_alive() for client in clients):
                os.kill(child, signal.SIGKILL)
            else:
                done += 1
            assert process.stdout.readline() == "ended\n"
        assert not any(client.error for client in clients), [client.error for client in clients]
        assert [len(client.answers) for client in clients] == [turns] * TRAJECTORIES
        assert done >= kills // 2 and sum(client.attempts for client in clients) > TRAJECTORIES * turns
    finally:
        process.kill()
        process.wait(10)
        if child:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
    sampled = {(tuple(prompt), tuple(ids)) for prompt, ids in map(json.loads, record.read_text().splitlines())}
    log = CallLog(tmp_path / "log")
    log.close()
    for number, client in enumerate(clients):
        made = OpenTrajectory(f"t{number}", Access("", "", ""), {})
        _in_loop(lambda made=made, number=number: [restore_call(made, call) for call in log.stored[f"t{number}"]])
        graph = made.graph
        assert len(graph.calls) == turns and not graph.forks()
        assert [
            json.loads(call.answer)["choices"][0]["message"] for call in log.stored[f"t{number}"]
        ] == client.answers
        assert all((tuple(call.prompt_ids), tuple(call.generation.token_ids)) in sampled for call in graph.calls)
        (row,) = rows_of(graph)
        trained = row.response_ids[np.flatnonzero(row.loss_mask)].tolist()
        assert trained == [token for call in graph.calls for token in call.generation.token_ids]


def _key(name):
    import hashlib
    import hmac

    return "sk-" + hmac.new(b"s", name.encode(), hashlib.blake2s).hexdigest()


def _in_loop(function):
    import asyncio

    async def run():
        function()

    asyncio.run(run())
