"""Process groups that record what is broadcast and play it back: what is not real in tests without engines."""

from __future__ import annotations

import datetime
from typing import Any


class Recorder:
    """A group on the sender's side; ``calls``: (root, bytes) of every broadcast, ``sent``: what went out."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.sent: list[Any] = []

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        assert options.rootTensor == 0
        self.calls.append((options.rootRank, tensor.numel()))
        self.sent.append(tensor.clone())
        return self

    def wait(self, timeout) -> bool:
        return True

    def abort(self) -> None:
        self.calls.append(("abort", 0))


class Playback(Recorder):
    """A group on the receivers' side, which gets what another recorded."""

    def __init__(self, recorded: list[Any]) -> None:
        super().__init__()
        self.left = iter(recorded)

    def broadcast(self, tensors, options):
        tensors[0].copy_(next(self.left))
        return super().broadcast(tensors, options)


def transport(name: str, group):
    """The transport of that name, around ``group``."""
    from skyrl_megatron.weight_sync.transport import BUILT_IN_TRANSPORTS

    kind = BUILT_IN_TRANSPORTS[name]
    made = kind.__new__(kind)
    made.timeout, made.group = datetime.timedelta(seconds=10), group
    return made


def sent(sender, name: str = "gloo") -> Recorder:
    """What ``sender`` sends in a sync, over the transport of that name."""
    group = Recorder()
    sender._transport = transport(name, group)
    sender.send()
    return group


def received(metadata, buckets, bucket_bytes: int, name: str = "gloo"):
    """(tensors by name, groups) that a receiver makes of the buckets of all senders."""
    import torch

    from skyrl_megatron.weight_sync.buckets import WeightReceiver

    groups = [Playback(each) for each in buckets]
    receiver = WeightReceiver([transport(name, group) for group in groups], bucket_bytes, torch.device("cpu"))
    receiver.set_metadata(metadata)
    return {name: tensor.clone() for name, tensor in receiver.tensors()}, groups
