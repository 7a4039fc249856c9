"""Roles and engines on the same GPUs: who is placed where, what an engine sees, and how weights get there.

The GPUs are Ray's counters: there are none. ``device.has_cuda`` is told otherwise in this process.
"""

from __future__ import annotations

import os
import time

import pytest

KEYS = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    "trainer.placement.ref_num_gpus_per_node": 4,
    "generator.inference_engine.num_engines": 2,
    "generator.inference_engine.tensor_parallel_size": 2,
    "trainer.algorithm.use_kl_loss": True,
}


def config(**changes):
    from skyrl_megatron.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides(
        KEYS | {name.replace("__", "."): value for name, value in changes.items()}
    )


@pytest.fixture
def four_gpus(session_ray, monkeypatch):
    from skyrl_megatron import device

    monkeypatch.setattr(device, "has_cuda", lambda: True)
    with session_ray.joined():
        yield


class Seen:
    def __init__(self, gpus=None):
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


def test_places_on_shared_gpus(four_gpus):
    """Every rank has a GPU with a rank of each role; an engine has two of them, and sees all of the node."""
    import ray

    from skyrl_megatron.workers.placement import create_placement

    placement = create_placement(config())
    actor = ray.remote(Seen)
    ranks = {
        role: [actor.options(**placement[role].options(rank)).remote() for rank in range(4)]
        for role in ("policy", "ref")
    }
    engines = placement["engines"]
    seen = [engines.visible_gpus(number, 2) for number in range(2)]
    started = [actor.options(**engines.options(number, 2)).remote(seen[number]) for number in range(2)]
    found = {role: ray.get([each.gpus.remote() for each in actors], timeout=60) for role, actors in ranks.items()}
    assert found["policy"] == found["ref"] and sorted(found["policy"]) == ["0", "1", "2", "3"]
    policy = found["policy"]
    assert seen == [policy, [*policy[2:], *policy[:2]]]
    assert ray.get([each.gpus.remote() for each in started], timeout=60) == [",".join(gpus) for gpus in seen]
    placement.remove()


def test_gpus_that_do_not_answer_are_given_back(four_gpus, monkeypatch):
    import ray

    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers import placement

    monkeypatch.setattr(placement, "READY_TIMEOUT_S", 0.001)
    with pytest.raises(LaunchError, match=r"the 4 GPUs reserved for the run do not answer: .*ray status"):
        placement.create_placement(config(), timeout_s=60.0)
    deadline = time.monotonic() + 300
    while ray.available_resources().get("GPU") != 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["GPU"] == 4


def test_an_engine_on_two_nodes_is_refused():
    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers.placement import BundleAllocation, Gpu

    gpus = tuple(Gpu(node, number) for node in ("one", "two") for number in ("0", "1", "2"))
    engines = BundleAllocation(None, (0, 2, 4), 0.5, gpus)
    assert engines.visible_gpus(0, 2) == ["0", "1", "2"]
    with pytest.raises(LaunchError, match=r"engine 1 would span two nodes.* of 2 GPUs"):
        engines.visible_gpus(1, 2)


@pytest.mark.parametrize(
    ("changes", "transport", "path"),
    [
        ({}, "ipc", "by shared memory"),
        ({"generator__inference_engine__data_parallel_size": 2}, "ipc", "by exchange and shared memory"),
        ({"trainer__placement__policy_num_nodes": 2}, "ipc", "by exchange and shared memory"),
        ({"trainer__placement__colocate_all": False}, "nccl", "over nccl"),
        (
            {"trainer__placement__colocate_all": False, "generator__inference_engine__weight_sync_backend": "gloo"},
            "gloo",
            "over gloo",
        ),
    ],
)
def test_what_carries_the_weights(changes, transport, path):
    from skyrl_megatron.config.roles import weight_path, weight_transport

    assert weight_transport(config(**changes)) == transport
    assert weight_path(config(**changes), sliced=True) == f"own part {path}"
