"""Real Megatron ranks whose adapters go to engines, and mistakes that can be planted on either side."""

from __future__ import annotations

import json
import re

from tests.lora import bodies, reference
from tests.support.engines import tiny_settings
from tests.training.bodies import config
from tests.weight_sync.megatron_ranks import MegatronRanks, Rank

BUCKET_BYTES = 1 << 15  # several from each rank


class AdapterRank(Rank):
    """One rank's adapters; what is asked for with ``fault`` is sent by mistake."""

    def adapt(self, seed: int, name: str = "") -> None:
        """Take the factors drawn from ``seed``, of one of several adapters."""
        from skyrl_megatron_lora.folder import fill_factors

        self.engine.set_adapter(name)
        adapters, how = self.engine.adapters, self.engine.cfg.trainer.policy.megatron_config.lora_config
        separate, shared = how.lora_type == "canonical_lora", how.experts_shared_outer_loras
        factors = reference.start_factors(adapters.model.hf.plan, separate=separate, seed=seed)
        if shared:
            outer = re.compile(r"(experts)\.\d+\.((?:gate|up)_proj\.A|down_proj\.B)$")
            factors = {name: factors[outer.sub(r"\1.0.\2", name)] for name in factors}
        fill_factors(adapters, self.engine.groups, reference.finder(factors))

    def export(self, folder, name: str = "") -> None:
        """Write the merged model, of one of several adapters."""
        from skyrl_megatron.runtime.hf_weights import save_hf

        self.engine.set_adapter(name)
        save_hf(self.engine.model, self.engine.groups, folder, of=self.engine.adapters.merged)

    def source(self):
        from skyrl_megatron_lora.source import AdapterSource

        engine, fault = self.engine, getattr(self, "mistake", None)

        class Source(AdapterSource):
            """Factors as they are, or under the wrong names."""

            def shards(self):
                return [shard for shard in map(self.mistaken, super().shards()) if shard is not None]

            def local_shards(self):
                shards, own = super().local_shards()
                return list(map(self.mistaken, shards)), own

            def mistaken(self, shard):
                from dataclasses import replace

                name = shard.meta.name
                if fault == "gate and up are swapped":
                    other = {"gate_proj.lora_B": "up_proj.lora_B", "up_proj.lora_B": "gate_proj.lora_B"}
                    for one, two in other.items():
                        if name.endswith(f".{one}"):
                            return replace(shard, meta=replace(shard.meta, name=name.replace(one, two)))
                if fault == "a factor is missing" and name.endswith("layers.2.mlp.experts.down_proj.lora_B"):
                    return None
                return shard

        self.sent = Source(engine.every_adapter(), engine.groups)
        return self.sent

    def send_weights(self, adapters=None):
        if adapters is not None:
            self.sent.chosen = adapters
        return super().send_weights()

    def score(self, token_ids, perturbation, adapter=""):
        from skyrl_megatron.runtime.scoring import score_tokens

        return score_tokens(self.engine, token_ids, perturbation=perturbation, adapter=adapter)

    def make(self, mistake: str | None) -> None:
        """Choose the mistake of the next connection."""
        self.mistake = mistake


class MergedRank(AdapterRank):
    """One rank whose adapters are added to the weights that it sends."""

    def source(self):
        from skyrl_megatron_lora.source import MergedWeightSource

        return MergedWeightSource(self.engine.adapters, self.engine.groups)


def ranks_with_adapters(pool, folder, layout, overrides=None, kind=AdapterRank, **options):
    """``MegatronRanks`` on ``layout`` (``world`` included) of a model with adapters of rank 4."""
    degrees = {name: degree for name, degree in layout.items() if name != "world"}
    keys = bodies.KEYS | {f"{bodies.LORA}sync_mode": "memory"} | (overrides or {})
    return MegatronRanks(
        pool, folder, layout["world"], degrees | {"overrides": keys}, BUCKET_BYTES, kind=kind, **options
    )


def pairs_of(folder, overrides=None):
    """The adapters of a run on ``folder``."""
    from skyrl_megatron_lora.tensors import configured_pairs

    memory = {f"{bodies.LORA}sync_mode": "memory"}
    return configured_pairs(config(folder, overrides=bodies.KEYS | memory | (overrides or {})))


def adapted(folder, overrides=None, **settings):
    """Settings of an engine for the adapters of a run on ``folder``."""
    from skyrl_megatron_lora.tensors import adapter_slots

    extra = {"worker_extension_cls": "tests.lora.faulty_workers.FaultyWorker"}
    slots = adapter_slots(pairs_of(folder, overrides))
    return tiny_settings(folder, **{"adapters": slots, "extra": extra} | settings)


def synchronizer(pool, trainer, folder, overrides=None, **options):
    from bridges.files import text_config
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer
    from skyrl_megatron_lora.tensors import SentPairs

    options = (
        dict(dtype="float32", bucket_sizes=(BUCKET_BYTES,), phase_s=60.0, deadline_s=300.0, reshard=True) | options
    )
    hf = text_config(json.loads((folder / "config.json").read_text()))
    sent = SentPairs(pairs_of(folder, overrides))
    return WeightSynchronizer(pool, trainer.handles, hf_config=hf, adapters=sent, **options)
