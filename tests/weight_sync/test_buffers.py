"""Buffers of a receiver: none is filled again while the device may still read it, and an update leaves a few."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.weight_sync.recording import Playback, sent, transport

BUCKET_BYTES = 1 << 12
LAYER = 8
"""Tensors of a bucket each that a loader keeps until it has all of them."""


class LateStream:
    """A device's queue, which there is none of on CPU: copies run when somebody waits for a mark behind them, and not
    before. As on a GPU, a queued copy knows the address of its source and does not keep it alive, and another thread
    has a stream of its own, which knows nothing of these copies."""

    def __init__(self):
        self.queued, self.targets, self.done, self.lock = [], [], 0, threading.Lock()
        self.thread = threading.current_thread()

    def copy(self, target, source):
        self.targets.append(target)
        self.queued.append((target.data_ptr(), source.data_ptr(), source.nbytes))

    def mark(self):
        end = len(self.queued) if threading.current_thread() is self.thread else 0
        return lambda: self.run(end)

    def run(self, end):
        with self.lock:
            for target, source, nbytes in self.queued[self.done : end]:
                ctypes.memmove(target, source, nbytes)
            self.done = max(self.done, end)


@pytest.fixture
def stream(monkeypatch):
    from skyrl_megatron import device

    stream = LateStream()
    monkeypatch.setattr(device, "mark", stream.mark)
    return stream


@pytest.fixture
def weights():
    import torch

    generator = torch.Generator().manual_seed(0)
    return {f"weight {number}": torch.randn(32, 32, generator=generator) for number in range(5 * LAYER)}


@pytest.fixture
def receiver(weights):
    """A receiver that gets ``weights``, and the sender's checksums."""
    import torch

    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource

    sender = WeightSender(StateSource(weights), bucket_bytes=BUCKET_BYTES)
    group = sent(sender)
    receiver = WeightReceiver([transport("gloo", Playback(group.sent))], BUCKET_BYTES, torch.device("cpu"))
    receiver.set_metadata([sender.metadata()])
    return receiver, [checksums(group.sent)]


def checksums(buckets):
    from skyrl_megatron.weight_sync.buckets import checksum

    return [int(checksum(bucket)) for bucket in buckets]


def load(receiver, stream, layer=1):
    """What a model holds whose loader keeps ``layer`` tensors and then queues the copies of all of them."""
    import torch

    loaded, kept = {}, []
    for name, tensor in receiver.tensors():
        kept.append((name, tensor))
        del tensor
        if len(kept) == layer:
            while kept:
                name, source = kept.pop(0)
                loaded[name] = torch.empty_like(source)
                stream.copy(loaded[name], source)
                del source
    return loaded


@pytest.mark.parametrize("layer", [1, LAYER])
def test_copies_that_run_late_read_what_was_sent(receiver, stream, weights, layer):
    import torch

    receiver, sums = receiver
    loaded = load(receiver, stream, layer)
    assert stream.done > 0, "the receiver has waited for copies"
    receiver.finish()
    assert stream.done == len(stream.queued) == len(weights)
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
    assert receiver.checksums == sums


@pytest.mark.parametrize("layer", [1, LAYER])
def test_an_update_leaves_a_few_buffers(receiver, stream, layer):
    from skyrl_megatron.weight_sync.buckets import KEPT

    receiver, _ = receiver
    load(receiver, stream, layer)
    assert receiver._buffers.nbytes <= (layer + KEPT) * BUCKET_BYTES, "buffers are used again"
    receiver.finish()
    assert 0 < receiver._buffers.nbytes <= KEPT * BUCKET_BYTES


def test_a_bucket_that_changes_while_it_is_loaded_shows_in_its_checksum(receiver, stream):
    receiver, sums = receiver
    for number, (_, tensor) in enumerate(receiver.tensors()):
        if number == 5:
            tensor[3, 3] += 1.0
    receiver.finish()
    pairs = zip(receiver.checksums[0], sums[0], strict=True)
    assert [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs] == [5]


def test_a_loader_that_stops_early_is_an_error(receiver, stream):
    from skyrl_megatron.errors import WeightSyncError

    receiver, _ = receiver
    tensors = receiver.tensors()
    next(tensors)
    tensors.close()
    with pytest.raises(WeightSyncError, match=r"the model loaded \d of 40 buckets"):
        receiver.finish()


def test_what_is_referred_to_is_never_filled_again(stream):
    """A view of any kind keeps a buffer from being used again, also one that the consumer never saw whole."""
    import torch

    from skyrl_megatron.weight_sync.buckets import BufferPool

    left = []
    pool = BufferPool(torch.device("cpu"), lambda number, buffer: left.append((number, buffer.numel())))
    first = pool.take(0, BUCKET_BYTES)
    pool.retire()
    second = pool.take(1, BUCKET_BYTES // 2)
    assert first.data_ptr() != second.data_ptr()
    kept, where = first.view(torch.float32)[5:7].view(2, 1), first.data_ptr()
    del first
    pool.retire()
    assert pool.take(2, BUCKET_BYTES).data_ptr() != where and left == []
    del kept
    pool.retire()
    assert pool.take(3, BUCKET_BYTES).data_ptr() == where and left == [(0, BUCKET_BYTES)]


def test_a_receiver_without_memory_blames_no_sender():
    import torch

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.buckets import TensorMeta, WeightReceiver

    receiver = WeightReceiver([transport("gloo", Playback([]))], 1 << 50, torch.device("cpu"))
    receiver.set_metadata([[TensorMeta("weight", "float32", (1 << 48,))]])
    with pytest.raises(WeightSyncError, match=r"receive: out of memory for .* after 0.0 MB .*gpu_memory_utilization"):
        list(receiver.tensors())
