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
SMALL = dict(quant_method="fp8", weight_block_size=[48, 40])
LAYOUTS = {
    "one rank": (1, {}),
    "tp2·etp2": (2, dict(tp=2, etp=2)),
    "tp4·etp4": (4, dict(tp=4, etp=4)),
    "tp2·ep2": (2, dict(tp=2, ep=2)),
    "pp2": (2, dict(pp=2)),
    "dp2·ep2": (2, dict(ep=2)),
    "tp2·etp2·pp2": (4, dict(tp=2, etp=2, pp=2)),
}


class QuantisedRank(Rank):
    """A rank whose engines have the 8 bits of its folder."""

    def source(self):
        from skyrl_megatron.weight_sync.megatron_source import weight_source

        return weight_source(self.engine.model, {}, self.engine.groups, adapters_alone=False, quantised=True)


def arrived(trainer, config):
    """What a receiver gets of a trainer's ranks, and what they say of it: (tensors by name, metadata)."""
    import torch

    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.tensors import check_metadata
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

    if tensor.dtype == torch.float32:  # which of NaNs a scale is, depends on the order of vLLM's reduction
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return tensor.contiguous().view(-1).view(torch.uint8)


def answer(folder, function, engines, *arguments):
    """{engine: what a function of ``quantised_engines.py`` says of each of its workers}."""
    job = folder / "job"
    job.write_bytes(pickle.dumps((function, engines, *arguments)))
    command = [sys.executable, "-m", "tests.weight_sync.quantised_engines", str(job)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(job.read_bytes())


def engines_of(folder, start, tensors, quantised, engines):
    """{engine: what is wrong in each of its workers}, of engines that start on ``start`` and are sent ``tensors``."""
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "sent.safetensors")
    names = [name for name, _ in tensors]
    return answer(folder, "loaded_by", engines, start, folder / "sent.safetensors", names, quantised)


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


def quantised_by(folder, layout):
    """Body of a rank: (metadata, buckets) of what it sends of a folder, every linear map in small blocks."""
    from bridges.quantisation import EngineForm
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.weight_sync.megatron_source import QuantisedWeightSource
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.training.bodies import config
    from tests.weight_sync.recording import sent

    engine = MegatronEngine(config(folder, world=2, **layout))
    load_hf(engine.model, folder, engine.groups)
    entries = engine.model.hf.plan.entries
    names = frozenset(piece.name for entry in entries if entry.can_be_scaled for piece in entry.hf)
    form = EngineForm.of({"quantization_config": SMALL}, "config.json")
    sender = WeightSender(
        QuantisedWeightSource(engine.model, engine.groups, form, names), bucket_bytes=BUCKET_BYTES, transport="gloo"
    )
    metadata = list(sender.metadata())
    return metadata, sent(sender).sent


