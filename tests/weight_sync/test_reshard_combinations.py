"""Every layout of a trainer with every layout of an engine and every family: what target maps bring to each worker is
what its loaders make of the whole tensors. And real syncs of every family to the engines that serve on CPU."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tests.support.tiny_models import write_tiny_model
from tests.weight_sync.engine_models import ENGINES
from tests.weight_sync.reshard_layouts import UNTOUCHED, carried_out
from tests.weight_sync.test_layouts import BUCKET_BYTES, MORE, PLAIN, VOCABULARY, Model, seeds

pytestmark = pytest.mark.vllm
LAYOUTS = PLAIN | MORE
FAMILIES = {
    "qwen3": dict(tie_word_embeddings=True, vocab_size=VOCABULARY),
    "qwen3_moe": dict(vocab_size=VOCABULARY),
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "minimax_m2": {},
    "hy_v3": {},
}
BY_BUCKETS = {"gpt_oss": "is sent in another form", "ernie4_5_moe": "is sent in another form"}
"""Families of which a tensor has not the rows that it has on disk: every worker gets all weights."""
EXPERTS = [family for family in FAMILIES if family != "qwen3"]
SYNCED = ["tp2·ep2", "pp2·vpp2", "tp2·cp2·etp2·ep2", "pp2·dp2·ep2"]
SERVED = {
    "tp1": ["qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe_lite"],
    "tp2": ["mixtral", "olmoe", "minimax_m2", "hy_v3"],
    "pp2": ["deepseek_v3", "mixtral", "qwen3_moe", "olmoe"],
}
"""Families of the engines that get real syncs. On CPU engines of ep2 and dp2 die at their first request, with the
weights that they were started on."""


def answer(module, job, *question):
    """What a process of this module makes of a question."""
    job.write_bytes(pickle.dumps(question))
    command = [sys.executable, "-m", f"tests.weight_sync.{module}", str(job)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(job.read_bytes())


def layouts_of(family):
    return {name: each for name, each in LAYOUTS.items() if family in EXPERTS or not {"ep", "etp"} & set(each[1])}


def engines_of(family):
    """Only models with experts share them out."""
    return [name for name, each in ENGINES.items() if family in EXPERTS or "ep" not in each]


def check_all(trainers, engines) -> None:
    """Carry out the plan of every trainer with every engine, and compare with what loaders make of whole tensors."""
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.weight_sync.slices import TargetMap, tensors_of

    tensors = tensors_of([source_maps for source_maps, _ in next(iter(trainers.values()))])
    for (layout, ranks), (engine, workers) in itertools.product(trainers.items(), engines.items()):
        refused = [worker.target_map for worker in workers if isinstance(worker.target_map, str)]
        assert not refused, (engine, refused)
        assert [(worker.untold, worker.unlike) for worker in workers] == [([], [])] * len(workers), engine
        source_maps, memory = zip(*ranks, strict=True)
        own = {(meta.name, meta.dtype, meta.shape) for meta in tensors_of(source_maps)}
        assert own == {(meta.name, meta.dtype, meta.shape) for meta in tensors}
        target_maps = [TargetMap.from_wire(*worker.target_map) for worker in workers]
        found = carried_out(
            plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES), tensors, memory, target_maps
        )
        for worker, targets, target_map in zip(workers, found, target_maps, strict=True):
            for target, got, loaded in zip(target_map.targets, targets, worker.loaded, strict=True):
                got[got == UNTOUCHED] = 0.0  # padding
                assert np.array_equal(got.view(np.int32), loaded.numpy().view(np.int32)), (layout, engine, target)


@pytest.mark.full_matrix
@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_routes_bring_what_loaders_make(tmp_path, family):
    from skyrl_megatron.weight_sync.slices import tensors_of

    folder = write_tiny_model(family, tmp_path / "model", 1, **FAMILIES[family])
    trainers = answer("trainer_ranks", tmp_path / "job", folder, layouts_of(family))
    tensors = tensors_of([source_maps for source_maps, _ in next(iter(trainers.values()))])
    engines = answer("engine_models", tmp_path / "job", folder, tensors, engines_of(family))
    check_all(trainers, engines)
    print(f"{family}: {len(trainers)} trainers × {len(engines)} engines ({sum(map(len, engines.values()))} workers)")


@pytest.mark.full_matrix
@pytest.mark.process
@pytest.mark.parametrize("family", BY_BUCKETS)
def test_other_families_say_why(tmp_path, family):
    folder = write_tiny_model(family, tmp_path / "model", 1)
    (ranks,) = answer("trainer_ranks", tmp_path / "job", folder, PLAIN).values()
    assert all(BY_BUCKETS[family] in why for why in ranks)


def cover() -> list[tuple[str, str, str]]:
    """(family, engine, layout): each layout with each engine, and each family."""
    return [
        (family, engine, layout)
        for engine, families in SERVED.items()
        for family, layout in zip(families, SYNCED, strict=True)
    ]


def test_the_cover_is_whole():
    families, engines, layouts = (set(side) for side in zip(*cover(), strict=True))
    assert families == set(EXPERTS) and layouts == set(SYNCED)
    assert {each[1:] for each in cover()} == set(itertools.product(engines, layouts))


@pytest.mark.full_matrix
@pytest.mark.parametrize(("family", "engine", "layout"), cover(), ids=map("-".join, cover()))
def test_real_syncs(ranks, engines, tmp_path, family, engine, layout):
    """A → B → A; each time the engine is, bit for bit, one that was started on what the ranks export."""
    folders = seeds(tmp_path, family, **FAMILIES[family])
    degrees = ENGINES[engine]
    model = Model(
        folders, engines, tensor_parallel_size=degrees.get("tp", 1), pipeline_parallel_size=degrees.get("pp", 1)
    )
    try:
        model.check(ranks, *LAYOUTS[layout], tmp_path, reshard=True)
    finally:
        model.close()
