"""Engines that were started elsewhere join and leave a pool: real vLLM servers, and real weight syncs to them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.engines import largest_gap, reference_logprobs
from tests.support.tiny_models import write_tiny_model
from tests.tools.fleet_parts import Command, HeldTransfer, Load, Run, server
from tests.weight_sync.trainer_process import TrainerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(40)]
LONG = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tiny_moe, tmp_path_factory):
    """Models A and B of the same shape, and one of another."""
    return tiny_moe | {"other": write_tiny_model("olmoe", tmp_path_factory.mktemp("other"))}


@pytest.fixture(scope="module")
def trainer():
    trainer = TrainerProcess()
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def run(engines, trainer, models, tmp_path_factory):
    run = Run(engines, trainer, models["A"], tmp_path_factory.mktemp("run"))
    yield run
    run.close()


async def until(true, within_s=120.0):
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.05)


def scores(run, name):
    """The engine's own log-probs of TOKENS."""
    slot = run.fleet.members[name].slot
    return run.loop(slot.engine.score(TOKENS))


def test_an_engine_joins_and_leaves_under_load(run, models, tmp_path):
    """It gets the published weights, not those of its folder, before it answers anything; one sync later it has the
    next version; nobody without its key is answered; it leaves with its requests finished, and every request has one
    answer."""
    import httpx

    run.sync("1", models["B"])
    command = Command(run, tmp_path)
    try:
        command.until("server: ")
        load = Load(run, TOKENS, LONG)
        name = command.until("joining").partition(":")[0]
        entry = run.until(name, "serving")
        assert entry["version"] == "1" and name == "engine-1"
        assert largest_gap(scores(run, name), reference_logprobs(models["B"], TOKENS)) <= 1e-5
        report = run.sync("2", models["A"])
        assert not report.failures and sorted(report.logprob_diffs) == ["engine 0", "engine 1"]
        assert largest_gap(scores(run, name), reference_logprobs(models["A"], TOKENS)) <= 1e-5
        command.until(f"{name}: serving")
        answered = run.engines()[name]["answered"]
        run.loop(until(lambda: run.fleet.members[name].slot.answered > answered + 8))
        for path in ("/collective_rpc", "/pause", "/v1/completions"):
            assert httpx.post(run.fleet.members[name].request.url + path, json={}).status_code == 401
        assert command.end() == 0, command.err()
    finally:
        command.process.kill()
    answers = load.end()
    assert {len(answer.token_ids) for answer in answers} == {200}
    assert {version for answer in answers for version, _, _ in answer.versions} == {"1", "2"}
    entry = run.engines()[name]
    assert entry["state"] == "left" and entry["moved"] == 0 and entry["answered"] > 8
    assert command.lines[-1] == f"{name}: left after {entry['answered']} requests, 0 moved to others"
    assert run.said[-1].startswith("engine 1 (http://127.0.0.1:") and run.said[-1].endswith(
        "left, 0 requests moved to others"
    )
    assert [slot.name for slot in run.pool.slots] == ["engine 0"]


@pytest.fixture
def command(run, capsys):
    """``command(*arguments)`` → (exit code, what it says on stderr), for engines that never start."""
    from skyrl_megatron_tools.remote import serve_engine

    def command(**changes):
        arguments = {"model": run.model, "registry": run.url, "token-file": run.token_file, "patience": 1} | changes
        code = serve_engine.main([f"--{key}={value}" for key, value in arguments.items()])
        return code, capsys.readouterr().err.strip()

    return command


