"""The layers of ARCHITECTURE.md as rules: imports go down only, each heavy package enters at one layer, and the names
of devices and backends stay in the few files that choose them."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure import source
from tests.structure.source import AROUND, CORE, PACKAGES, foreign_packages

ROOT = source.ROOT
LAYER = {
    "cli": 13,
    "api": 12,
    "entrypoints": 11,
    "checks": 10,
    "trainer": 9,
    "sources": 8,
    "workers": 7,
    "rollout": 6,
    "envs": 6,
    "inference": 5,
    "weight_sync": 4,
    "runtime": 3,
    "algorithms": 2,
    "data": 2,
    "identity": 7,
    "tiny_model": 2,
    "config": 1,
    "hub": 0,
    "command": 0,
    "errors": 0,
    "fork_server": 0,
    "interrupts": 0,
    "plugins": 0,
    "progress": 0,
    "types": 0,
    "device": 0,
}
"""Folder or file of the core → its layer."""
ABOVE_THE_CORE = 100
"""Added to the height of a package around the core."""
NAMES_VERBS = "skyrl_megatron.cli"
"""Names the modules of all verbs, and imports the one that is called."""
# First layer that may import the package (99: none), and files below it that may too.
HEAVY = {
    "ray": (7, {"skyrl_megatron/algorithms/registry.py"}),
    "vllm": (
        99,
        {
            "skyrl_megatron/inference/vllm/admission.py",
            "skyrl_megatron/inference/vllm/compat.py",
            "skyrl_megatron/inference/vllm/cpu.py",
            "skyrl_megatron/inference/vllm/exact.py",
            "skyrl_megatron/inference/vllm/splicing.py",
            "skyrl_megatron/inference/vllm/values.py",
            "skyrl_megatron/inference/vllm/wire_app.py",
            "skyrl_megatron/weight_sync/vllm_backend.py",
            "skyrl_megatron/weight_sync/vllm_reshard.py",
        },
    ),
    "megatron": (3, set()),
    "transformer_engine": (3, set()),
    "apex": (3, set()),
    "torch": (2, {"skyrl_megatron/types.py", "skyrl_megatron/device.py"}),
}
DEVICE_FILES = {
    "skyrl_megatron/device.py",
    "skyrl_megatron/runtime/cpu_patches.py",
}
COMPATIBILITY = {"utils", "generators"}  # re-exports for scripts written for SkyRL, nothing else


def sources() -> list[Path]:
    return sorted(source.files().values())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(path: str) -> int | None:
    """The layer number of a file or dotted module; None for compatibility modules and the package root."""
    parts = path.removesuffix(".py").replace("/", ".").split(".")
    if parts[0] == "bridges":
        return 2
    if parts[0] in AROUND:
        return ABOVE_THE_CORE + AROUND[parts[0]]
    return LAYER.get(parts[1]) if len(parts) > 1 else None


def folder_of(module: str) -> str:
    """The folder of a module that has a layer: a folder or file of the core, or a package around it."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == CORE else parts[0]


@cache
def imports(path: Path) -> list[str]:
    """Every module named by an import statement of the file, at any depth, type-checking blocks excepted."""
    skipped = source.for_types(source.tree_of(path))
    names = []
    for node in source.import_statements(source.dotted(path)):
        if id(node) not in skipped and isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif id(node) not in skipped and isinstance(node, ast.ImportFrom) and not node.level:
            names += [node.module or ""]
    return names


def heavy_imports(name: str, modules: list[str]) -> Iterator[str]:
    """Each import of a heavy package below the layer at which it enters, as a sentence."""
    layer = layer_of(name)
    for package in {module.split(".")[0] for module in modules} & HEAVY.keys():
        first, exceptions = HEAVY[package]
        if layer is not None and layer < first and name not in exceptions:
            yield f"{name} imports {package}, which enters at layer {first}"


def upward_imports(module: str, targets: Iterable[str]) -> Iterator[str]:
    """Each import of this project that the layers forbid, as a sentence. What is imported for types only counts."""
    layer = layer_of(module)
    for target in targets:
        if module.startswith("bridges") and not target.startswith("bridges"):
            yield f"{module} imports {target}: bridges is independent of skyrl_megatron"
        if layer is None:
            continue
        height = None if target.startswith("bridges") else layer_of(target)  # below the core, but for torch
        twins = folder_of(module) != folder_of(target) and min(layer, height or 0) > ABOVE_THE_CORE
        if height is not None and (height > layer or (twins and height == layer)):
            yield f"{module} (layer {layer}) imports {target} (layer {height})"
        if target.startswith(f"{CORE}.") and target.split(".")[1] in COMPATIBILITY:
            yield f"{module} imports {target}, a re-export for scripts"


