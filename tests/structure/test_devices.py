"""Who asks which device it is, and why: what a device can do differs, the order of things and defaults do not. A new
question needs a reason here."""

import ast
from collections import Counter

from skyrl_megatron.config import SkyRLTrainConfig, resolve
from skyrl_megatron.config.fields import get_path, leaves
from skyrl_megatron.config.hardware import Hardware
from tests.structure import source

KERNELS = "a kernel that one device has"
MEMORY = "pinned memory, streams and device caches"
VLLM = "what vLLM lacks on CPU"
CARRIES = "NCCL and CUDA IPC, or gloo and descriptors of shared memory"
REFUSES = "a setting that a device cannot run is refused, or said to have no effect"
MEASURES = "a figure that a device has"
STARTS = "processes are forked on CPU, which CUDA does not survive; Ray's logical resources"
TABLE = {
    "skyrl_megatron.weight_sync.point_to_point": (1, MEMORY),
    "skyrl_megatron.weight_sync.buckets": (1, MEMORY),
    "skyrl_megatron.weight_sync.vllm_backend": (1, VLLM),
    "skyrl_megatron.weight_sync.transport": (4, CARRIES),
    "skyrl_megatron.runtime.model.description": (1, KERNELS),
    "skyrl_megatron_parts.muon": (1, KERNELS),
    "skyrl_megatron.runtime.model.attention": (2, KERNELS),
    "skyrl_megatron.runtime.model.delta_net": (1, KERNELS),
    "skyrl_megatron.runtime.model.build": (1, MEMORY),
    "skyrl_megatron_lora.layers": (2, KERNELS),
    "skyrl_megatron_lora.vllm_worker": (1, VLLM),
    "skyrl_megatron.runtime.logprobs": (1, KERNELS),
    "skyrl_megatron.runtime.offload": (3, MEMORY),
    "skyrl_megatron.runtime.trained_model": (3, f"{MEMORY}; {KERNELS}"),
    "skyrl_megatron.runtime.flops": (1, MEASURES),
    "skyrl_megatron.runtime.engine_settings": (3, KERNELS),
    "skyrl_megatron.runtime.optimizer": (3, MEMORY),
    "skyrl_megatron_parts.profiling": (2, MEASURES),
    "skyrl_megatron.runtime.cpu_patches": (5, KERNELS),
    "skyrl_megatron.runtime.checkpoint.rank_files": (1, MEMORY),
    "skyrl_megatron.config.rules.megatron_rules": (5, REFUSES),
    "skyrl_megatron.config.rules.exact_rules": (1, REFUSES),
    "skyrl_megatron.config.rules.passthrough": (1, REFUSES),
    "skyrl_megatron.config.rules.exchange_rules": (2, REFUSES),
    "skyrl_megatron.config.rules.ineffective": (2, REFUSES),
    "skyrl_megatron.config.rules.placement_rules": (2, REFUSES),
    "skyrl_megatron.config.resolve": (3, "the table of what a CPU cannot do, or does at no cost"),
    "skyrl_megatron.config.hardware": (1, MEASURES),
    "skyrl_megatron.inference.vllm.settings": (3, VLLM),
    "skyrl_megatron.inference.vllm.vllm_engine": (5, VLLM),
    "skyrl_megatron.inference.vllm.compat": (2, VLLM),
    "skyrl_megatron_tools.remote.remote_engine": (1, VLLM),
    "skyrl_megatron_tools.doctor.self_test": (4, MEASURES),
    "skyrl_megatron_observe.preflight.machine_checks": (3, f"{REFUSES}; {MEASURES}"),
    "skyrl_megatron_observe.preflight.room_checks": (3, f"{REFUSES}; {MEASURES}"),
    "skyrl_megatron_observe.preflight.foreign_values": (1, REFUSES),
    "skyrl_megatron_observe.preflight.model_checks": (4, REFUSES),
    "skyrl_megatron_observe.preflight.check_report": (4, MEASURES),
    "skyrl_megatron.entrypoints.check": (1, MEASURES),
    "skyrl_megatron_observe.estimate.step_report": (1, MEASURES),
    "skyrl_megatron_tools.embedded.embedded": (1, "how many devices the run takes: those that are there"),
    "skyrl_megatron.workers.ray_setup": (2, STARTS),
    "skyrl_megatron.workers.megatron_worker": (3, MEASURES),
    "skyrl_megatron_tools.cluster.member": (1, STARTS),
    "skyrl_megatron_tools.remote.serve_engine": (1, VLLM),
}
ASKED = {"is_cpu", "is_cuda", "has_cuda", "is_available"}


def questions(tree: ast.Module) -> int:
    """How often a file asks: by an attribute of that name, or by ``device.type``."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_type = [
        node
        for node in names
        if node.attr == "type" and ast.unparse(node.value).rpartition(".")[2] in ("device", "on", "map_location")
    ]
    return sum(node.attr in ASKED for node in names) + len(of_type)


def test_every_question_has_a_reason():
    found = Counter({module: questions(tree) for module, tree in source.modules().items()})
    del found["skyrl_megatron.device"]
    assert dict(+found) == {module: count for module, (count, _) in TABLE.items()}


def test_the_loop_asks_nobody():
    loop = ("trainer", "rollout", "algorithms", "envs", "data")
    assert not [module for module in TABLE if module.split(".")[1] in loop]


def test_defaults_are_the_same_but_for_one_table():
    one, other = SkyRLTrainConfig.from_cli_overrides([]), SkyRLTrainConfig.from_cli_overrides([])
    resolve.fit_to_hardware(one, Hardware(0, 1))
    resolve.fit_to_hardware(other, Hardware(8, 1))
    keys = [key for key, _, _ in leaves(SkyRLTrainConfig) if is_there(one, key)]
    differ = {key for key in keys if get_path(one, key) != get_path(other, key)}
    assert len(keys) > 240 and differ == set(resolve._ON_CPU)


def is_there(cfg, key):
    """Whether the section that a key is of is there: some are None until they are asked for."""
    try:
        get_path(cfg, key)
    except AttributeError:
        return False
    return True
