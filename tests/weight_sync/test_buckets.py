"""Buckets of any tensors, and the order of calls of every transport, with groups that record."""

from __future__ import annotations

import os

import pytest

BUCKET_BYTES = 1 << 14


def shapes(seed):
    """Tensors of every kind: without elements, without dimensions, larger than a bucket, of several types."""
    import torch

    torch.manual_seed(seed)
    return {
        "empty": torch.empty(0, 8),
        "vector": torch.randn(5),
        "scalar": torch.randn(()),
        "large": torch.randn(130, 96),
        "large vector": torch.randn(9001),
        "large experts": torch.randn(4, 33, 64).to(torch.bfloat16),
        "counts": torch.randint(100, (7, 3)),
        "transposed": torch.randn(40, 30).t(),
        "empty at the end": torch.empty(3, 0),
    }


def sync(seed, transport="gloo"):
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource
    from tests.weight_sync.recording import received, sent

    tensors = shapes(seed)
    sender = WeightSender(StateSource(tensors), bucket_bytes=BUCKET_BYTES, transport=transport)
    group = sent(sender, transport)
    found, (other,) = received([sender.metadata()], [group.sent], BUCKET_BYTES, transport)
    return tensors, found, group, other


def test_any_tensor_arrives_as_it_was():
    import torch

    tensors, found, *_ = sync(0)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_senders_and_receivers_call_alike(transport):
    """Every broadcast of one side has its counterpart on the other, whatever the transport."""
    *_, group, other = sync(1, transport)
    *_, gloo, _ = sync(1, "gloo")
    assert len(group.calls) > 5
    assert group.calls == other.calls == gloo.calls


def test_nccl_group_is_connected_before_the_first_broadcast(monkeypatch):
    """And a wait that fails ends a sync, not the process: torch's watchdog comes later, and only cleans up.

    A fake group: NCCL needs a GPU."""
    import torch.distributed as dist

    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.transport import NcclTransport

    calls = []

    class Group:
        class Options:
            pass

        def __init__(self, store, rank, world_size, options) -> None:
            on_error = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
            calls.append(("join", rank, world_size, options._timeout.total_seconds(), on_error))

        def eager_connect_single_device(self, where) -> None:
            calls.append(("connect", where))

        def broadcast(self, tensors, options):
            calls.append(("broadcast", tensors[0], options.rootRank))
            return self

        def wait(self, timeout) -> None:
            calls.append(("wait", timeout.total_seconds()))

        def abort(self) -> None:
            calls.append(("abort",))

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    transport = NcclTransport("127.0.0.1", 0, 0, 3, 7.0)
    wait = transport.broadcast("bucket")
    wait()
    transport.close()
    assert calls == [
        ("join", 0, 3, 70.0, "2"),
        ("connect", device.device()),
        ("broadcast", "bucket", 0),
        ("wait", 7.0),
        ("abort",),
    ]
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_checksum_knows_bits_and_places():
    """A flipped bit, two exchanged words in a row, in a column or elsewhere, and a stretch that came late all show."""
    import torch

    from skyrl_megatron.weight_sync.buckets import PAGE, checksum

    words = torch.randint(-(2**62), 2**62, (4, PAGE // 8), generator=torch.Generator().manual_seed(0))
    right = checksum(words.view(torch.uint8).flatten())
    for one, other in (((1, 5), (1, 6)), ((1, 5), (2, 5)), ((0, 0), (3, 511))):
        exchanged = words.clone()
        exchanged[one], exchanged[other] = words[other], words[one]
        assert checksum(exchanged.view(torch.uint8).flatten()) != right, (one, other)
    flipped, stale = words.clone(), words.clone()
    flipped[2, 7] ^= 1 << 40
    stale[1] = words[0]
    for wrong in (flipped, stale, words.roll(1, 0), words.roll(1, 1)):
        assert checksum(wrong.contiguous().view(torch.uint8).flatten()) != right


def test_the_plan_is_made_once_and_again_when_weights_move():
    import torch

    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource
    from tests.weight_sync.recording import received, sent

    tensors = {"weight": torch.randn(4, 4)}
    sender = WeightSender(StateSource(tensors), bucket_bytes=BUCKET_BYTES)
    sent(sender)
    plan = sender._plan
    tensors["weight"].mul_(2)
    group = sent(sender)
    assert sender._plan is plan
    assert torch.equal(received([sender.metadata()], [group.sent], BUCKET_BYTES)[0]["weight"], tensors["weight"])
    tensors["weight"] = torch.randn(4, 4)
    group = sent(sender)
    assert sender._plan is not plan
    assert torch.equal(received([sender.metadata()], [group.sent], BUCKET_BYTES)[0]["weight"], tensors["weight"])


def test_a_row_larger_than_a_bucket_is_refused():
    import torch

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource
    from tests.weight_sync.recording import sent

    sender = WeightSender(StateSource({"wide": torch.zeros(2, 2000)}), bucket_bytes=4096)
    with pytest.raises(WeightSyncError, match="bucket_bytes=4096 is less than a row of wide"):
        sent(sender)
