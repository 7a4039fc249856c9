"""The transports of GPUs: NCCL in a group of one, CUDA IPC between two processes. On CPU, IPC is shared memory."""

import multiprocessing
import os

import pytest

PROVES = "buckets of weights arrive as they were sent over NCCL and over CUDA IPC, to all and to one, again and again"
REPORT = "the output with NCCL_DEBUG=INFO, and whether the container shares /dev/shm and the host's PIDs"
TIMEOUT_S = 60.0
BUCKET_BYTES = 1 << 16


def tensors():
    """Tensors on the device, one larger than a bucket, one empty."""
    import torch

    from skyrl_megatron import device

    generator = torch.Generator(device.device()).manual_seed(0)
    shapes = {"large.weight": (96, 512), "small.weight": (3,), "empty.weight": (0, 8), "last.weight": (64, 64)}
    return {name: torch.randn(shape, generator=generator, device=device.device()) for name, shape in shapes.items()}


@pytest.mark.needs("gpu")
def test_checksums_are_those_of_the_cpu():
    import torch

    from skyrl_megatron.weight_sync.buckets import PAGE, checksum

    buffer = torch.randint(256, (64 * PAGE,), dtype=torch.uint8)
    assert int(checksum(buffer.cuda())) == int(checksum(buffer))


@pytest.mark.needs("gpu")
def test_nccl_in_a_group_of_one():
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.transport import listen, open_transport

    device.set_local_device(0)
    transport = open_transport("nccl", "127.0.0.1", 0, 0, 1, TIMEOUT_S, listen("127.0.0.1"))
    buffer = torch.arange(BUCKET_BYTES, device="cuda").to(torch.uint8)
    before = buffer.clone()
    transport.broadcast(buffer)()
    assert torch.equal(buffer, before)
    transport.close()


def receive(port, metadata, pipe):
    """The engine's side, in a process of its own."""
    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.transport import open_transport

    transport = open_transport("ipc", "127.0.0.1", port, 1, 2, TIMEOUT_S)
    receiver = WeightReceiver([transport], BUCKET_BYTES, device.set_local_device(0))
    receiver.set_metadata([metadata])
    for _ in range(2):  # the second time nothing is opened anew
        received = {name: tensor.cpu() for name, tensor in receiver.tensors()}
        receiver.finish()
        pipe.send((received, receiver.checksums))
    pipe.recv()  # until the sender is done with its buffers
    receiver.close()


def test_ipc_between_two_processes():
    send_and_receive()


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("segments", ["fixed", "expandable"])
def test_ipc_whatever_the_segments(segments, monkeypatch):
    """Whichever segments torch's allocator takes: buffers are in fixed ones, which no right of a container forbids."""
    import torch

    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    before = next(filter(None, map(os.environ.get, names)), "expandable_segments:False")
    options = f"expandable_segments:{segments == 'expandable'}"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    torch._C._accelerator_setAllocatorSettings(options)
    try:
        send_and_receive()
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def send_and_receive():
    import torch

    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource

    source = tensors()
    sender = WeightSender(StateSource(source), bucket_bytes=BUCKET_BYTES, transport="ipc")
    _, port = sender.listen("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(port, list(sender.metadata()), theirs), daemon=True)
    process.start()
    try:
        sender.connect("127.0.0.1", port, 1, TIMEOUT_S)
        for _ in range(2):
            for tensor in source.values():
                tensor.add_(1.0)
            sums = sender.send()
            assert pipe.poll(TIMEOUT_S), "the receiver does not answer"
            received, checksums = pipe.recv()
            assert checksums == [sums]
            assert received.keys() == source.keys()
            assert all(torch.equal(received[name], tensor.cpu()) for name, tensor in source.items())
        pipe.send(None)
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        sender.close()


def read_own(port, buckets, pipe):
    """A worker that gets buckets of its own, in a process of its own."""
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.transport import open_transport

    where = device.set_local_device(0)
    transport = open_transport("ipc", "127.0.0.1", port, 1, 2, TIMEOUT_S)
    received = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=where) for _ in range(buckets)]
    for wait in [transport.receive(each) for each in received]:
        wait()
    pipe.send([each.cpu() for each in received])
    pipe.recv()
    transport.close()


def test_ipc_to_one_worker():
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.weight_sync.transport import listen, open_transport

    listener, context, buckets = listen("127.0.0.1"), multiprocessing.get_context("spawn"), 8
    pipe, theirs = context.Pipe()
    process = context.Process(target=read_own, args=(listener.getsockname()[1], buckets, theirs), daemon=True)
    process.start()
    try:
        transport = open_transport("ipc", "127.0.0.1", 0, 0, 2, TIMEOUT_S, listener)
        buffers, waits = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device.device()) for _ in range(2)], []
        for number in range(buckets):
            if len(waits) == len(buffers):
                waits.pop(0)()
            waits.append(transport.send(buffers[number % 2].fill_(number), 1))
        for wait in waits:
            wait()
        assert pipe.poll(TIMEOUT_S), "the worker does not answer"
        assert all(bool(each.eq(number).all()) for number, each in enumerate(pipe.recv()))
        pipe.send(None)
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
        transport.close()
    finally:
        process.kill()
