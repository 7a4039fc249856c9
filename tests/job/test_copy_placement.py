"""Who keeps whose copy: on another host wherever there is one."""

import pytest


@pytest.mark.parametrize(
    ("nodes", "distance"),
    [("a", 0), ("aa", 1), ("ab", 1), ("aabb", 2), ("aaaabbbb", 4), ("aabbcc", 2), ("aaab", 1), ("abcd", 1)],
)
def test_the_nearest_that_is_elsewhere(nodes, distance):
    from skyrl_megatron.workers.placement import peer_distance

    assert peer_distance(nodes) == distance
    if len(set(nodes)) > 1 and all(nodes.count(node) == nodes.count(nodes[0]) for node in nodes):
        assert all(nodes[rank] != nodes[(rank + distance) % len(nodes)] for rank in range(len(nodes)))


def test_a_copy_is_gone_with_its_keeper():
    from skyrl_megatron.workers.placement import find_peer_holders

    assert find_peer_holders([1], 1, 4) == {1: 2}
    assert find_peer_holders([0, 1], 2, 4) == {0: 2, 1: 3}
    assert find_peer_holders([1, 2], 1, 4) is None and find_peer_holders([0], 0, 1) is None
    assert find_peer_holders([], 1, 4) == {}
