"""Weights published by real Megatron ranks in every layout: the engine then equals, bit for bit, one that was started
on the HF folder which the same ranks export."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal

import pytest

from tests.support.engines import PROBE as TOKENS
from tests.support.engines import VOCABULARY, largest_gap, reference_logprobs, tiny_settings
from tests.support.tiny_models import write_tiny_model, write_tokenizer
from tests.weight_sync.megatron_ranks import MegatronRanks, Rank, SharingRank

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]
BUCKET_BYTES = 1 << 17  # smaller than the largest tensor
# name → ranks, degrees
PLAIN = {"tp2·ep2": (2, dict(tp=2, ep=2))}
MORE = {
    "dp2": (2, {}),
    "dp2·ep2": (2, dict(ep=2)),
    "tp2": (2, dict(tp=2)),
    "tp2·etp2": (2, dict(tp=2, etp=2)),
    "pp2": (2, dict(pp=2)),
    "pp2·vpp2": (2, dict(pp=2, vpp=2)),
    "cp2": (2, dict(cp=2)),
    "cp2·ep2": (2, dict(cp=2, ep=2)),
    "tp2·dp2·ep2": (4, dict(tp=2, ep=2)),
    "tp2·dp2·ep4": (4, dict(tp=2, ep=4)),
    "tp2·cp2·etp2·ep2": (4, dict(tp=2, cp=2, etp=2, ep=2)),
    "tp2·pp2": (4, dict(tp=2, pp=2)),
    "tp2·pp2·ep2": (4, dict(tp=2, pp=2, ep=2)),
    "tp2·pp2·vpp2·etp2": (4, dict(tp=2, pp=2, vpp=2, etp=2)),
    "pp2·dp2·ep2": (4, dict(pp=2, ep=2)),
    "pp2·vpp2·cp2·ep2": (4, dict(pp=2, vpp=2, cp=2, ep=2)),
    "pp4": (4, dict(pp=4)),
    "dp4·ep4": (4, dict(ep=4)),
}
EXCHANGED = ("tp2·ep2", "pp2", "dp2·ep2", "tp2·etp2", "cp2·ep2", "tp2·dp2·ep2", "tp2·pp2·ep2", "dp4·ep4")
FAMILIES = {
    "qwen3": (2, dict(pp=2), dict(tie_word_embeddings=True, vocab_size=VOCABULARY)),
    "mixtral": (2, dict(tp=2, ep=2), {}),
    "olmoe": (2, dict(tp=2, etp=2), {}),
    "glm4_moe": (2, dict(tp=2, ep=2), {}),
    "deepseek_v3": (4, dict(pp=2, ep=2), {}),
    "gpt_oss": (2, dict(tp=2, ep=2), {}),
    "ernie4_5_moe": (2, dict(pp=2), dict(vocab_size=VOCABULARY)),
    "minimax_m2": (2, dict(tp=2, ep=2), {}),
    "glm4_moe_lite": (2, dict(ep=2), {}),
    "hy_v3": (2, dict(tp=2, etp=2), {}),
    "qwen3_next": (2, dict(tp=2, ep=2), {}),
    "qwen3_5_moe_text": (2, dict(cp=2), {}),
}


class Model:
    """Two seeds, A and B, of a model, and an engine that was started on A."""

    def __init__(self, folders, engines, **settings) -> None:
        from bridges.files import text_config

        self.folders, self.engines, self.loop, self.settings = folders, engines, engines.loop, settings
        self.config = text_config(json.loads((folders["A"] / "config.json").read_text()))
        self.contents = {digest(folder): folder for folder in folders.values()}
        self.fresh: dict[str, tuple] = {}
        self._lent = contextlib.ExitStack()
        self.pool = self._lent.enter_context(engines.pool(tiny_settings(folders["A"], **settings), wait_s=20))
        self.fresh[digest(folders["A"])] = self.answers(self.pool)

    def close(self) -> None:
        self._lent.close()

    def answers(self, pool) -> tuple:
        return self.engines.answers(pool.slots[0].engine)

    def fresh_answers(self, folder) -> tuple:
        """Of an engine that was started on A or B, whichever ``folder`` equals, and holds nothing else."""
        content = digest(folder)
        if content not in self.fresh:
            with self.engines.pool(tiny_settings(self.contents[content], **self.settings)) as pool:
                self.fresh[content] = self.answers(pool)
        return self.fresh[content]

    def synchronizer(self, trainer, phase_s=60.0, deadline_s=200.0, reshard=False, exchange=False):
        from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

        times = {"phase_s": phase_s, "deadline_s": deadline_s}
        return WeightSynchronizer(
            self.pool,
            trainer.handles,
            hf_config=self.config,
            dtype="float32",
            bucket_sizes=(BUCKET_BYTES,),
            reshard=reshard,
            exchange=2 * exchange,
            transport="ipc" if exchange else None,
            **times,
        )

    def check(self, ranks, world, layout, exports, reshard=False, exchange=False) -> None:
        """A → B → A from ranks in ``layout``, each compared with a fresh engine on what they export."""
        kind = SharingRank if exchange else Rank
        with MegatronRanks(ranks, self.folders["A"], world, layout, BUCKET_BYTES, kind=kind) as trainer:
            synchronizer = self.synchronizer(trainer, reshard=reshard, exchange=exchange)
            for number, name in enumerate("ABA"):
                trainer.together("load", self.folders[name])
                report = self.loop(synchronizer.sync(f"{name}{number}"), 250)
                assert not report.failures and (synchronizer.plan is not None) == reshard
                assert report.logprob_diffs["engine 0"].largest <= 1e-4
                trainer.together("export", exports / f"{name}{number}")
                assert digest(exports / f"{name}{number}") == digest(self.folders[name])
                assert self.answers(self.pool) == self.fresh_answers(exports / f"{name}{number}")
        assert len(self.fresh) == 2 and largest_gap(*(scores for scores, *_ in self.fresh.values())) > 1


def digest(folder) -> str:
    """Of all tensors of a HF folder."""
    from safetensors.torch import load_file

    found = hashlib.sha256()
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def seeds(folder, model_type, **overrides):
    return {
        name: write_tiny_model(model_type, folder / name, seed, **overrides) for name, seed in (("A", 0), ("B", 1))
    }


@pytest.fixture(scope="module")
def qwen3_moe(engines, tiny_moe):
    model = Model(tiny_moe, engines)
    yield model
    model.close()


@pytest.fixture(scope="module")
def qwen3_moe_tp2(engines, tiny_moe):
    model = Model(tiny_moe, engines, tensor_parallel_size=2)
    yield model
    model.close()


@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_qwen3_moe(ranks, qwen3_moe, tmp_path, name):
    qwen3_moe.check(ranks, *(PLAIN | MORE)[name], tmp_path)


def test_qwen3_moe_by_routes(ranks, qwen3_moe, tmp_path):
    qwen3_moe.check(ranks, 2, dict(tp=2, ep=2), tmp_path, reshard=True)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", EXCHANGED)
def test_ranks_exchange_what_is_for_the_workers_on_their_devices(ranks, qwen3_moe_tp2, tmp_path, name):
    """A worker gets everything from one rank, through shared memory; ranks beyond its engine's have no worker."""
    qwen3_moe_tp2.check(ranks, *(PLAIN | MORE)[name], tmp_path, reshard=True, exchange=True)


