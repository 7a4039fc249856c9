"""A rank that holds up the others is found by its own time, and named once."""


def test_a_slow_rank_is_named_once_until_it_was_fast_again():
    from skyrl_megatron_observe.stragglers import STEPS, Stragglers

    said = []
    watch = Stragglers(said.append)
    names = [f"policy rank {rank}" for rank in range(4)]
    even, slow = (dict(zip(names, seconds, strict=True)) for seconds in ([1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 2.5, 1.0]))
    assert watch.look("policy", even) == {
        "trainer/policy_slowest_rank_ratio": 1.1,
        "trainer/policy_stragglers": 0.0,
    }
    for _ in range(STEPS - 1):
        assert watch.look("policy", slow)["trainer/policy_stragglers"] == 0.0
    watch.look("policy", even)
    for _ in range(STEPS):
        assert not said
        found = watch.look("policy", slow)
        watch.look("critic", even)
    assert found == {"trainer/policy_slowest_rank_ratio": 2.5, "trainer/policy_stragglers": 1.0}
    for _ in range(5):
        watch.look("policy", slow)
    (line,) = said
    assert line.startswith("straggler: policy rank 2 worked 2.5 s in this step, 2.5 times as long as the others")
    watch.look("policy", even)
    for _ in range(STEPS):
        watch.look("policy", slow)
    assert len(said) == 2


def test_of_two_ranks_each_is_measured_by_the_other_and_short_times_do_not_count():
    from skyrl_megatron_observe.stragglers import STEPS, Stragglers

    said = []
    watch = Stragglers(said.append)
    for _ in range(STEPS + 1):
        watch.look("policy", {"a": 0.1, "b": 0.3})
        watch.look("critic", {"c": 0.001, "d": 0.01})
        assert watch.look("teacher", {}) == {} == watch.look("ref", {"alone": 3.0})
    assert len(said) == 1 and "straggler: b worked" in said[0]


def test_a_run_gets_the_metrics_of_all_roles_and_the_lines_of_slow_ranks():
    from types import SimpleNamespace

    from skyrl_megatron_observe.stragglers import STEPS, StragglerRecorder

    said = []
    recorder = StragglerRecorder(SimpleNamespace(tracker=SimpleNamespace(say=said.append)))
    for _ in range(STEPS):
        metrics = recorder.rank_metrics({"policy": {"a": 1.0, "b": 3.0}, "critic": {"c": 1.0, "d": 1.0}, "ref": {}})
    assert metrics == {
        "trainer/policy_slowest_rank_ratio": 3.0,
        "trainer/policy_stragglers": 1.0,
        "trainer/critic_slowest_rank_ratio": 1.0,
        "trainer/critic_stragglers": 0.0,
    }
    assert len(said) == 1
