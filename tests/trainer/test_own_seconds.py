"""A rank's own time is what it worked, without its waits for other ranks."""

import time


def measured(rank_that_is_slow):
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime import parallel_state as waits

    waits.start_wait_timer()
    waits.start_wait_timer()
    wall, own = time.perf_counter(), waits.own_seconds()
    for _ in range(3):
        if dist.get_rank() == rank_that_is_slow:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(8))
    return time.perf_counter() - wall, waits.own_seconds() - own


def test_waits_for_others_are_left_out(ranks):
    """All ranks take equally long; whose time it was shows in their own seconds."""
    (wall, own), (wall_of_slow, own_of_slow) = ranks(2, measured, 1)
    assert min(wall, wall_of_slow) >= 1.4, "both took the time"
    assert own_of_slow >= 1.5 and own_of_slow > 2 * own
