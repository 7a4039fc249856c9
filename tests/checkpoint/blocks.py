"""Blocks of plain tensors, for tests and benchmarks that need bytes and no model."""


def plain_blocks(tensors: int, mib: int, rank: int = 0, ranks: int = 1, seed: int = 0):
    """``tensors`` fp32 tensors of ``mib`` MiB on this rank, each the ``rank``-th part of a global one."""
    import torch

    from skyrl_megatron.runtime.checkpoint.rank_state import Block

    generator = torch.Generator().manual_seed(seed + rank)
    rows = mib * 2**20 // 4096
    made = []
    for index in range(tensors):
        data = torch.empty(rows * 1024)
        data.uniform_(generator=generator)
        made.append(Block(f"tensor.{index}", (rows * ranks, 1024), (rows * rank, 0), (rows, 1024), data))
    return made
