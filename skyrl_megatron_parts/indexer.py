"""The metric of an indexer that is trained (``dsa_indexer_loss_coeff``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.runtime.model.family_attention import SelectedAttention
from skyrl_megatron.runtime.parts import PartSetup, RankPart


class IndexerLoss(RankPart):
    """Measures how far the indexer's scores are from the attention weights that it learns to predict."""

    name = "indexer_loss"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether the indexer of a trained role has a loss."""
        return not is_frozen(setup.role) and bool(setup.model.config.dsa_indexer_loss_coeff)

    def end_pass(self, loads: Mapping[int, Tensor]) -> dict[str, float]:
        """Return ``indexer_loss``: mean divergence per query and layer in nats, over all ranks, since the last call.

        With tp each rank has all queries. Empty if no layer has an indexer.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=device.device())  # divergences, queries
        for chunk in self.setup.model.chunks:
            for module in chunk.modules():
                if isinstance(module, SelectedAttention) and module.divergence is not None:
                    sums += module.divergence
                    module.divergence = None
        dist.all_reduce(sums)
        return {"indexer_loss": float(sums[0] / sums[1])} if sums[1] else {}
