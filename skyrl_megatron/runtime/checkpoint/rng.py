"""Random number generators of a rank: Python, numpy, torch, the device, and Megatron's tracker.

They are per rank. At another layout there is no right state to give a rank, so the states are derived anew from
(seed, step): reproducible, but not the continuation of the old streams.
"""

from __future__ import annotations

import json
import random
import zlib

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from safetensors import torch as safetensors_torch

from skyrl_megatron import device

_TRACKER = "tracker/"


def capture() -> bytes:
    """Return all states of this rank as the content of a safetensors file."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    tensors = {"torch": torch.get_rng_state().clone()}
    if device.has_cuda():
        tensors["device"] = torch.cuda.get_rng_state().cpu()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[_TRACKER + name] = (state if torch.is_tensor(state) else state.get_state()).cpu().clone()
    return safetensors_torch.save(tensors, metadata={"states": json.dumps(plain)})


def restore(data: bytes) -> None:
    """Put all states back, as :func:`capture` took them on a rank of the same layout."""
    length = int.from_bytes(data[:8], "little")
    plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["states"])
    tensors = safetensors_torch.load(data)
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "device" in tensors:
        torch.cuda.set_rng_state(tensors["device"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in tensors.items():
        if name.startswith(_TRACKER):
            current = states.get(name.removeprefix(_TRACKER))
            if current is not None and not torch.is_tensor(current):
                current.set_state(state)  # graph-safe generators are restored in place
            else:
                states[name.removeprefix(_TRACKER)] = state
    tracker.set_states(states)
    torch.set_rng_state(tensors["torch"])


def derive(seed: int, step: int, data_parallel_rank: int, pipeline_rank: int) -> None:
    """Start anew from (seed, step): what ranks of one replica must share stays shared, replicas differ."""
    base = zlib.crc32(f"{seed}/{step}".encode()) & 0x3FFFFFFF
    model_parallel_cuda_manual_seed(base + 100 * pipeline_rank, force_reset_rng=True)
    own = base + 100 * pipeline_rank + 1_000_003 * data_parallel_rank
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)
    torch.manual_seed(own)
