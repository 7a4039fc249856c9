"""State of Transformer Engine's Adam: its bytes are those that ``--check`` counts, and checkpoints carry it from one
kind of optimizer to another."""

import numpy as np
import pytest

from tests.bridges.tiny_models import save_tiny
from tests.te import adam
from tests.te.adam import AWARE

KINDS = {
    "usual": {},
    "lower halves": AWARE,
    "whole masters": AWARE | {"store_param_remainders": False},
    "bf16 moments": AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp16": AWARE | {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"},
    "fp8 moments": AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # sizes that are multiples of 64, to which Megatron pads each parameter in its buffers
    sizes = dict(hidden_size=128, moe_intermediate_size=64, num_key_value_heads=2, vocab_size=1024)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("model"), num_hidden_layers=2, **sizes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_takes_what_check_counts(ranks, folder, kind, dtype):
    """Made before the first step, as a resumed run does, whose optimizer has taken none."""
    (held, copied), (counted, unscaled) = ranks(1, adam.state_bytes, folder, KINDS[kind], dtype)[0]
    assert abs(counted - held) <= 0.01 * held, f"counted {counted:,}, there are {held:,}"
    assert abs(unscaled - copied) <= 0.01 * copied, f"counted {unscaled:,}, a checkpoint copies {copied:,}"


SAME = [(kind, kind) for kind in KINDS if kind != "fp8 moments"]
OTHER = [("lower halves", "usual"), ("usual", "lower halves"), ("bf16 moments", "usual"), ("usual", "bf16 moments")]


@pytest.mark.parametrize(("source", "target"), [*SAME, *OTHER], ids=" to ".join)
def test_checkpoints_go_from_one_kind_to_another(ranks, folder, tmp_path, source, target):
    root = str(tmp_path / "run")
    before = ranks(1, adam.saved, folder, root, KINDS[source])[0]
    after = ranks(1, adam.loaded, folder, root, KINDS[target])[0]
    assert after.keys() == before.keys() and len(before) > 10
    for name, (weight, master, *moments) in before.items():
        found_weight, found_master, *found_moments = after[name]
        assert np.array_equal(found_weight, weight), name
        if source == target == "fp16":  # scaled anew
            np.testing.assert_allclose(found_master, master, rtol=1e-3, atol=1e-6, err_msg=name)
        elif source == "usual" != target:
            check_halves(found_master, master, name)
        else:
            assert np.array_equal(found_master, master), name
        for one, other in zip(found_moments, moments, strict=True):
            if target == "bf16 moments" != source or target == "fp16":
                np.testing.assert_allclose(one, other, rtol=2**-8, atol=1e-6, err_msg=name)
            else:
                assert np.array_equal(one, other), name


def check_halves(found, master, name):
    """Equal, but for masters half-way between two weights, which have no lower half: one unit in the last place."""
    bits, wanted = found.view(np.int32), master.view(np.int32)
    off = bits != wanted
    assert np.abs(bits - wanted).max() <= 1 and np.all(wanted[off] & 0xFFFF == 0x8000), name
