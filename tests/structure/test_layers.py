"""The layers of ARCHITECTURE.md as rules: imports go down only, each heavy package enters at one layer, and the names
of devices and backends stay in the few files that choose them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure.source import foreign_packages

ROOT = Path(__file__).resolve().parents[2]
LAYER = {
    "cli": 10,
    "entrypoints": 8,
    "preflight": 8,
    "trainer": 7,
    "workers": 6,
    "rollout": 5,
    "envs": 5,
    "agents": 5,
    "inference": 4,
    "sandboxes": 4,
    "weight_sync": 3,
    "runtime": 2,
    "algorithms": 1,
    "data": 1,
    "config": 0,
    "hub": 0,
    "errors": 0,
    "fork_server": 0,
    "interrupts": 0,
    "plugins": 0,
    "progress": 0,
    "types": 0,
    "device": 0,
}
TOOLS = "skyrl_megatron_tools"
"""Explains, predicts, compares, serves other hosts. Imports the package, which never imports it."""
TOOLS_LAYER = 9
PACKAGES = ("skyrl_megatron", TOOLS, "bridges")
# First layer that may import the package (99: none), and files below it that may too.
HEAVY = {
    "ray": (6, {"skyrl_megatron/algorithms/registry.py"}),
    "vllm": (
        99,
        {
            "skyrl_megatron/inference/vllm/admission.py",
            "skyrl_megatron/inference/vllm/compat.py",
            "skyrl_megatron/inference/vllm/cpu.py",
            "skyrl_megatron/inference/vllm/exact.py",
            "skyrl_megatron/inference/vllm/values.py",
            "skyrl_megatron/inference/vllm/wire_app.py",
            "skyrl_megatron/weight_sync/vllm_adapters.py",
            "skyrl_megatron/weight_sync/vllm_backend.py",
            "skyrl_megatron/weight_sync/vllm_reshard.py",
        },
    ),
    "megatron": (2, set()),
    "transformer_engine": (2, set()),
    "apex": (2, set()),
    "torch": (1, {"skyrl_megatron/types.py", "skyrl_megatron/device.py"}),
}
DEVICE_FILES = {
    "skyrl_megatron/device.py",
    "skyrl_megatron/runtime/cpu_patches.py",
    "skyrl_megatron/weight_sync/transport.py",
}
COMPATIBILITY = {"utils", "generators"}  # re-exports for scripts written for SkyRL, nothing else


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(path: str) -> int | None:
    """The layer number of a file or dotted module; None for compatibility modules and the package root."""
    parts = path.removesuffix(".py").replace("/", ".").split(".")
    if parts[0] == "bridges":
        return 1
    if parts[0] == TOOLS:
        return TOOLS_LAYER
    return LAYER.get(parts[1]) if len(parts) > 1 else None


@cache
def imports(path: Path) -> list[str]:
    """Every module named by an import statement of the file, at any depth, type-checking blocks excepted."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    package = relative(path).removesuffix(".py").replace("/", ".").split(".")[:-1]
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
            if module == "skyrl_megatron":
                found += [f"skyrl_megatron.{alias.name}" for alias in node.names]
    return found


def imports_upward(name: str, modules: list[str]) -> Iterator[str]:
    """Each import of a file that the layers forbid, as a sentence."""
    layer = layer_of(name)
    for module in modules:
        package = module.split(".")[0]
        if package in HEAVY and layer is not None:
            first, exceptions = HEAVY[package]
            if layer < first and name not in exceptions:
                yield f"{name} imports {package}, which enters at layer {first}"
        if package in ("skyrl_megatron", TOOLS):
            if name.startswith("bridges/"):
                yield f"{name} imports {module}: bridges is independent of skyrl_megatron"
            target = layer_of(module)
            if layer is not None and target is not None and target > layer:
                yield f"{name} (layer {layer}) imports {module} (layer {target})"
            if layer is not None and module.split(".")[1:2] and module.split(".")[1] in COMPATIBILITY:
                yield f"{name} imports {module}, a re-export for scripts"


def test_every_folder_and_file_has_a_layer():
    names = {
        path.stem
        for path in (ROOT / "skyrl_megatron").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - {"__init__", "__main__"} == LAYER.keys() | COMPATIBILITY


def test_imports_go_down_only():
    broken = [line for path in sources() for line in imports_upward(relative(path), imports(path))]
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
    broken = [line for path in sources() for line in device_names(relative(path), ast.parse(path.read_text()))]
    assert not broken, "\n".join(broken)


def test_every_file_that_breaks_a_rule_is_named():
    upward = ["skyrl_megatron.trainer", "vllm", "skyrl_megatron.utils"]
    assert len(list(imports_upward("skyrl_megatron/runtime/a.py", upward))) == 3
    assert list(imports_upward("bridges/a.py", ["skyrl_megatron.errors"]))
    assert not list(imports_upward("skyrl_megatron/trainer/a.py", ["skyrl_megatron.runtime", "ray", "torch"]))
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
        for path in [*(ROOT / "skyrl_megatron").rglob("*"), *(ROOT / "bridges").rglob("*")]
        if path.stem in {"utils", "misc", "common", "helpers"} and path not in allowed and path.suffix in {"", ".py"}
    ]
    assert not bad, bad


@pytest.mark.parametrize("folder", ["utils", "generators"])
def test_compatibility_modules_only_reexport(folder):
    """Imports and names, and a module-level ``__getattr__`` where an import must be lazy."""
    for path in (ROOT / "skyrl_megatron" / folder).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
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