def test_an_engine_that_cannot_join_starts_nothing(run, models, command, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong\n")
    rejected = f"--token-file={wrong}: the run at {run.url} does not accept this token: copy its file registry_token"
    assert command(**{"token-file": wrong}) == (1, rejected)
    missing = tmp_path / "missing"
    code, said = command(**{"token-file": missing})
    assert code == 1 and said.startswith(
        f"--token-file={missing}: No such file or directory; give a copy of the run's"
    )
    code, said = command(model=models["other"])
    assert code == 1 and said.startswith("the model differs: ") and " in the run" in said and "\n" not in said
    assert said.endswith("start the engine with the run's model")
    code, said = command(model=tmp_path / "nowhere")
    assert code == 1 and f"{tmp_path}/nowhere: no readable config.json" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = command(port=port)
        assert code == 1 and said.startswith(f"--port={port}: cannot listen on 127.0.0.1: Address already in use")
    for words, told in (
        ({"nodes": 2, "node-rank": 2}, "--node-rank=2: with --nodes=2, give 0 to 1"),
        ({"nodes": 2, "tp": 3}, "--nodes=2 does not divide the 3 workers (--tp times --pp)"),
        ({"nodes": 2, "tp": 2}, "--port is missing: the engine's other hosts connect to it"),
        ({"nodes": 2, "tp": 2, "node-rank": 1}, "--first is missing: give the address of the engine's server"),
        ({"nodes": 2, "tp": 2, "node-rank": 1, "first": "n1:9000"}, "--first=n1:9000 is not http://HOST:PORT: give"),
    ):
        code, said = command(**words)
        assert code == 1 and said.startswith(told) and "\n" not in said
    code, said = command(registry=f"http://127.0.0.1:{port}")
    assert code == 1 and said.startswith(f"--registry=http://127.0.0.1:{port}: no answer for 1 s (")
    assert "enable_registry=true" in said


def test_the_registry_refuses(run, models):
    import json

    from skyrl_megatron_tools.remote.fleet import package_versions
    from tests.support.rank_pool import free_port

    assert run.ask(token="wrong")[0] == 401
    assert run.ask("PUT", "/engines/engine-99")[0] == 404
    assert run.ask("DELETE", "/engines/engine-99")[0] == 404
    status, answer = run.ask("POST", "/engines", {"url": "http://127.0.0.1:1"})
    assert status == 400 and answer["error"]["message"] == "model=None: must be a dict"
    model = json.loads((models["A"] / "config.json").read_text())
    url = f"http://127.0.0.1:{free_port()}"
    offer = {"url": url, "model": model, "versions": package_versions(), "dtype": "float32", "workers": 1}

    def refused(**changes):
        status, answer = run.ask("POST", "/engines", offer | changes)
        assert status == 409
        return answer["error"]["message"]

    assert refused(dtype="bfloat16").endswith("dtype bfloat16: the run's engines compute in float32")
    assert "vllm is 0.1 on the engine's host, but" in refused(versions=package_versions() | {"vllm": "0.1"})
    assert "num_hidden_layers is 99, but" in refused(model=model | {"num_hidden_layers": 99})
    assert f"no vLLM server at {url}" in refused()
    run.fleet.weights_from = "127.0.0.1"
    assert "the trainer sends weights from 127.0.0.1, which other hosts cannot reach" in refused(
        url="http://10.0.0.9:1"
    )
    run.fleet.weights_from = None
    assert [slot.name for slot in run.pool.slots] == ["engine 0"]


@pytest.mark.full_matrix
def test_an_engine_that_is_killed_loses_no_request(run, models, tmp_path):
    run.sync("before", models["B"])
    command = Command(run, tmp_path)
    try:
        name = command.until("serving").partition(":")[0]
        load = Load(run, TOKENS, LONG)
        slot = run.fleet.members[name].slot
        run.loop(until(lambda: slot.answered > 4 and len(slot.in_flight) > 2))
        command.kill()
        entry = run.until(name, "lost")
        answered = len(load.answers)
        run.loop(until(lambda: len(load.answers) > answered + 16))
    finally:
        command.process.kill()
    assert {len(answer.token_ids) for answer in load.end()} == {200}
    assert f"no vLLM server at {slot.engine.url}" in entry["why"] or "does not answer" in entry["why"]
    assert [slot.name for slot in run.pool.slots] == ["engine 0"]
    assert not run.sync("after", models["A"]).failures


@pytest.mark.full_matrix
def test_an_engine_that_computes_something_else_never_serves(run, models, tmp_path):
    """Its folder is the run's, and it was told to compute with fewer experts: checksums agree, log-probs do not."""
    run.sync("good", models["B"])
    command = Command(run, tmp_path, "--", '--hf-overrides={"num_experts_per_tok": 1}')
    try:
        command.until("server: ")
        load = Load(run, TOKENS, LONG)
        name = command.until("joining").partition(":")[0]
        entry = run.until(name, "refused")
        code = command.process.wait(60)
    finally:
        command.process.kill()
    load.end()
    assert code == 1 and f"the run rejected {name}: log-probs of 64 tokens differ from the trainer's" in command.err()
    assert "log-probs of 64 tokens differ from the trainer's" in entry["why"]
    assert entry["answered"] == 0 and entry["version"] == "initial"
    assert any(line.startswith("engine ") and "refused: log-probs of 64 tokens differ" in line for line in run.said)
    assert run.pool.published == "good" and [slot.state.value for slot in run.pool.slots] == ["serving"]


@pytest.mark.full_matrix
def test_a_sync_in_which_engines_join_leave_and_die(run, models, tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    run.sync("0", models["B"])
    with server(run, tmp_path) as (process, offer), ThreadPoolExecutor() as threads:
        with monkeypatch.context() as patch:
            held = HeldTransfer(run, patch)
            sync = held.sync("1", models["A"])
            status, joined = run.ask("POST", "/engines", offer)
            name = joined["engine"]
            assert (status, joined["state"], joined["version"]) == (201, "joining", "initial")
            held.let_go()
            assert sorted(sync.result(200).logprob_diffs) == ["engine 0"], "a newcomer waits for the end of a sync"
        assert run.until(name, "serving")["version"] == "1"
        assert largest_gap(scores(run, name), reference_logprobs(models["A"], TOKENS)) <= 1e-5

        slot = run.fleet.members[name].slot
        with monkeypatch.context() as patch:
            held = HeldTransfer(run, patch)
            frozen = run.loop.start(run.client.generate([TOKENS] * 4, LONG))
            run.loop(until(lambda: len(slot.in_flight) == 2))
            sync = held.sync("2", models["B"])
            gone = threads.submit(run.ask, "DELETE", f"/engines/{name}")
            assert run.until(name, "leaving")
            held.let_go()
            assert not sync.result(200).failures
            status, left = gone.result(60)
        assert (status, left["state"], left["moved"]) == (200, "left", 2)
        assert [len(answer.token_ids) for answer in frozen.result(60)] == [200] * 4
        assert [slot.name for slot in run.pool.slots] == ["engine 0"]

        status, joined = run.ask("POST", "/engines", offer)
        run.until(joined["engine"], "serving")
        with monkeypatch.context() as patch:
            held = HeldTransfer(run, patch)
            sync = held.sync("3", models["A"])
            process.stop()
            held.let_go()
            report = sync.result(300)
        assert report.failures and report.version == "3" and sorted(report.logprob_diffs) == ["engine 0"]
        assert run.engines()[joined["engine"]]["state"] == "lost"
        assert run.pool.published == "3" and [slot.state.value for slot in run.pool.slots] == ["serving"]


@pytest.mark.full_matrix
def test_an_engine_outlives_a_run(engines, trainer, models, tmp_path):
    """Started before its run, without engines of the run's own; known to the next run at that address; done when there
    is none."""
    from tests.support.rank_pool import lasting_port

    port = lasting_port()

    class Later:
        model, url, token_file = models["A"], f"http://127.0.0.1:{port}", tmp_path / "registry_token"

    Later.token_file.write_text("a token\n")
    Later.token_file.chmod(0o600)
    command = Command(Later, tmp_path, patience=30)
    try:
        for number, version in enumerate(("1", "7")):
            one = Run(engines, trainer, models["A"], tmp_path, own=0, port=port)
            one.load(models["B"])
            sync = one.loop.start(one.synchronizer.sync(version))
            command.until("engine-0: serving" if number == 0 else "unknown to the run; joining again")
            assert list(sync.result(500).logprob_diffs) == ["engine 0"], "the sync waited for an engine"
            sample = one.loop(one.client.sample(TOKENS, LONG))
            assert [each for each, _, _ in sample.versions] == [version]
            one.close()
        assert command.process.wait(120) == 0
        assert command.lines[-1].startswith(f"the run at {Later.url} ended: no answer for 30 s")
    finally:
        command.process.kill()


@pytest.mark.full_matrix
def test_an_engine_over_several_hosts(run, models, tmp_path):
    """Two commands with a worker each: they join as one engine, take each sync's weights on both, and a host that dies
    costs no request; its other half ends by itself."""
    from tests.support.rank_pool import lasting_port

    port, folders = lasting_port(), [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    over = ("--tp=2", "--nodes=2")
    run.sync("1", models["B"])
    first = Command(run, folders[0], *over, f"--port={port}")
    second = Command(run, folders[1], *over, "--node-rank=1", f"--first=http://127.0.0.1:{port}")
    try:
        name = first.until("serving").partition(":")[0]
        second.until("workers: ready")
        slot = run.fleet.members[name].slot
        assert slot.engine.url == f"http://127.0.0.1:{port}"
        assert largest_gap(scores(run, name), reference_logprobs(models["B"], TOKENS)) <= 1e-5
        assert not run.sync("2", models["A"]).failures
        assert largest_gap(scores(run, name), reference_logprobs(models["A"], TOKENS)) <= 1e-5
        load = Load(run, TOKENS, LONG)
        run.loop(until(lambda: slot.answered > 4 and len(slot.in_flight) > 2))
        first.kill()
        assert run.until(name, "lost")
        assert second.process.wait(120) == 0
        assert second.lines[-1] == f"http://127.0.0.1:{port} ended: no answer for 10 s"
    finally:
        first.process.kill()
        second.process.kill()
    assert {len(answer.token_ids) for answer in load.end()} == {200}
    assert not run.sync("after", models["B"]).failures
