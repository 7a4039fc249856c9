"""Engines of quantised folders: what ranks send of their weights is, bit for bit, what vLLM's own quantisers make of
them, and what its loaders, its reload and its packing make of that is what an engine has that starts on it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys

import pytest

from tests.weight_sync import quantised_folders
from tests.weight_sync.megatron_ranks import MegatronRanks, Rank
from tests.weight_sync.quantised_folders import FORMS

pytestmark = [pytest.mark.vllm, pytest.mark.process]
BUCKET_BYTES = 1 << 14  # a few rows of the largest matrices
PLAIN = {"tp4·etp4": (4, dict(tp=4, etp=4))}
MORE = {
    "one rank": (1, {}),
    "tp2·ep2": (2, dict(tp=2, ep=2)),
    "pp2": (2, dict(pp=2)),
    "dp2·ep2": (2, dict(ep=2)),
    "tp2·etp2·pp2": (4, dict(tp=2, etp=2, pp=2)),
}
LAYOUTS = PLAIN | MORE


class QuantisedRank(Rank):
    """A rank whose engines have the 8 bits of its folder."""

    def source(self):
        from skyrl_megatron.weight_sync.adapter_source import weight_source

        return weight_source(self.engine.model, {}, self.engine.groups, adapters_alone=False, quantised=True)


def arrived(trainer, config):
    """What a receiver gets of a trainer's ranks, and what they say of it: (tensors by name, metadata)."""
    import torch

    from skyrl_megatron.weight_sync.metadata import check_metadata
    from skyrl_megatron.weight_sync.receiver import WeightReceiver
    from skyrl_megatron.weight_sync.transport import open_transport

    metadata = trainer.together("weight_metadata")
    check_metadata(metadata, config)
    addresses = trainer.together("listen_for_engines")

    def receive():
        sending = [address for address, sender in zip(addresses, metadata, strict=True) if sender]
        transports = [open_transport("gloo", *address, 1, 2, 60.0) for address in sending]
        receiver = WeightReceiver(transports, BUCKET_BYTES, torch.device("cpu"))
        receiver.set_metadata([sender for sender in metadata if sender])
        tensors = [(name, tensor.clone()) for name, tensor in receiver.tensors()]
        receiver.finish()
        sums = receiver.checksums
        receiver.close()
        return tensors, sums

    async def send():
        def connect(handle, sender):
            return handle.connect_engines(1, 60.0) if sender else asyncio.sleep(0)

        receiving = asyncio.create_task(asyncio.to_thread(receive))
        await asyncio.gather(*(connect(*pair) for pair in zip(trainer.handles, metadata, strict=True)))
        sent = await asyncio.gather(*(handle.send_weights() for handle in trainer.handles))
        return *(await receiving), [sums for sums, sender in zip(sent, metadata, strict=True) if sender]

    tensors, received, sent = asyncio.run(send())
    assert received == sent
    return tensors, metadata


def unlike(tensors, folder):
    """Names of tensors that are not those of a folder, byte for byte; what is not quantised may have another dtype."""
    import torch
    from safetensors.torch import load_file

    expected, found = load_file(folder / "model.safetensors"), dict(tensors)
    assert found.keys() == expected.keys() and len(found) == len(tensors)
    quantised = {name for name, each in expected.items() if each.dtype == torch.float8_e4m3fn}
    wrong = []
    for name, each in found.items():
        exact = name in quantised or name.removesuffix("_scale_inv").removesuffix("_scale") in quantised
        like = expected[name] if exact else expected[name].to(each.dtype)
        same = each.dtype == like.dtype and each.shape == like.shape
        if not same or not torch.equal(_bytes(each), _bytes(like)):
            wrong.append(name)
    return wrong


def _bytes(tensor):
    import torch

    nan = tensor.isnan() if tensor.dtype == torch.float32 else None
    tensor = tensor if nan is None else tensor.masked_fill(nan, torch.nan)  # which NaN a scale is, is vLLM's reduction's
    return tensor.contiguous().view(-1).view(torch.uint8)


def engines_of(folder, start, tensors, quantised, engines):
    """{engine: what is wrong in each of its workers}, of engines that start on ``start`` and are sent ``tensors``."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "sent.safetensors")
    job = folder / "job"
    job.write_bytes(pickle.dumps((start, folder / "sent.safetensors", [name for name, _ in tensors], quantised, engines)))
    command = [sys.executable, "-m", "tests.weight_sync.quantised_engines", str(job)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(job.read_bytes())


def written(root, family, form):
    """Folders: in 8 bits with other weights, the weights that are trained, and these in 8 bits."""
    _, start = quantised_folders.write(root / "A", family, form, 0)
    return start, *quantised_folders.write(root / "B", family, form, 1)


def sent_of(ranks, start, plain, layout):
    """(tensors, metadata) of a trainer that was started on ``start`` and has got the weights of ``plain`` since."""
    world, degrees = LAYOUTS[layout]
    config = json.loads((start / "config.json").read_text())
    with MegatronRanks(ranks, start, world, degrees, BUCKET_BYTES, kind=QuantisedRank) as trainer:
        arrived(trainer, config)  # of the weights that it started with
        trainer.together("load", plain)
        return arrived(trainer, config)


@pytest.mark.full_matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", quantised_folders.SIZES)
def test_engines_get_what_vllm_makes(ranks, tmp_path, family, form):
    start, plain, quantised = written(tmp_path, family, form)
    for layout in LAYOUTS:
        tensors, _ = sent_of(ranks, start, plain, layout)
        assert unlike(tensors, quantised) == [], layout
    found = engines_of(tmp_path, start, tensors, quantised, ["tp1", "tp2", "ep2", "pp2"])
    assert found == {engine: [[]] * len(workers) for engine, workers in found.items()}