def test_ranks_send_what_the_whole_becomes(ranks, tmp_path):
    """Of matrices whose blocks go over the edges of shards. ``test_quantiser.py`` says that it is vLLM's."""
    import torch
    from safetensors.torch import load_file, save_file

    from bridges.quantisation import EngineForm
    from bridges.quantized import quantise
    from tests.support.tiny_models import write_tiny_model
    from tests.weight_sync.recording import received

    folder = write_tiny_model("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    expected = load_file(folder / "model.safetensors")
    odd = "model.layers.1.mlp.experts.3.down_proj.weight"
    expected[odd][:48, :40], expected[odd][100, 33] = 0, torch.nan
    save_file(expected, folder / "model.safetensors", metadata={"format": "pt"})
    answers = ranks(2, quantised_by, folder, dict(tp=2, etp=2))
    found, _ = received(
        [metadata for metadata, _ in answers if metadata],
        [buckets for metadata, buckets in answers if metadata],
        BUCKET_BYTES,
    )
    form, made = EngineForm.of({"quantization_config": SMALL}, "config.json"), dict(expected)
    for name, tensor in expected.items():
        if name.endswith("_proj.weight"):
            made[name], made[f"{name}_scale_inv"] = quantise(form, tensor)
    assert sorted(found) == sorted(made)
    wrong = [name for name, each in made.items() if not torch.equal(_bytes(found[name]), _bytes(each))]
    assert wrong == [] and found[odd].float().isnan().any()
    sent = sum(meta.nbytes for metadata, _ in answers for meta in metadata)
    values = [each for name, each in made.items() if f"{name}_scale_inv" in made]
    whole = sum(each.nbytes for each in expected.values())
    assert sent == whole - 3 * sum(map(torch.numel, values)) + 4 * sum(form_blocks(form, each) for each in values)


def form_blocks(form, tensor):
    rows, columns = form.grid(tuple(tensor.shape))
    return rows * columns


@pytest.mark.full_matrix
def test_ranks_send_what_vllm_makes(ranks, tmp_path):
    """Whose edges go through blocks; a NaN and a block of zeros are in it. And what is wrong would be seen."""
    import torch

    start, plain, quantised = written(tmp_path, "qwen3_moe", "fp8")
    tensors, metadata = sent_of(ranks, start, plain, "tp2·etp2")
    assert unlike(tensors, quantised) == []
    assert any(each.isnan().any() for _, each in tensors if each.dtype == torch.float32)
    values = [each for _, each in tensors if each.dtype == torch.float8_e4m3fn]
    blocks = sum(-(-each.shape[0] // 128) * -(-each.shape[1] // 128) for each in values)
    others = {each.name for sender in metadata for each in sender if each.dtype == "float32"}
    eight = [each for sender in metadata for each in sender if each.name not in others or "scale" in each.name]
    assert sum(each.nbytes for each in eight) == sum(each.numel() for each in values) + 4 * blocks
    found = dict(tensors)
    expert = "model.layers.1.mlp.experts.{}.{}_proj.weight"
    found[expert.format(0, "up") + "_scale_inv"][1, 0] *= 1 + 2**-23
    one, other = expert.format(2, "down"), expert.format(3, "down")
    found[one], found[other] = found[other], found[one]
    assert set(unlike(list(found.items()), quantised)) == {expert.format(0, "up") + "_scale_inv", one, other}
    ((wrong,),) = engines_of(tmp_path, start, list(found.items()), quantised, ["tp1"]).values()
    experts = "model.layers.1.mlp.experts.routed_experts."
    assert {(line.split()[0], line.split()[-1]) for line in wrong} == {
        (experts + name, how) for name in ("w13_weight_scale_inv", "w2_weight") for how in ("else", "reload")
    }


def source_of(folder, names):
    """Body of a rank: what is wrong with sending these tensors in 8 bits."""
    from bridges.quantisation import EngineForm
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.weight_sync.megatron_source import QuantisedWeightSource
    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.training.bodies import config

    engine = MegatronEngine(config(folder))
    form = EngineForm.of({"quantization_config": FORMS["fp8"]}, "config.json")
    sender = WeightSender(QuantisedWeightSource(engine.model, engine.groups, form, names))
    said = []
    for ask in (sender.metadata, sender.source_map):
        try:
            ask()
        except WeightSyncError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_quantised_is_named(ranks, tmp_path):
    from tests.support.tiny_models import write_tiny_model

    folder = write_tiny_model("qwen3", tmp_path / "model")
    (said,) = ranks(1, source_of, folder, frozenset({"model.norm.weight"}))
    assert len(said) == 2 and all(why.startswith("model.norm.weight [128] has 8 bits") for why in said)


def test_an_adapter_is_not_added_to_8_bits():
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.megatron_source import weight_source

    with pytest.raises(WeightSyncError, match=r"sync_mode=merged.*load_format=dummy.*quantization_config=null"):
        weight_source(None, {"": None}, None, adapters_alone=False, quantised=True)


@pytest.mark.parametrize("plain", [False, True])
def test_the_probe_knows_that_engines_round(tmp_path, plain):
    from types import SimpleNamespace

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.weight_sync.probe import QUANTISED
    from skyrl_megatron.workers.policy_rank import weight_synchronizer

    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMS["fp8"], "vocab_size": 8}))
    keys = {"trainer.policy.model.path": str(tmp_path)}
    if plain:
        kwargs = "generator.inference_engine.engine_init_kwargs."
        keys |= {f"{kwargs}load_format": "dummy", f"{kwargs}hf_overrides.quantization_config": None}
    cfg = SkyRLTrainConfig.from_cli_overrides(keys)
    made = weight_synchronizer(cfg, SimpleNamespace(group=SimpleNamespace(actors=[])), None, dtype="bfloat16")
    assert made.dtype == ("bfloat16" if plain else QUANTISED)


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


