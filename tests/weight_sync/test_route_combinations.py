"""Every layout of a trainer with every layout of an engine and every family: what routes bring to each worker is what
its loaders make of the whole tensors. And a cover of them, each pair once, through real syncs of real engines."""

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
from tests.weight_sync.routes_of_layouts import UNTOUCHED, carried_out
from tests.weight_sync.test_layouts import BUCKET_BYTES, MORE, PLAIN, VOCABULARY, Model, loop, seeds  # noqa: F401

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
BY_BUCKETS = {"gpt_oss": "travels in another form", "ernie4_5_moe": "travels in another form"}
"""Families of which a tensor has not the rows that it has on disk: every worker gets all weights."""
EXPERTS = [family for family in FAMILIES if family != "qwen3"]
SYNCED = ["tp2·ep2", "tp2·etp2", "pp2·vpp2", "cp2·ep2", "tp2·dp2·ep4", "tp2·cp2·etp2·ep2", "pp2·dp2·ep2", "tp2·pp2"]


def held(folder, layouts):
    """What this rank holds in each of the layouts, with a model of ``folder``: (Holdings, shards), or why there are no
    routes."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf.load import load_hf
    from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
    from skyrl_megatron.weight_sync.routes import Holdings, Unroutable
    from tests.support.rank_pool import end_layout
    from tests.training.bodies import config

    found = {}
    for name, (world, layout) in layouts.items():
        engine = MegatronEngine(config(folder, world=world, **layout))
        load_hf(engine.model, folder, engine.groups)
        try:
            shards, own = MegatronWeightSource(engine.model, engine.groups).held()
            found[name] = Holdings.of(shards, own), [shard.local.detach().clone() for shard in shards]
        except Unroutable as error:
            found[name] = str(error)
        del engine
        end_layout()
    return found


def of_layouts(ranks, folder, layouts) -> dict[str, list]:
    """What the ranks hold in each layout."""
    found: dict[str, list] = {}
    for world in sorted({world for world, _ in layouts.values()}):
        chosen = {name: each for name, each in layouts.items() if each[0] == world}
        answers = ranks(world, held, folder, chosen)
        found |= {name: [answer[name] for answer in answers] for name in chosen}
    return found


def of_engines(folder, tensors, tmp_path) -> dict[str, list]:
    """The workers of every engine."""
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((folder, tensors)))
    command = [sys.executable, "-m", "tests.weight_sync.engine_models", str(job)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(job.read_bytes())


def layouts_of(family):
    return {name: each for name, each in LAYOUTS.items() if family in EXPERTS or not {"ep", "etp"} & set(each[1])}


@pytest.mark.full_matrix
@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_routes_bring_what_loaders_make(ranks, tmp_path, family):
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.weight_sync.routes import Route, tensors_of

    folder = write_tiny_model(family, tmp_path / "model", 1, **FAMILIES[family])
    trainers = of_layouts(ranks, folder, layouts_of(family))
    tensors = tensors_of([holdings for holdings, _ in next(iter(trainers.values()))])
    engines = of_engines(folder, tensors, tmp_path)
    for layout, engine in itertools.product(trainers, engines):
        workers, of_ranks = engines[engine], trainers[layout]
        refused = [worker.route for worker in workers if isinstance(worker.route, str)]
        assert not refused and not [worker.untold for worker in workers if worker.untold], (engine, refused)
        own = {(meta.name, meta.dtype, meta.shape) for meta in tensors_of([holdings for holdings, _ in of_ranks])}
        assert own == {(meta.name, meta.dtype, meta.shape) for meta in tensors}
        routes = [Route.of_plain(*worker.route) for worker in workers]
        plan = join(tensors, [holdings for holdings, _ in of_ranks], routes, BUCKET_BYTES)
        found = carried_out(plan, tensors, [memory for _, memory in of_ranks], routes)
        for worker, targets, route in zip(workers, found, routes, strict=True):
            for target, got, loaded in zip(route.targets, targets, worker.loaded, strict=True):
                got[got == UNTOUCHED] = 0.0  # padding
                assert np.array_equal(got.view(np.int32), loaded.numpy().view(np.int32)), (layout, engine, target)
    print(f"{family}: {len(trainers)} trainers × {len(engines)} engines ({sum(map(len, engines.values()))} workers)")


@pytest.mark.full_matrix
@pytest.mark.parametrize("family", BY_BUCKETS)
def test_other_families_say_why(ranks, tmp_path, family):
    folder = write_tiny_model(family, tmp_path, 1)
    ((_, why), *_), *_ = of_layouts(ranks, folder, PLAIN).items()
    assert BY_BUCKETS[family] in str(why)


def cover() -> list[tuple[str, str, str]]:
    """(family, engine, layout): each pair of two of them at least once. Engines of a family follow one another."""
    kinds = ["tp1", "tp2", "pp2", "ep2", "dp2"]
    found = []
    for number, family in enumerate(EXPERTS):
        for place, layout in enumerate(SYNCED):
            found.append((family, kinds[(number + place) % len(kinds)], layout))
        missing = set(kinds) - {engine for _, engine, _ in found[-len(SYNCED) :]}
        assert not missing
    return sorted(found, key=lambda each: (EXPERTS.index(each[0]), each[1]))


@pytest.fixture(scope="module")
def models(tmp_path_factory, loop):  # noqa: F811
    """``models(family, engine)``: the last one asked for is kept."""
    kept: dict[tuple[str, str], Model] = {}

    def model(family, engine):
        if (family, engine) not in kept:
            for other in list(kept.values()):
                other.close()
            kept.clear()
            names = dict(tp="tensor_parallel_size", pp="pipeline_parallel_size", dp="data_parallel_size")
            sizes = {names.get(k, "expert_parallel_size"): size for k, size in ENGINES[engine].items()}
            folders = seeds(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
            kept[family, engine] = Model(folders, loop, **sizes)
        return kept[family, engine]

    yield model
    for each in kept.values():
        each.close()


def test_the_cover_has_all_pairs():
    found = cover()
    for one, other in itertools.combinations(range(3), 2):
        sides = {each[one] for each in found}, {each[other] for each in found}
        assert {(each[one], each[other]) for each in found} == set(itertools.product(*sides))


@pytest.mark.full_matrix
@pytest.mark.parametrize(("family", "engine", "layout"), cover(), ids="-".join)
def test_real_syncs(ranks, models, tmp_path, family, engine, layout):
    """A → B → A; each time the engine is, bit for bit, one that was started on what the ranks export."""
    models(family, engine).check(ranks, *LAYOUTS[layout], tmp_path, routes=True)
