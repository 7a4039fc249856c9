"""Memory that leaves and comes back, with every kind of optimizer that a GPU runs."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.gpu import installed
from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

PROVES = "weights, gradients and every kind of optimizer state leave the GPU and come back whole, and training goes on"
REPORT = "which check of the option failed: bytes left behind, contents, or weights that the optimizer no longer moves"
O = f"{MEGATRON}optimizer_config_kwargs."  # noqa: E741
AWARE = {f"{O}use_precision_aware_optimizer": True}
HOST = {f"{O}optimizer_cpu_offload": True}
OPTIONS = {
    "distributed": {},
    "not distributed": NO_DISTRIBUTED,
    "precision-aware": AWARE,
    "bf16 moments": AWARE | {f"{O}exp_avg_dtype": "bf16", f"{O}exp_avg_sq_dtype": "bf16"},
    "fp8 moments": AWARE | {f"{O}exp_avg_dtype": "fp8", f"{O}exp_avg_sq_dtype": "fp8"},
    "on the host": HOST | {f"{O}optimizer_offload_fraction": 1.0},
    "half on the host": HOST | {f"{O}optimizer_offload_fraction": 0.5},
    "half on the host, overlapped": HOST
    | {f"{O}optimizer_offload_fraction": 0.5, f"{O}overlap_cpu_optimizer_d2h_h2d": True},
    "half on the host, precision-aware": HOST | AWARE | {f"{O}optimizer_offload_fraction": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = dict(num_hidden_layers=4, hidden_size=64, moe_intermediate_size=32, head_dim=64, num_key_value_heads=2)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("model"), initializer_range=0.1, **sizes)


NEEDED = {"te": AWARE, "gpu": HOST}
"""Precision-aware optimizers need Transformer Engine's Adam, those on the host a device beside it."""
HERE = [
    name
    for name, keys in OPTIONS.items()
    if not any(NEEDED[lacking].items() <= keys.items() for lacking in installed.missing() & NEEDED.keys())
]
CASES = [(layers, option) for layers in installed.layer_choices() for option in HERE]


def asked(layers: str, option: str):
    """The settings of a case."""
    choice = {f"{MEGATRON}transformer_config_kwargs.transformer_impl": layers}
    return {"trainer.bf16": True} | choice | OPTIONS[option]


@pytest.mark.parametrize(("layers", "option"), CASES)
def test_leaves_and_comes_back(ranks, folder, layers, option):
    overrides = asked(layers, option)
    ranks(1, bodies.leaves_and_comes_back, folder, reference.make_batch(vocab_size=1003), overrides)