def delivered(trainer, tensors, source_maps, target_maps, *, exchange=False):
    """What a sync by the reshard plan brings to workers of these target_maps: for each its transfers, as they are
    sent, and the buckets that come from each rank. ``exchange``: all through the rank on its device."""
    import torch

    from skyrl_megatron.weight_sync.buckets import checksum
    from skyrl_megatron.weight_sync.point_to_point import plan_exchange
    from skyrl_megatron.weight_sync.reshard_plan import Colocation, plan_reshard
    from skyrl_megatron.weight_sync.transport import GroupMember, open_transport
    from skyrl_megatron.workers.sync_calls import WorkerPlan

    colocation = Colocation(range(len(target_maps)), 2) if exchange else None
    plan = plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES, colocation)
    groups = WorkerPlan(tensors, plan, list(enumerate(target_maps)), colocation).groups()
    parts = plan_exchange(plan, tensors, colocation.ranks) if exchange else None
    addresses = trainer.together("listen_for_engines")

    def receive(ranks, worker, place, size):
        transfers, sums = plan.workers[worker], []
        transport = open_transport("gloo", *addresses[ranks[0]], place, size, 60.0)
        buckets = {rank: [] for rank in transfers.peers}
        for rank, nbytes, *_ in transfers.buckets.tolist():
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            transport.receive(buffer, 0 if exchange else ranks.index(rank))()
            buckets[rank].append(buffer)
            sums.append((rank, worker, int(checksum(buffer))))
        transport.close()
        return transfers.wire, buckets, sums

    async def send():
        receiving, joining, numbers = {}, [], {}
        for ranks, workers in groups:
            size = len(ranks) + len(workers)
            for place, worker in enumerate(workers, start=len(ranks)):
                receiving[worker] = asyncio.create_task(asyncio.to_thread(receive, ranks, worker, place, size))
            for number, rank in enumerate(ranks):
                member = GroupMember(addresses[ranks[0]], number, len(ranks), size)
                joining.append(trainer.handles[rank].join_engines(member, 60.0, ()))
                numbers[rank] = {worker: place for place, worker in enumerate(workers, start=len(ranks))}
        await asyncio.gather(*joining)
        for rank, handle in enumerate(trainer.handles):
            part = () if parts is None else (parts[rank],)
            await handle.set_transfers(*plan.ranks[rank].wire, numbers.get(rank, {}), *part)
        sent = await asyncio.gather(*(handle.send_weights() for handle in trainer.handles))
        return [await receiving[worker] for worker in range(len(target_maps))], sent

    received, sent = asyncio.run(send())
    expected = [(rank, worker, total) for rank, sums in enumerate(sent) for worker, total in sums]
    assert sorted(each for *_, sums in received for each in sums) == sorted(expected)
    return [(transfers, buckets) for transfers, buckets, _ in received]


@pytest.mark.full_matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", quantised_folders.SIZES)
def test_workers_get_their_own(ranks, tmp_path, family, form):
    """By the reshard plan each worker gets its own bytes of values and scales, once, and becomes that of a fresh
    engine; also where each gets them through one rank, from others if need be."""
    from skyrl_megatron.weight_sync.slices import TargetMap, tensors_of

    start, plain, quantised = written(tmp_path, family, form)
    tensors, target_maps, deliveries = [], {}, {}
    for layout, (world, degrees) in LAYOUTS.items():
        with MegatronRanks(ranks, start, world, degrees, BUCKET_BYTES, kind=QuantisedRank) as trainer:
            trainer.together("weight_metadata")
            source_maps = trainer.together("weight_source_map")
            tensors = tensors or tensors_of(source_maps)  # stages bring them in another order
            target_maps = target_maps or answer(tmp_path, "route_of", ["tp1", "tp2", "ep2", "pp2"], start, tensors)
            trainer.together("load", plain)
            for engine, workers in target_maps.items():
                needed = [TargetMap.from_wire(*plain) for plain in workers]
                of_engine = deliveries.setdefault(engine, {})
                of_engine[layout] = delivered(trainer, tensors, source_maps, needed)
                if world >= len(needed):
                    of_engine[f"{layout}, exchanged"] = delivered(trainer, tensors, source_maps, needed, exchange=True)
    for engine, of_engine in deliveries.items():
        arguments = start, tensors, quantised, BUCKET_BYTES, of_engine
        found = answer(tmp_path, "filled_by", [engine], *arguments)[engine]
        assert found == [{key: [] for key in of_engine}] * len(found) and of_engine.keys() > LAYOUTS.keys(), engine
