"""A name means one thing: classes and type aliases by name, and no module named by a string from below it."""

import ast
import re

from tests.structure import source
from tests.structure.test_layers import NAMES_VERBS, layer_of


def test_class_and_alias_names_are_unique():
    homes: dict[str, list[str]] = {}
    for module, tree in source.modules().items():
        for node in tree.body:
            name = None
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.TypeAlias):
                name = node.name.id
            if name and not name.startswith("_"):
                homes.setdefault(name, []).append(module)
    twins = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twins, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(twins.items()))


def strings(tree):
    """All string constants but those that stand alone as statements: docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def test_no_module_of_a_higher_layer_is_named_by_string():
    """A string that is a module's name is a dependency that no import shows."""
    upward = []
    for module, tree in source.modules().items():
        layer = layer_of(module)
        if layer is None:
            continue
        for node in strings(tree):
            named = node.value.split(":")[0]
            if not re.fullmatch(r"(skyrl_megatron\w*|bridges)(\.[a-z_]\w*)+", named):
                continue
            target = layer_of(named)
            from_bridges = module.startswith("bridges") and named.startswith("skyrl_megatron")
            allowed = module == NAMES_VERBS
            if from_bridges or (target is not None and target > layer and not allowed):
                upward.append(f"{module}:{node.lineno} names {node.value!r}, which stands above it")
    assert not upward, "\n".join(upward)


VLLM_FILES = {
    *(
        f"skyrl_megatron.inference.vllm.{name}"
        for name in ("admission", "compat", "cpu", "exact", "splicing", "values", "wire_app")
    ),
    *(f"skyrl_megatron.weight_sync.{name}" for name in ("vllm_backend", "vllm_reshard")),
    "skyrl_megatron_lora.vllm_worker",
    "skyrl_megatron_lora.vllm_experts",
}


def test_vllm_is_imported_in_few_files():
    users = set()
    for module, tree in source.modules().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == "vllm" for name in names):
                users.add(module)
    assert users <= VLLM_FILES, sorted(users - VLLM_FILES)
