"""Masters of which an optimizer keeps the lower half alone: put together and cut as Transformer Engine's kernel does
(transformer_engine/common/multi_tensor/adam.cu). With its Adam itself: ``tests/te``."""

import numpy as np

EDGES = [0x3F808000, 0x3F818000, 0xBF818000, 0, 0x80000000, 1, 0x80000001, 0x8000, 0x7F008000, 0x3F807FFF, 0xFF7F7FFF]


def masters():
    """fp32 numbers of all sizes and signs, and those at the edges of rounding."""
    drawn = np.random.default_rng(0).integers(0, 0x7F7F0000, 20_000, dtype=np.uint32)
    return np.concatenate([drawn, drawn | np.uint32(1 << 31), np.array(EDGES, dtype=np.uint32)])


def cut(bits):
    """The kernel's: the upper half, one more where the lower is negative; the lower half."""
    lower = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
    return ((bits >> 16) + (lower < 0)).astype(np.uint16).view(np.int16), lower


def test_halves_are_those_of_the_kernel():
    import torch

    from skyrl_megatron.runtime.checkpoint.rank_state import join_master, remainder

    bits = masters()
    upper, lower = cut(bits)
    weight, master = torch.from_numpy(upper).view(torch.bfloat16), torch.from_numpy(bits.view(np.float32))
    assert np.array_equal(join_master(weight, torch.from_numpy(lower)).numpy().view(np.uint32), bits)
    assert np.array_equal(remainder(weight, master).numpy(), lower)


def test_weights_that_torch_rounded():
    """To even, half-way between two: such a master has no lower half, and the nearest is one unit away."""
    import torch

    from skyrl_megatron.runtime.checkpoint.rank_state import join_master, remainder

    bits = masters()
    master = torch.from_numpy(bits.view(np.float32))
    weight = master.bfloat16()
    found = join_master(weight, remainder(weight, master)).numpy().view(np.uint32)
    off = np.flatnonzero(found != bits)
    assert np.array_equal(found[off], bits[off] - 1) and np.all(bits[off] & 0xFFFF == 0x8000)
    down = np.array([0x3F808000, 0x8000, 0x7F008000], dtype=np.uint32)
    assert set(down) <= set(bits[off]), "the three of EDGES that are rounded down"
