"""A batch that is larger than Ray's object store: Ray spills it to disk, and ranks get every row."""

import numpy as np
import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
STORE = 100 << 20
"""Bytes of the object store."""
TOKENS, ROWS = 24_000_000, 240
"""Their tokens alone take 92 MiB, with log-probs and advantages 370 MiB."""


class Rank:
    def score(self, share):
        return share.batch().tokens.float().numpy()

    def train(self, share):
        batch = share.batch()
        return int(batch.tokens.long().sum()), float(batch.old_logprobs.double().sum()), int(batch.loss_mask.sum())


def test_a_batch_larger_than_the_store_reaches_the_ranks():
    import ray
    import torch

    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.runtime.flops import ModelFlops
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.dispatch import RankInfo, _store_bytes, dispatch
    from skyrl_megatron.workers.ray_setup import local_ray

    tokens, lengths = torch.arange(TOKENS, dtype=torch.int32) % 1009, np.full(ROWS, TOKENS // ROWS)
    masks = [torch.ones(TOKENS, dtype=torch.bool) for _ in range(2)]
    flops, infos = ModelFlops(1.0, 0.0, 0.0, 0), [RankInfo(number, 2, True, 0, "") for number in range(2)]
    batch = TrainingBatch(tokens, lengths, lengths, *masks, [str(row) for row in range(ROWS)])
    with local_ray(2, object_store_bytes=STORE):
        ranks = [ray.remote(num_cpus=1)(Rank).remote() for _ in range(2)]
        _store_bytes.cache_clear()  # it knows the store of another test
        sharded = dispatch(batch, 2, flops, trains=False)
        shares = [share for (share,) in sharded.arguments(infos)]
        scores = ray.get([rank.score.remote(share) for rank, share in zip(ranks, shares, strict=True)], timeout=120)
        batch.old_logprobs = sharded.collect(infos, scores)
        assert torch.equal(batch.old_logprobs, tokens.float())
        batch.advantages, batch.rollout_logprobs = torch.randn(TOKENS), torch.randn(TOKENS)
        for _ in range(2):  # also when earlier objects come back from disk
            with pytest.warns(SkyRLMegatronWarning, match=r"object store of this host \(0.10 GiB\): Ray writes"):
                batch.carried.blocks[0].references.clear(), batch.carried.blocks[0].states.clear()  # is put again
                shares = dispatch(batch, 2, flops).shares
            sums = ray.get([rank.train.remote(share) for rank, share in zip(ranks, shares, strict=True)], timeout=120)
            of_all = [sum(values) for values in zip(*sums, strict=True)]
            assert of_all == [int(tokens.long().sum()), float(tokens.double().sum()), TOKENS]
        assert batch.carried.bytes > 3 * STORE
        batch.carried = None
        _store_bytes.cache_clear()
