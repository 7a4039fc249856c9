"""Mistakes that a trainer of adapters can make, planted into ours: the tests must see each."""

import contextlib
from functools import partial
from unittest import mock


@contextlib.contextmanager
def planted(fault, engine):
    """Run with the mistake called ``fault``; None plants nothing."""
    if fault is None:
        yield
    elif fault == "expert factors not summed over etp":
        with mock.patch.object(engine.adapters, "sum_over_etp", lambda: None):
            yield
    elif fault == "whole factors not summed over tp":
        for factor in engine.adapters.factors():
            factor.tensor.sequence_parallel = False
        yield
    elif fault == "scale of a rank's share":
        for chunk in engine.model.chunks:
            for adapter in chunk.adapters:
                adapter.scale /= engine.groups.tp.size()
        yield
    elif fault == "gate and up swapped":
        for chunk in engine.model.chunks:
            for adapter in chunk.adapters:
                if adapter.projections == ("gate_proj", "up_proj"):
                    for low_rank in adapter.low_ranks.values():
                        gate, up = low_rank.B.data.chunk(2, -2)
                        low_rank.B.data.copy_(__import__("torch").cat([up, gate], -2))
        engine.optimizer.reload_model_params()
        yield
    elif fault == "expert factors not summed over edp":
        for chunk in engine.chunks:
            chunk.expert_parallel_bucket_groups = []
        yield
    elif fault == "ep offset missing":
        for chunk in engine.model.chunks:
            for adapter in chunk.adapters:
                if adapter.experts is not None:
                    adapter._held = partial(range, len(adapter.experts))
        yield
    else:
        raise KeyError(fault)