def pairs(edges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of folders that import each other, unless one is inside the other."""
    apart = {(one, other) for one, other in edges if not f"{one}.".startswith(f"{other}.")}
    apart = {(one, other) for one, other in apart if not f"{other}.".startswith(f"{one}.")}
    return sorted((one, other) for one, other in apart if one < other and (other, one) in apart)


def test_every_folder_and_file_has_a_layer():
    names = {path.stem for path in (ROOT / CORE).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - {"__init__", "__main__"} == LAYER.keys() | COMPATIBILITY


def test_imports_go_down_only():
    broken = [line for path in sources() for line in heavy_imports(relative(path), imports(path))]
    for module in source.modules():
        broken += upward_imports(module, [target for target, _ in source.imported(module)])
    assert not broken, "\n".join(broken)


def test_no_two_folders_import_each_other():
    def folder(module):
        return module if source.is_package(module) else module.rpartition(".")[0]

    edges = {(folder(module), folder(target)) for module in source.modules() for target, _ in source.imported(module)}
    broken = [f"{one} and {other} import each other" for one, other in pairs(edges)]
    assert not broken, "\n".join(broken)


def device_names(name: str, tree: ast.AST) -> Iterator[str]:
    """Each device or backend that a file spells, as a sentence."""
    if name in DEVICE_FILES:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in {"cuda", "nccl", "gloo"} or node.value.startswith("cuda:"):
                yield f"{name}:{node.lineno} spells {node.value!r}: ask skyrl_megatron.device"


def test_device_and_backend_names_stay_in_their_files():
    broken = [line for path in sources() for line in device_names(relative(path), source.tree_of(path))]
    assert not broken, "\n".join(broken)


def test_every_file_that_breaks_a_rule_is_named():
    upward = ["skyrl_megatron.trainer.ppo", "skyrl_megatron_tools.one_step", "skyrl_megatron.utils"]
    assert len(list(upward_imports("skyrl_megatron.runtime.a", upward))) == 3
    assert list(heavy_imports("skyrl_megatron/runtime/a.py", ["ray", "vllm.config"]))
    assert list(upward_imports("bridges.a", ["skyrl_megatron.errors"]))
    assert list(upward_imports("skyrl_megatron_agents.a", ["skyrl_megatron_supervised.sft"]))
    assert not list(upward_imports("skyrl_megatron_agents.a", ["skyrl_megatron_agents.graph", "bridges.plan"]))
    assert not list(upward_imports("skyrl_megatron_tools.a", ["skyrl_megatron_observe.hang", "skyrl_megatron.types"]))
    assert not list(heavy_imports("skyrl_megatron/trainer/a.py", ["ray", "torch"]))
    assert pairs([("a.b", "a.c"), ("a.c", "a.b"), ("a", "a.b"), ("a.b", "a")]) == [("a.b", "a.c")]
    spelled = ast.parse("a = 'cuda:0'\nb = 'nccl'\nc = 'cpu'")
    assert [line.split(" ")[0] for line in device_names("a.py", spelled)] == ["a.py:1", "a.py:2"]


def test_algorithms_never_touch_process_groups():
    for path in (ROOT / "skyrl_megatron" / "algorithms").rglob("*.py"):
        assert not any(module.startswith("torch.distributed") for module in imports(path)), relative(path)


def test_gptmodel_is_imported_in_one_file():
    users = [relative(p) for p in sources() if any("megatron.core.models.gpt" in module for module in imports(p))]
    assert set(users) <= {"skyrl_megatron/runtime/model/build.py"}, users


def test_no_dumping_grounds():
    utils = ROOT / "skyrl_megatron" / "utils"
    allowed = {utils, utils / "utils.py"}  # names for scripts written for SkyRL
    bad = [
        relative(path)
        for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
        if path.stem in {"utils", "misc", "common", "helpers"} and path not in allowed and path.suffix in {"", ".py"}
    ]
    assert not bad, bad


@pytest.mark.parametrize("folder", ["utils", "generators"])
def test_compatibility_modules_only_reexport(folder):
    """Imports and names, and a module-level ``__getattr__`` where an import must be lazy."""
    for path in (ROOT / "skyrl_megatron" / folder).rglob("*.py"):
        for node in source.tree_of(path).body:
            lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr)
            assert plain or lazy or typing, f"{relative(path)}:{node.lineno} holds more than re-exports"


def test_another_checkout_does_not_answer(tmp_path):
    """For a package whose folder is missing: the tests of this folder then fail, and name both places."""
    assert foreign_packages() == []
    problems = foreign_packages(tmp_path)
    assert len(problems) == len(PACKAGES)
    assert problems[0].startswith(f"skyrl_megatron is imported from {ROOT / 'skyrl_megatron'}, not from {tmp_path}")