@pytest.mark.full_matrix
def test_ranks_exchange_by_a_plan_alone(ranks, qwen3_moe_tp2, monkeypatch):
    """Engines answer as those of a plugin do that records no route of its loaders."""
    from skyrl_megatron.errors import WeightSyncError

    async def no_routes(metadata):
        return "its loader of lm_head copies nothing"

    model, layout = qwen3_moe_tp2, dict(tp=2, ep=2)
    monkeypatch.setattr(model.pool.slots[0].engine, "weight_targets", no_routes)
    with MegatronRanks(ranks, model.folders["B"], 2, layout, BUCKET_BYTES, kind=SharingRank) as trainer:
        synchronizer = model.synchronizer(trainer, reshard=True, exchange=True)
        with pytest.raises(WeightSyncError, match=r"lm_head copies nothing.*colocate_all=false"):
            model.loop(synchronizer.sync("never"), 250)


@pytest.mark.full_matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_the_exchange_ends_the_sync(ranks, qwen3_moe_tp2, rank):
    from skyrl_megatron.errors import SkyRLMegatronError

    model, layout = qwen3_moe_tp2, dict(tp=2, ep=2)
    with MegatronRanks(ranks, model.folders["B"], 2, layout, BUCKET_BYTES, kind=SharingRank) as trainer:
        synchronizer = model.synchronizer(trainer, phase_s=20.0, reshard=True, exchange=True)
        model.loop(synchronizer.sync("before"), 250)
        trainer.may_die = True
        model.loop(trainer.handles[rank]("plant", "the trainer dies"))
        with pytest.raises(SkyRLMegatronError, match="gone"):
            model.loop(synchronizer.sync("after"), 250)
    assert model.pool.published == "before" and model.pool.slots[0].state.value == "paused"


