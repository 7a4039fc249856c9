"""A rank that holds up the others is found by its own time, and named once."""

import time


def test_a_slow_rank_is_named_once_until_it_was_fast_again():
    from skyrl_megatron.trainer.stragglers import STEPS, Stragglers

    said = []
    watch = Stragglers(said.append)
    names = [f"policy rank {rank}" for rank in range(4)]
    even, slow = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 2.5, 1.0]
    assert watch.look("policy", even, names) == {
        "trainer/policy_slowest_rank_ratio": 1.1,
        "trainer/policy_stragglers": 0.0,
    }
    for _ in range(STEPS - 1):
        assert watch.look("policy", slow, names)["trainer/policy_stragglers"] == 0.0
    watch.look("policy", even, names)
    for _ in range(STEPS):
        assert not said
        found = watch.look("policy", slow, names)
        watch.look("critic", even, names)
    assert found == {"trainer/policy_slowest_rank_ratio": 2.5, "trainer/policy_stragglers": 1.0}
    for _ in range(5):
        watch.look("policy", slow, names)
    (line,) = said
    assert line.startswith("straggler: policy rank 2 worked 2.5 s in this step, 2.5 times as long as the others")
    watch.look("policy", even, names)
    for _ in range(STEPS):
        watch.look("policy", slow, names)
    assert len(said) == 2


def test_of_two_ranks_each_is_measured_by_the_other_and_short_times_do_not_count():
    from skyrl_megatron.trainer.stragglers import STEPS, Stragglers

    said = []
    watch = Stragglers(said.append)
    for _ in range(STEPS + 1):
        watch.look("policy", [0.1, 0.3], ["a", "b"])
        watch.look("critic", [0.001, 0.01], ["c", "d"])
        assert watch.look("teacher", [], []) == {} == watch.look("ref", [3.0], ["alone"])
    assert len(said) == 1 and "straggler: b worked" in said[0]


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
