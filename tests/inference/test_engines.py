"""Two real engines behind one client: numbers, routing, pauses, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import pytest

from tests.support.engines import VOCABULARY, largest_gap, reference_logprobs, tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]
PROMPTS = [[(11 * i + 7 * j + j * j) % 380 + 5 for j in range(8 + i % 5)] for i in range(24)]
LONG = {"max_tokens": 400, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_moe):
    return tiny_moe["A"]


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop


@pytest.fixture(scope="module")
def pool(engines, model):
    """Two engines; the second takes log-probs before truncation."""
    truncated = (tiny_settings(model, logprobs_at_temperature=each) for each in (False, True))
    with engines.pool(*truncated, wait_s=120) as pool:
        yield pool


@pytest.fixture
def client(pool):
    from skyrl_megatron.inference.client import InferenceClient

    return InferenceClient(pool)


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def expected(model, prompt, sample, temperature):
    return reference_logprobs(model, prompt + sample.token_ids, temperature)[len(prompt) - 1 :]


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize("logprobs", [0, 1])
def test_sampled_log_probs_are_those_of_transformers(pool, loop, model, logprobs):
    engine = pool.slots[0].engine
    sampling = {"max_tokens": 24, "temperature": 0.7, "seed": 1, "logprobs": logprobs, "ignore_eos": True}
    sample = loop(engine.generate("numbers", PROMPTS[0], sampling))
    assert largest_gap(sample.logprobs, expected(model, PROMPTS[0], sample, 0.7)) <= 1e-5
    assert sample.finish_reason == "length"
    assert sample.versions == [("initial", 0, 24)]


def test_log_probs_of_a_truncated_distribution_are_at_temperature_only(pool, loop, model):
    sampling = {"max_tokens": 24, "temperature": 0.7, "seed": 1, "top_p": 0.8, "top_k": 50, "min_p": 0.001}
    sampling |= {"repetition_penalty": 1.2, "ignore_eos": True}
    after, before = (loop(slot.engine.generate("truncated", PROMPTS[0], sampling)) for slot in pool.slots)
    assert before.token_ids == after.token_ids
    assert largest_gap(before.logprobs, expected(model, PROMPTS[0], before, 0.7)) <= 1e-5
    assert min(a - b for a, b in zip(after.logprobs, before.logprobs, strict=True)) > 0.05  # renormalised


def test_same_seeds_give_the_same_tokens_for_any_number_of_engines_and_any_batch(pool, loop, client):
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.sampling_params import request_seed

    sampling = [
        {"max_tokens": 24, "temperature": 1.0, "seed": request_seed(3, f"p{i}", 0, 1)} for i in range(len(PROMPTS))
    ]

    async def fresh(work):
        for slot in pool.slots:
            await slot.engine.reset_prefix_cache()
        return await work

    dealt = InferenceClient(pool, deterministic=True)
    two = loop(fresh(dealt.generate(PROMPTS, sampling)))
    again = loop(fresh(dealt.generate(PROMPTS, sampling)))
    assert [(g.token_ids, g.logprobs) for g in again] == [(g.token_ids, g.logprobs) for g in two]
    free = loop(client.generate(PROMPTS, sampling))
    alone = [loop(pool.slots[0].engine.generate(f"alone {i}", PROMPTS[i], sampling[i])) for i in range(0, 24, 5)]
    assert [g.token_ids for g in free] == [g.token_ids for g in two]
    assert [g.token_ids for g in alone] == [g.token_ids for g in two[::5]]
    assert len({tuple(g.token_ids) for g in two}) == len(PROMPTS)


def test_seeds_hold_for_prompts_that_come_in_chunks(pool, loop):
    """More tokens at once than a step takes (2,048): some prompts are cut, and sampled as if they were not."""
    engine = pool.slots[0].engine
    prompts = [[(13 * i + 5 * j) % 380 + 5 for j in range(300)] for i in range(10)]

    async def both():
        sampling = [{"max_tokens": 12, "temperature": 1.0, "seed": 100 + i} for i in range(len(prompts))]
        await engine.reset_prefix_cache()
        requests = [engine.generate(f"chunks {i}", prompts[i], sampling[i]) for i in range(len(prompts))]
        together = await asyncio.gather(*requests)
        alone = []
        for i, prompt in enumerate(prompts):
            await engine.reset_prefix_cache()
            alone.append(await engine.generate(f"whole {i}", prompt, sampling[i]))
        return together, alone

    together, alone = loop(both())
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


# ------------------------------------------------------------------ control
def test_abort_returns_the_tokens_so_far(pool, loop):
    engine = pool.slots[0].engine

    async def abort_soon():
        request = asyncio.create_task(engine.generate("to abort", PROMPTS[0], LONG))
        await asyncio.sleep(0.3)
        await engine.abort("to abort")
        return await request

    sample = loop(abort_soon())
    assert sample.finish_reason == "abort" and len(sample.token_ids) < 400
    assert len(sample.logprobs) == len(sample.token_ids)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(pool, loop, mode):
    engine = pool.slots[1].engine

    async def pause_midway():
        requests = [asyncio.create_task(engine.generate(f"{mode} {i}", PROMPTS[i], LONG)) for i in range(4)]
        await asyncio.sleep(0.3)
        await engine.pause(mode)
        await asyncio.sleep(0.2)
        finished = sum(request.done() for request in requests)
        late = asyncio.create_task(engine.generate(f"{mode} late", PROMPTS[5], {"max_tokens": 2}))
        await asyncio.sleep(0.5)
        late_waited = not late.done()
        await engine.resume()
        return finished, late_waited, [await request for request in requests], await late

    finished, late_waited, samples, late = loop(pause_midway())
    assert late_waited and late.token_ids
    assert finished == {"keep": 0, "wait": 4, "abort": 4}[mode]
    lengths = [len(sample.token_ids) for sample in samples]
    assert all(length < 400 for length in lengths) if mode == "abort" else lengths == [400] * 4


def test_many_requests_are_spread_and_sessions_stay(pool, loop, client):
    async def many():
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(200)]
        samples = asyncio.create_task(
            client.generate(prompts, {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True})
        )
        await asyncio.sleep(0)
        busiest = [(0, 0), (0, 0)]
        while not samples.done():
            now = [(slot.load, len(slot.in_flight)) for slot in pool.slots]
            busiest = [max(pair) for pair in zip(busiest, now, strict=True)]
            await asyncio.sleep(0.001)
        return await samples, busiest

    samples, busiest = loop(many())
    assert [len(sample.token_ids) for sample in samples] == [8] * 200
    (one, first), (two, second) = busiest
    assert one + two == sum(len(PROMPTS[i % len(PROMPTS)]) + 8 for i in range(200)) and first + second == 200
    assert abs(one - two) <= max(map(len, PROMPTS)) + 8, "less than a request apart"

    async def sessions():
        return [[await pool.serving(f"session {i}") for i in range(10)] for _ in range(2)]

    first, second = loop(sessions())
    assert first == second


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([5, VOCABULARY + 3], {}, r": token_ids\[1\]=512: must be 0 to 508, the vocabulary$"),
        ([5] * 600, {}, "maximum.*length"),
        ([], {}, "must be a list of one or more token ids"),
        ([5], {"temprature": 1.0}, "unknown sampling key 'temprature': did you mean 'temperature'"),
        ([5], {"top_p": 3.0}, "top_p"),
    ],
)
def test_a_bad_request_is_one_clear_error(client, pool, loop, prompt, sampling, message):
    from skyrl_megatron.errors import RequestError

    with pytest.raises(RequestError, match=message):
        loop(client.sample(prompt, sampling))
    assert all(slot.state.value == "serving" for slot in pool.slots)


# ------------------------------------------------------------------ faults (last: they restart engines)
def check_replaced(slot, before):
    assert slot.state.value == "serving" and slot.engine.process_ids() != before
    assert not any(alive(process) for process in before)


IN_PLAIN_RUN = ("worker killed, requests one by one", "worker stopped, requests dealt out")
LOSSES = [
    pytest.param(process, fault, together, id=name, marks=() if name in IN_PLAIN_RUN else pytest.mark.full_matrix)
    for process, where in ((0, "core"), (-1, "worker"))
    for fault, how in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped"))
    for together, requests in ((False, "one by one"), (True, "dealt out"))
    if (name := f"{where} {how}, requests {requests}")
]


@pytest.mark.parametrize(("process", "fault", "together"), LOSSES)
def test_requests_of_a_lost_engine_are_made_again_and_it_comes_back(pool, loop, process, fault, together):
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient

    victim = pool.slots[0]
    before = victim.engine.process_ids()
    client, monitor = (
        InferenceClient(pool, deterministic=together),
        HealthMonitor(pool, timeout_s=5, restarts_per_hour=99),
    )

    async def lose_one():
        work = asyncio.create_task(client.generate(PROMPTS, LONG))
        async with asyncio.timeout(60):
            while not victim.in_flight:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        lost = len(victim.in_flight)
        os.kill(before[process], fault)
        await monitor.check()
        return lost, await work

    lost, samples = loop(lose_one(), 120)
    assert lost > 0
    assert [len(sample.token_ids) for sample in samples] == [400] * len(PROMPTS)
    check_replaced(victim, before)


@pytest.mark.parametrize(
    ("process", "call", "said"),
    [
        (-1, "health", "Worker proc .* died unexpectedly"),
        pytest.param(-1, "start_update", "Worker proc .* died unexpectedly", marks=pytest.mark.full_matrix),
        (0, "version", "EngineCore"),
    ],
)
def test_a_process_that_dies_while_it_is_asked(pool, loop, process, call, said):
    """vLLM answers the call that met a worker's death with a bare Exception, "cancelled", before it knows the engine
    dead, and one that met a core's not at all."""
    from skyrl_megatron.errors import EngineGoneError
    from skyrl_megatron.inference.client import HealthMonitor

    victim = pool.slots[0]
    before = victim.engine.process_ids()

    async def die():
        os.kill(before[process], signal.SIGSTOP)
        asked = asyncio.create_task(getattr(victim.engine, call)())
        await asyncio.sleep(0.5)
        os.kill(before[process], signal.SIGKILL)
        async with asyncio.timeout(60):
            await asked

    with pytest.raises(EngineGoneError, match=said):
        loop(die())
    loop(HealthMonitor(pool, timeout_s=5, restarts_per_hour=99).check(), 120)
    check_replaced(victim, before)


@pytest.mark.full_matrix
def test_an_engine_that_fails_to_start_twice_alike_is_dropped(pool, loop, model, tmp_path):
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    broken = shutil.copytree(model, tmp_path / "broken")
    (weights,) = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    slot, monitor = pool.slots[0], HealthMonitor(pool, timeout_s=5, restarts_per_hour=99)
    make, slot.make = slot.make, lambda: VLLMEngine(tiny_settings(broken))
    before = len(slot.restarts)
    os.kill(slot.engine.process_ids()[-1], signal.SIGKILL)
    states = []
    for _ in range(4):
        loop(monitor.check(), 120)
        states.append(slot.state.value)
    assert states == ["dead", "dropped", "dropped", "dropped"]
    assert len(slot.restarts) == before + 2 and slot.why.startswith("it failed in the same way after a restart: ")
    assert "SafetensorError" in slot.why, "the cause is told"
    answers = loop(InferenceClient(pool).generate(PROMPTS[:2], {"max_tokens": 4}), 60)  # the other engine serves on
    assert [len(answer.token_ids) for answer in answers] == [4, 4]
    slot.make = make
    loop(pool.restart(slot), 590)
