"""Where ranks and engines go on the GPUs of a cluster, and what their processes are told.

The GPUs are Ray's counters: there are none."""

from __future__ import annotations

import os

import pytest

from tests.support import hub_endpoint

M = "trainer.policy.megatron_config."


def config(*assignments):
    from skyrl_megatron.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides(list(assignments))


def test_variables_that_reach_every_actor(monkeypatch):
    from skyrl_megatron.workers.runtime_env import forwarded, worker_environment

    given = {
        **{"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "9"},
        **{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NVTE_DEBUG": "1"},
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    found = forwarded()
    assert given.items() <= found.items()
    assert not given.keys() & worker_environment().keys(), "which Ray writes down"
    assert not {"SOMETHING_ELSE", "NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"} & found.keys()


def test_kernels_are_compiled_by_the_nvcc_of_the_environment(tmp_path, monkeypatch):
    """Unless the user names another CUDA, and where the package is installed alone."""
    import sys
    import sysconfig

    from skyrl_megatron.device import compiler_environment
    from skyrl_megatron.inference.vllm import settings as platform
    from skyrl_megatron.workers.runtime_env import joined_environment, worker_environment

    home, programs = tmp_path / "nvidia" / "cu13", f"{sys.prefix}/bin"
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    (home / "bin").mkdir(parents=True)
    assert compiler_environment() == {}, "CUDA's libraries without a compiler"
    (home / "bin" / "nvcc").touch()
    expected = {"CUDA_HOME": str(home), "PATH": f"{programs}:/usr/bin"}
    assert compiler_environment() == expected
    assert expected.items() <= platform.worker_environment().items()
    assert not expected.keys() & worker_environment().keys(), "which Ray writes down, and is of another node"
    joined_environment()["worker_process_setup_hook"]()
    assert os.environ == expected
    assert compiler_environment() == {}, "once is enough"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin", name: "/usr/local/cuda"})
        assert compiler_environment() == {"PATH": f"{programs}:/usr/bin"}


@pytest.mark.parametrize(
    ("assignment", "ordered"),
    [
        (f"{M}expert_model_parallel_size=2", False),
        (f"{M}tensor_model_parallel_size=2", True),
        (f"{M}context_parallel_size=2", True),
        (f"{M}ddp_config.overlap_grad_reduce=true", True),
    ],
)
def test_kernels_run_in_order_on_ranks_that_overlap(monkeypatch, assignment, ordered):
    from skyrl_megatron.workers.ray_setup import rank_environment

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert rank_environment(config(assignment), "policy").get(connections) == ("1" if ordered else None)
    monkeypatch.setenv(connections, "8")
    assert rank_environment(config(assignment), "policy").get(connections) == ("8" if ordered else None)


def test_memory_for_other_processes_is_not_in_segments_that_grow(monkeypatch):
    """With what torch itself says of its allocator; the rest of the options stays."""
    import torch

    from skyrl_megatron import device

    now, options = torch._C._accelerator_getAllocatorSettings, "max_split_size_mb:512,expandable_segments:True"
    before = now()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    torch._C._accelerator_setAllocatorSettings(options)
    try:
        with pytest.raises(ZeroDivisionError), device.fixed_segments():
            assert now() == "max_split_size_mb:512,expandable_segments:False"
            1 / 0  # noqa: B018
        assert now() == options
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
        with device.fixed_segments():
            assert now() == options, "nothing to change"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_ranks_on_gpus_have_their_share_of_the_cores(monkeypatch):
    from skyrl_megatron.workers import placement
    from skyrl_megatron.workers.ray_setup import rank_environment
    from skyrl_megatron.workers.runtime_env import DEFAULT_THREADS, worker_environment

    for name in ("OMP_NUM_THREADS", DEFAULT_THREADS):
        monkeypatch.delenv(name, raising=False)
    actors = worker_environment()
    assert actors["OMP_NUM_THREADS"] == "1", "where there are no GPUs"
    assert rank_environment(config(), "policy", 12)["OMP_NUM_THREADS"] == "12"
    for name in ("OMP_NUM_THREADS", DEFAULT_THREADS):  # a run that is an actor of a joined cluster finds these
        monkeypatch.setenv(name, actors[name])
    assert rank_environment(config(), "policy", 12)["OMP_NUM_THREADS"] == "12"
    monkeypatch.delenv(DEFAULT_THREADS)
    assert "OMP_NUM_THREADS" not in rank_environment(config(), "policy", 12), "the user's 1"
    assert DEFAULT_THREADS not in worker_environment()

    def cluster(*nodes):
        resources = [{"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {}) for cpus, gpus in nodes]
        monkeypatch.setattr(placement.ray, "nodes", lambda: [{"Alive": True, "Resources": each} for each in resources])
        return placement.cores_per_gpu()

    assert cluster((208, 8), (96, 8), (64, 0)) == 12
    assert cluster((4, 8)) == 1 and cluster((64, 0)) == 1


def test_a_port_is_free_on_the_address_that_it_is_used_on():
    import socket

    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers.runtime_env import free_port

    with socket.create_server(("127.0.0.2", 0)) as taken:
        with socket.create_server(("127.0.0.1", free_port())):
            port = free_port("127.0.0.2")
            assert port != taken.getsockname()[1]
            socket.create_server(("127.0.0.2", port)).close()
    with pytest.raises(LaunchError, match=r"no free port on 192\.0\.2\.1: .*--node-ip-address"):
        free_port("192.0.2.1")


def test_a_port_is_held_until_it_is_listened_on():
    """Rank 0 names it, and imports Megatron before the process group's store listens there."""
    import datetime
    import socket

    import torch.distributed as dist

    from skyrl_megatron.workers.runtime_env import LOOPBACK, take_port

    holder, timeout = take_port(), datetime.timedelta(seconds=30)
    port = holder.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        socket.create_server((LOOPBACK, port))
    server = dist.TCPStore(LOOPBACK, port, 2, True, timeout, False, master_listen_fd=holder.detach())
    server.set("key", "value")
    assert dist.TCPStore(LOOPBACK, port, 2, False, timeout).get("key") == b"value"


TWO_NODES = [
    "trainer.placement.policy_num_nodes=2",
    "trainer.placement.policy_num_gpus_per_node=1",
    "generator.inference_engine.num_engines=1",
    "generator.inference_engine.tensor_parallel_size=2",
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A model hub of ours, and the folder in which each of three nodes keeps what it fetches."""
    with hub_endpoint.serve() as server:
        server.homes = [tmp_path_factory.mktemp("node") for _ in range(3)]
        yield server


@pytest.fixture(scope="module")
def nodes(hub):
    """A cluster of three nodes with a GPU each, as Ray counts them, and a head without; their ids."""
    import ray
    from ray.cluster_utils import Cluster

    node = dict(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
    cluster = Cluster(initialize_head=True, head_node_args=node | {"num_gpus": 0, "include_dashboard": False})
    try:
        for home in hub.homes:
            variables = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
            cluster.add_node(**node, env_vars=variables)
        cluster.wait_for_nodes(timeout=60)
        ray.init(address=cluster.address, logging_level="ERROR")
        os.environ["RAY_ADDRESS"] = cluster.address
        yield [node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU")]
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


class Workers:
    """In an engine's place: vLLM's own Ray executor, up to where its workers would open a GPU."""

    def __init__(self, environment):
        os.environ.update(environment)

    def start(self):
        from types import SimpleNamespace

        import ray
        from vllm.config import ParallelConfig
        from vllm.platforms import current_platform
        from vllm.v1.executor import ray_executor_v2

        type(current_platform).ray_device_key = "GPU"  # what the platform says where there are GPUs

        class Worker(ray_executor_v2.RayWorkerProc):
            """The real actor; instead of a GPU it opens nothing, and tells where it is."""

            def get_node_and_physical_gpu_ids(self):
                context = ray.get_runtime_context()
                self.place = context.get_node_id(), [int(gpu) for gpu in context.get_accelerator_ids()["GPU"]]
                return self.place

            def initialize_worker(self, local_rank, *_, assigned_physical_gpu_ids, **__):
                raise LookupError(f"{self._init_kwargs['rank']} {local_rank} {assigned_physical_gpu_ids}")

        ray_executor_v2.RayWorkerProc = Worker
        group = ray.util.get_current_placement_group()
        parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray", placement_group=group)
        executor = ray_executor_v2.RayExecutorV2.__new__(ray_executor_v2.RayExecutorV2)
        executor.parallel_config = parallel
        executor.vllm_config = SimpleNamespace(
            parallel_config=parallel, instance_id="test", weight_transfer_config=None, logging_config=None
        )
        try:
            executor._init_executor()
        except ray.exceptions.RayTaskError as error:
            assert isinstance(error.cause, LookupError), error
        handles = executor.ray_worker_handles
        return [
            (handle.rank, handle.local_rank, *ray.get(handle.actor.get_node_and_physical_gpu_ids.remote()))
            for handle in handles
        ]

    def where(self):
        import ray

        return ray.get_runtime_context().get_node_id()


@pytest.mark.process
def test_workers_of_an_engine_over_two_nodes_find_their_gpus(nodes):
    """On GPUs that policy and reference use too: each has its share of both, and vLLM's workers the rest."""
    import ray

    from skyrl_megatron.workers.placement import create_placement

    placement = create_placement(config(*TWO_NODES, "trainer.algorithm.use_kl_loss=true"))
    engines = placement["engines"]
    assert engines.over_nodes(0, 2) and engines.engine_executor(0, 2) == "ray"
    environment = engines.engine_environment(0, 2)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "" and environment["VLLM_RAY_PER_WORKER_GPUS"] == "0.333333"
    ranks = [
        ray.remote(Workers).options(**placement[role].options(rank)).remote({})
        for role in ("policy", "ref")
        for rank in (0, 1)
    ]
    lie = ray.get([rank.where.remote() for rank in ranks], timeout=120)
    assert lie[:2] == lie[2:] and len(set(lie)) == 2 and set(lie) <= set(nodes)
    engine = ray.remote(Workers).options(**engines.options(0, 2)).remote(environment)
    workers = ray.get(engine.start.remote(), timeout=240)
    assert [(rank, local) for rank, local, *_ in workers] == [(0, 0), (1, 0)]
    assert [node for _, _, node, _ in workers] == lie[:2] == [gpu.node for gpu in engines.gpus]
    assert [gpus for *_, gpus in workers] == [[int(gpu.id)] for gpu in engines.gpus]
    placement.remove()


@pytest.mark.process
def test_an_engine_over_nodes_on_gpus_of_its_own(nodes):
    """One-GPU bundles, of which the engine's actor takes none."""
    from skyrl_megatron.workers.placement import create_placement

    apart = ["trainer.placement.colocate_all=false", "generator.inference_engine.tensor_parallel_size=2"]
    placement = create_placement(config(*apart))
    engines = placement["engines"]
    assert engines.engine_executor(0, 2) == "ray" and engines.options(0, 2)["num_gpus"] == 0
    assert engines.group.bundle_specs == [{"GPU": 1.0, "CPU": 1.0}] * 2
    assert [gpu.node for gpu in engines.gpus] == sorted(gpu.node for gpu in engines.gpus)
    assert engines.engine_environment(0, 2) == {
        "CUDA_VISIBLE_DEVICES": engines.gpus[0].id,
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(gpu.bundle) for gpu in engines.gpus),
        "VLLM_RAY_PER_WORKER_GPUS": "1",
    }
    placement.remove()


@pytest.mark.process
def test_a_hub_model_is_on_every_node_before_anything_there_needs_it(nodes, hub, tmp_path, monkeypatch):
    from skyrl_megatron.config.hf_model import model_folder
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.workers import placement
    from skyrl_megatron.workers.nodes import fetch_models

    repository = hub.repository("acme/tiny")
    hub_endpoint.use(monkeypatch, tmp_path, HF_ENDPOINT=hub.url)
    cfg = config("trainer.policy.model.path=acme/tiny")

    def push(weights):
        files = {"config.json": b"{}", "model.safetensors": weights}
        cfg.trainer.hub_commits = {"acme/tiny@main": repository.push(files)}
        return files

    def on_nodes():
        snapshot = f"hub/models--acme--tiny/snapshots/{cfg.trainer.hub_commits['acme/tiny@main']}"
        return [hub_endpoint.folder_files(home / snapshot) for home in hub.homes]

    files, group = push(b"first"), placement.reserve("policy", [{"GPU": 1.0}] * 3)
    place = placement.Placement({"policy": placement.BundleAllocation(group, (0, 1, 2))})
    try:
        fetch_models(cfg, ["policy"], place, print)
        assert on_nodes() == [files] * 3
        push(b"second")
        model_folder(cfg)  # here it is; the nodes have lost their permission meanwhile
        repository.gated = True
        with pytest.raises(ConfigError, match=r"trainer.policy.model.path=acme/tiny: on node \S+: .* is gated"):
            fetch_models(cfg, ["policy"], place, print)
        assert not any("model.safetensors" in found for found in on_nodes())
    finally:
        place.remove()


@pytest.mark.process
def test_the_gpus_of_a_cluster_are_asked_of_the_cluster(nodes, capsys):
    """This process is on the head, which has none, and still a run on GPUs is what is checked."""
    from skyrl_megatron import device
    from skyrl_megatron.checks import run_hardware
    from skyrl_megatron.config.hardware import Hardware, lockable_bytes, own_memory
    from skyrl_megatron.entrypoints import check

    sizes = (device.driver_gpu_bytes(), own_memory(), lockable_bytes())  # nodes are on this machine
    assert run_hardware() == Hardware(1, 3, *sizes, elsewhere=True)
    keys = ["data.train_data=['a/b']", "data.val_data=[]", "trainer.placement.policy_num_nodes=4"]
    assert check.run(["--check", *keys, "generator.inference_engine.num_engines=4"]) == 2
    assert "the run takes 4 (policy) = 4 GPUs, but there are 3" in capsys.readouterr().err


@pytest.mark.process
def test_a_cluster_that_is_not_there(monkeypatch):
    from skyrl_megatron.checks import run_hardware
    from skyrl_megatron.errors import LaunchError

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(LaunchError, match=r"RAY_ADDRESS=127\.0\.0\.1:1: no Ray cluster answers .*RAY_AUTH_TOKEN"):
        run_hardware()