@pytest.mark.full_matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_ranks_stay_in_step_when_an_engine_is_lost(ranks, qwen3_moe, tmp_path, number):
    """Ranks that need rows from one another can send again, to the engine that takes the place of the lost one."""
    model, layout = qwen3_moe, dict(tp=2, ep=2)
    with MegatronRanks(ranks, model.folders["B"], 2, layout, BUCKET_BYTES) as trainer:
        synchronizer = model.synchronizer(trainer, phase_s=20.0, deadline_s=300.0)
        model.loop(synchronizer.sync("before"), 250)
        engine = model.pool.slots[0].engine
        model.loop(trainer.handles[0]("plant", f"signal {int(number)} {engine.process_ids()[-1]}"))
        report = model.loop(synchronizer.sync("after"), 350)
        assert report.failures and model.pool.slots[0].engine is not engine
        trainer.together("export", tmp_path / "after")
        assert model.answers(model.pool) == model.fresh_answers(tmp_path / "after")


@pytest.mark.full_matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_sync(ranks, qwen3_moe, rank):
    from skyrl_megatron.errors import DistributedError

    model, layout = qwen3_moe, dict(tp=2, ep=2)
    with MegatronRanks(ranks, model.folders["B"], 2, layout, BUCKET_BYTES) as trainer:
        synchronizer = model.synchronizer(trainer, phase_s=20.0)
        model.loop(synchronizer.sync("before"), 250)
        trainer.may_die = True
        model.loop(trainer.handles[rank]("plant", "the trainer dies"))
        with pytest.raises(DistributedError, match="gone"):
            model.loop(synchronizer.sync("after"), 250)
    assert model.pool.published == "before" and model.pool.slots[0].state.value == "paused"


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(ranks, engines, tmp_path, model_type):
    world, layout, overrides = FAMILIES[model_type]
    model = Model(seeds(tmp_path, model_type, **overrides), engines)
    try:
        model.check(ranks, world, layout, tmp_path)
    finally:
        model.close()


@pytest.mark.full_matrix
def test_a_model_of_text_and_images(ranks, engines, tmp_path):
    """Its language model is trained and sampled; exports have the names, the form and the images' tensors of the
    folder."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folders = seeds(tmp_path, "qwen3_5_moe")
    first, other = (folders[name] / "model.safetensors" for name in "AB")
    images = {name: tensor for name, tensor in load_file(first).items() if name.startswith("model.visual.")}
    save_file(load_file(other) | images, other, metadata={"format": "pt"})
    model = Model(folders, engines)
    try:
        model.check(ranks, 2, dict(tp=2, ep=2), tmp_path)
        answers = model.answers(model.pool)
    finally:
        model.close()
    text = tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(folders["A"], dtype="float32").save_pretrained(text)
    write_tokenizer(text)
    with engines.pool(tiny_settings(text)) as pool:  # by vLLM's class of text models
        assert engines.answers(pool.slots[0].engine) == answers


@pytest.mark.full_matrix
def test_an_engine_on_two_ranks(ranks, engines, tiny_moe, tmp_path):
    """Bit for bit a fresh engine with tp=2; rounding away from a model that is not split."""
    model = Model(tiny_moe, engines, tensor_parallel_size=2)
    try:
        model.check(ranks, 2, dict(tp=2, ep=2), tmp_path)
        assert largest_gap(model.answers(model.pool)[0], reference_logprobs(tiny_moe["A"], TOKENS)) <= 1e-5
    finally:
        model.close()
