"""Who is told to have failed when engines and ranks wait for one another. The ranks are functions that do what real
ones were seen to do; stopped and killed ones are in tests/faults."""

import asyncio

import pytest

PHASE_S = 0.5


def together(*ranks, phase_s=PHASE_S, end_waiting=lambda error: None):
    """What a call to ``ranks`` raises."""
    from skyrl_megatron.workers.sync_calls import SyncCalls

    async def call():
        calls = SyncCalls(ranks, phase_s, lambda: "; looked", end_waiting)
        calls.ends = float("inf")
        return await calls.on_ranks("score", lambda rank: rank())

    return asyncio.run(call())


async def stands_still():
    await asyncio.sleep(3600)


def raises(error, after_s=0.0):
    async def rank():
        await asyncio.sleep(after_s)
        raise error

    return rank


@pytest.fixture
def soon(monkeypatch):
    """Neither a rank's own deadline nor that of its neighbours is waited for."""
    from skyrl_megatron.workers import sync_calls

    monkeypatch.setattr(sync_calls, "LATER_S", 1.0)
    monkeypatch.setattr(sync_calls, "GRACE_S", 1.0)


def test_a_rank_that_stands_still_and_not_those_that_wait_for_it(soon):
    from skyrl_megatron.errors import WeightSyncError

    waits = raises(RuntimeError("Timed out waiting 200ms for recv operation to complete"), PHASE_S)
    said = r"^trainer rank 1, phase score: no answer within 1.5 s \(trainer.phase_timeout_s\); looked$"
    with pytest.raises(WeightSyncError, match=said):
        together(waits, stands_still, waits)


def test_a_process_that_is_gone_and_not_what_its_neighbours_say(soon):
    from skyrl_megatron.errors import RankLostError

    gone = raises(RankLostError("policy rank 1: the process died", "policy"), 0.05)
    with pytest.raises(RankLostError, match="policy rank 1"):
        together(raises(RuntimeError("Connection closed by peer")), gone, stands_still)


def test_a_rank_s_own_error_and_not_who_waits_for_it(soon):
    with pytest.raises(ZeroDivisionError):
        together(stands_still, raises(ZeroDivisionError()))


@pytest.mark.timeout(60)
def test_nobody_waits_to_the_end_for_one_that_failed(soon):
    ended = []
    failing = raises(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        together(stands_still, failing, phase_s=3600, end_waiting=ended.append)
    (told,) = ended
    assert isinstance(told, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):  # nobody waits
        together(failing, failing, phase_s=3600, end_waiting=ended.append)
    assert ended == [told]


def test_what_is_said_at_the_end_where_all_answer(soon):
    with pytest.raises(RuntimeError, match="first"):
        together(raises(RuntimeError("first"), PHASE_S + 0.02), raises(RuntimeError("second"), PHASE_S + 0.05))


def test_a_sender_without_memory_blames_nobody():
    import torch

    from skyrl_megatron.errors import EngineGoneError
    from skyrl_megatron.weight_sync.sender import _raising

    with pytest.raises(RuntimeError, match="allocate memory"), _raising(EngineGoneError, "an engine", str):
        torch.empty(1 << 50, dtype=torch.uint8)
