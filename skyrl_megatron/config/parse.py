"""Parse ``key=value`` arguments, YAML files and mappings into assignments; convert types; translate renamed keys.

Types are strict: "4" is not an int, 1 is not a bool, 4.0 is not an int. The exceptions lose no information: an int is
valid for a float, a path object for a string, and text typed for a string field is used verbatim (``run_name=007``).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import math
import os
import re
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, OneOf, Section, field_types, leaves, members_of
from skyrl_megatron.errors import ConfigError, Problem

TRAIN, SUPERVISED = "train", ("sft", "dpo", "reward")
"""Verbs that train on prompts, and on rows, whose configurations and recipes have a section of the verb's name."""


def nearest_keys(root: type, cls: type, key: str, whole: str) -> list[str]:
    """Return up to three valid keys similar to ``whole``, whose prefix ``key`` is unknown: siblings, keys with the
    same last name, any similar key."""
    prefix, _, name = key.rpartition(".")
    keys = [leaf for leaf, _, _ in leaves(root)]
    siblings = [f"{prefix}.{near}" if prefix else near for near in difflib.get_close_matches(name, field_types(cls))]
    same = [leaf for leaf in keys if leaf.rpartition(".")[2] == name]
    alike = difflib.get_close_matches(whole, keys, n=3, cutoff=0.85)
    return list(dict.fromkeys([*alike[:1], *siblings, *same, *alike]))[:3]


_ENGINE = "generator.inference_engine"
_SAME_NAME = """
    model_dtype run_engines_locally backend weight_sync_backend weight_transfer_threshold_cuda_ipc_GB async_engine
    vllm_v1_disable_multiproc enable_prefix_caching enable_chunked_prefill max_num_batched_tokens enforce_eager
    fully_sharded_loras enable_ray_prometheus_stats gpu_memory_utilization max_num_seqs enable_http_endpoint
    http_endpoint_host http_endpoint_port served_model_name engine_init_kwargs override_existing_update_group
    external_proxy_url external_server_urls
""".split()

DEPRECATED: Mapping[str, str] = MappingProxyType(
    {f"generator.{name}": f"{_ENGINE}.{name}" for name in _SAME_NAME}
    | {
        "generator.num_inference_engines": f"{_ENGINE}.num_engines",
        "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
        "generator.inference_engine_pipeline_parallel_size": f"{_ENGINE}.pipeline_parallel_size",
        "generator.inference_engine_expert_parallel_size": f"{_ENGINE}.expert_parallel_size",
        "generator.inference_engine_data_parallel_size": f"{_ENGINE}.data_parallel_size",
        "generator.remote_inference_engine_urls": f"{_ENGINE}.remote_urls",
    }
)
"""Flat engine keys of older configurations → the current key."""

DROPPED: Mapping[str, str] = MappingProxyType({"generator.model_name": "trainer.policy.model.path"})
"""Older keys that duplicate another key → that key."""

ALIASES: Mapping[str, str] = MappingProxyType({"trainer.remove_microbatch_padding": "trainer.use_sample_packing"})
"""Other accepted names → the key."""


def warn_deprecated(used: Mapping[str, str]) -> None:
    """Issue one DeprecationWarning for all older keys of a configuration, each with its new key.

    It is attributed to the caller of ``SkyRLTrainConfig.from_cli_overrides``, so that Python shows it to a script.
    """
    if not used:
        return
    lines = [
        f"  {old} is ignored: use {new}" if old in DROPPED else f"  {old} is now {new}"
        for old, new in sorted(used.items())
    ]
    warnings.warn("deprecated configuration keys:\n" + "\n".join(lines), DeprecationWarning, stacklevel=4)


CHECK_SWITCHES = ("--check", "--show-config")
CHECK_OPTIONS = (*CHECK_SWITCHES, "--gpu", "--host-memory")
"""Options that only ``--check`` reads."""
OPTIONS = (*CHECK_OPTIONS, "--config", "--help", "--recipe", "--show-row")
"""Options of the commands; the message for a mistyped option names the closest one."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value for one key."""

    key: str
    """Dotted key."""
    value: Any
    """The value as read."""
    text: str | None
    """The text that the user typed; None if the value was not typed."""
    source: str
    """The file, or ``command line``."""
    spelled: str
    """The key as the user wrote it, before renaming."""

    def below(self, name: str, value: Any) -> Assignment:
        """Return an entry of this assignment's mapping as a separate assignment."""
        return Assignment(f"{self.key}.{name}", value, None, self.source, f"{self.spelled}.{name}")

    def typed(self) -> Any:
        """Return the text parsed as YAML, or unchanged if it is not valid YAML."""
        try:
            return _yaml_value(self.text or "")
        except ValueError:
            return self.text

    def renamed(self, key: str) -> Assignment:
        """Return the same assignment with another key."""
        return dataclasses.replace(self, key=key)

    def with_value(self, value: Any) -> Assignment:
        """Return the same assignment with its interpolations resolved. A number from another key is also valid for a
        string field."""
        return dataclasses.replace(self, value=value, text=str(value) if isinstance(value, int | float) else None)


def read_mapping(mapping: Mapping[str, Any], source: str, text: bool = False) -> list[Assignment]:
    """Return the assignments of a mapping, whose keys may be dotted. ``text``: parse strings like typed text."""
    assignments = []
    for key, value in mapping.items():
        typed = value if text and isinstance(value, str) else None
        assignments.append(Assignment(str(key), value, typed, source, str(key)))
    return assignments


def read_arguments(args: Sequence[str], verb: str = TRAIN) -> tuple[list[Assignment], list[Problem]]:
    """Return the assignments of ``key=value``, ``--config FILE`` and ``--recipe NAME`` arguments, and the problems of
    reading them. Those of the recipe come first. Raises ConfigError for a recipe that ``verb`` cannot take."""
    names, settings = split_recipe(args)
    if len(names) > 1:
        fix = "give one recipe; add more keys with --config FILE.yaml"
        raise ConfigError([Problem(RECIPE, ", ".join(names), fix)])
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    rest = iter([*(f"--config={recipe_file(name, verb)}" for name in names), *settings])
    for arg in rest:
        if arg == "--config" or arg.startswith("--config="):
            path = arg.partition("=")[2] if "=" in arg else next(rest, "")
            entries, wrong = read_yaml(path)
            assignments += entries
            problems += wrong
            continue
        key, equals, text = arg.partition("=")
        if refused := _refusal(arg, bool(equals)):
            problems.append(Problem(key, text, refused))
            continue
        try:
            assignments.append(Assignment(key, _yaml_value(text), text, "command line", key))
        except ValueError as error:
            problems.append(Problem(key, text, str(error)))
    return assignments, problems


RECIPE, RECIPES = "--recipe", Path(__file__).parents[1] / "recipes"
"""The option, and the folder of the package's recipes."""


def split_recipe(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of ``--recipe``, "" for a missing one, and the other arguments, ``model=`` as its key."""
    names: list[str] = []
    rest: list[str] = []
    for number, arg in enumerate(args):
        if arg.startswith(f"{RECIPE}="):
            names.append(arg.partition("=")[2])
        elif arg == RECIPE:
            names.append("")
        elif number and args[number - 1] == RECIPE and "=" not in arg and not arg.startswith("-"):
            names[-1] = arg
        else:
            rest.append(f"trainer.policy.model.path={arg.removeprefix('model=')}" if arg.startswith("model=") else arg)
    return names, rest


def verb_of_recipe(name: str) -> str | None:
    """Return the verb of a recipe: that of its section, else ``train``; None for a file of the user without section,
    and for what is no recipe."""
    path = _path_of(name)
    text = path.read_text(errors="replace") if path.is_file() else ""
    section = re.search(rf"^({'|'.join(SUPERVISED)})[.:]", text, re.MULTILINE)
    return section[1] if section else TRAIN if path.parent == RECIPES and path.is_file() else None


def _path_of(name: str) -> Path:
    is_file = os.sep in name or name.endswith((".yaml", ".yml"))
    return Path(name).expanduser() if is_file else RECIPES / f"{name}.yaml"


def recipe_file(name: str, verb: str) -> str:
    """Return the file of a recipe: one of the package, or a path. Raises ConfigError if ``verb`` cannot take it."""
    path, owner = _path_of(name), verb_of_recipe(name)
    if owner not in (verb, None):
        fix = f"belongs to another verb: skyrl-megatron {owner} {RECIPE} {name}"
    elif name.startswith("embedded") and owner == TRAIN:
        fix = f"makes its model and data first, as only this does: skyrl-megatron {TRAIN} {RECIPE} {name}"
    elif path.is_file():
        return str(path)
    elif path.parent != RECIPES:
        fix = "no such file: give the path of a YAML file"
    else:
        names = [other for other in sorted(file.stem for file in RECIPES.glob("*.yaml")) if other != "ppo_base_config"]
        names = [other for other in names if verb_of_recipe(other) == verb]
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"no such recipe{f'; did you mean {near[0]}?' if near else '.'}" if name else "give a name."
        fix += f" Use {f'one of {", ".join(names)}, or ' if names else ''}the path of a YAML file"
    raise ConfigError([Problem(RECIPE, name, fix)])


def names_key(assignments: Sequence[Assignment], key: str) -> bool:
    """Return whether one of ``assignments`` sets ``key``, directly or in a mapping for a section."""
    return any(
        item.key == key
        or (key.startswith(f"{item.key}.") and isinstance(item.value, Mapping) and names_key(_entries(item), key))
        for item in assignments
    )


def _entries(item: Assignment) -> list[Assignment]:
    return [item.below(str(name), value) for name, value in item.value.items()]


def read_yaml(path: str) -> tuple[list[Assignment], list[Problem]]:
    """Return the assignments of a YAML file, or the problem of reading it, with the line."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def wrong(fix: str) -> tuple[list[Assignment], list[Problem]]:
        return [], [Problem("--config", path, fix)]

    if not path:
        return wrong("give the path of a YAML file")
    try:
        content = OmegaConf.load(Path(path).expanduser())
        plain = OmegaConf.to_container(content, resolve=False)
    except FileNotFoundError:
        return wrong("no such file: give the path of a YAML file")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return wrong(f"{position}{error.problem or error.context}; correct the YAML there")
    except yaml.YAMLError as error:
        return wrong(" ".join(str(error).split()))
    except OmegaConfBaseException as error:
        return wrong(" ".join(str(error).split()))
    except (OSError, UnicodeDecodeError) as error:
        return wrong(f"cannot be read ({error}): give a readable file in UTF-8")
    if not isinstance(plain, dict):
        return wrong("must contain a mapping of keys to values, such as trainer: {seed: 1}")
    return read_mapping({str(key): value for key, value in plain.items()}, path), []


def _refusal(arg: str, has_value: bool) -> str | None:
    """Return why an argument is not an assignment; None if it is one."""
    if arg.startswith(("+", "~")):
        return (
            f"'{arg[0]}' adds or removes keys in Hydra, but here every key exists: remove '{arg[0]}', or subclass the "
            "configuration class to add a key"
        )
    if arg.partition("=")[0] in CHECK_OPTIONS:
        return "this option needs --check: add --check"
    if arg.startswith("-"):
        near = difflib.get_close_matches(arg.partition("=")[0], OPTIONS, n=1)
        return f"unknown option{f'; did you mean {near[0]}?' if near else ':'} write settings as key=value"
    if has_value:
        return None
    if re.fullmatch(r"\d+x\d+", arg):
        return f"write settings as key=value, and a machine as --check={arg}"
    return "write settings as key=value"


def _yaml_value(text: str) -> Any:
    """Parse typed text as YAML: ``4``, ``1e-6``, ``true``, ``null``, ``[a, b]``, ``{a: 1}``. Raises ValueError."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text.encode()
        node = OmegaConf.from_dotlist([f"value={text}"])
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(f"not valid YAML: {reason.splitlines()[0]}") from None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"not a valid interpolation, ${{other.key}} or ${{oc.env:NAME}}: {reason}") from None
    except UnicodeEncodeError:
        raise ValueError("contains bytes that are not UTF-8: type it in a UTF-8 terminal, or in a file") from None
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    value = plain["value"]
    is_block = isinstance(value, dict | list) and text.lstrip()[:1] not in ("{", "[")
    return text if is_block else value  # "a: b" is a string, not YAML's block mapping


_NAMES: dict[Any, str] = {Any: "any value", types.NoneType: "null", dict: "mapping", list: "list"}


class Mismatch(Exception):
    """A value does not fit its field; the message is the fix."""


def convert(annotation: Any, value: Any, text: str | None = None) -> Any:
    """Return ``value`` converted to the type ``annotation``. ``text``: the typed text, if any. Raises Mismatch."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *rules = typing.get_args(annotation)
        converted = convert(inner, value, text)
        for rule in rules:
            if converted is not None and isinstance(rule, Bounds | OneOf):
                _obey(rule, converted)
        return converted
    if origin in (typing.Union, types.UnionType):
        return _convert_union(annotation, value, text)
    if annotation is Any:
        return value
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            raise Mismatch(f"must be one of {', '.join(map(repr, choices))}")
        return value
    if annotation is types.NoneType:
        if value is None:
            return None
        raise Mismatch("must be null")
    if annotation is list or origin in (list, tuple):
        return _convert_list(annotation, value)
    if annotation is dict or origin is dict:
        return _convert_dict(annotation, value)
    return _convert_scalar(annotation, value, text)


def describe(annotation: Any) -> str:
    """Return the type in words, without its rules: ``int or null``."""
    names = []
    for member in members_of(annotation):
        if typing.get_origin(member) is list:
            names.append(f"list of {describe(*typing.get_args(member))}")
        elif typing.get_origin(member) is dict:
            names.append("mapping")
        elif isinstance(member, type) and issubclass(member, Section):
            names.append("a section, whose fields are set one by one")
        else:
            names.append(_NAMES.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(names)


def _wrong_type(annotation: Any, value: Any) -> Mismatch:
    return Mismatch(f"must be {describe(annotation)}, not {type(value).__name__}")


def _obey(rule: Bounds | OneOf, value: Any) -> None:
    if rule.allows(value):
        return
    near = difflib.get_close_matches(str(value), rule.choices, n=1) if isinstance(rule, OneOf) else []
    raise Mismatch(f"must be {rule}" + (f"; did you mean {near[0]}?" if near else ""))


def _convert_union(annotation: Any, value: Any, text: str | None) -> Any:
    members = typing.get_args(annotation)
    if value is None and types.NoneType in members:
        return None
    failures = []
    # the member of exactly this type first, so that true stays a bool in `bool | int`
    for member in sorted(members, key=lambda kind: not _is_exactly(value, kind)):
        try:
            return convert(member, value, text)
        except Mismatch as failure:
            if _is_exactly(value, member):
                raise
            failures.append(failure)
    only = [kind for kind in members if kind is not types.NoneType]
    if len(only) == 1 and not str(failures[0]).startswith("must be null"):
        named = describe(only[0])
        raise Mismatch(str(failures[0]).replace(f"must be {named},", f"must be {describe(annotation)},"))
    raise _wrong_type(annotation, value)


def _is_exactly(value: Any, annotation: Any) -> bool:
    return any(type(value) in (kind, typing.get_origin(kind)) for kind in members_of(annotation))


def _convert_list(annotation: Any, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        hint = f'; write a list: ["{value}"]' if isinstance(value, str) else ""
        raise Mismatch(f"must be {describe(annotation)}, not {type(value).__name__}{hint}")
    kinds = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and kinds and kinds[-1] is not Ellipsis:
        if len(kinds) != len(value):
            raise Mismatch(f"must have {len(kinds)} entries, not {len(value)}")
        return tuple(convert(kind, item) for kind, item in zip(kinds, value, strict=True))
    items = [convert(kinds[0] if kinds else Any, item) for item in value]
    return tuple(items) if typing.get_origin(annotation) is tuple else items


def _convert_dict(annotation: Any, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(annotation, value)
    key_type, item_type = typing.get_args(annotation) or (Any, Any)
    return {convert(key_type, key): copy.deepcopy(convert(item_type, item)) for key, item in value.items()}


def _convert_scalar(kind: Any, value: Any, text: str | None) -> Any:
    if kind is bool or kind is int:
        if type(value) is kind:
            return value
    elif kind is float:
        if type(value) in (int, float):
            if not math.isfinite(value):
                raise Mismatch("must be a finite number")
            return float(value)
    elif kind is str:
        if text is not None and isinstance(value, str | bool | int | float):
            quoted = isinstance(value, str) and text.lstrip()[:1] in ("'", '"')
            return value if quoted else text
        if isinstance(value, str):
            return str(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, bool | int | float):
            raise Mismatch("must be str: put it in quotes")
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        for member in kind:
            if value is member or value in (member.value, member.name):
                return member
        raise Mismatch(f"must be one of {', '.join(str(member.value) for member in kind)}")
    elif isinstance(value, kind):
        return value
    elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _convert_dataclass(kind, value)
    raise _wrong_type(kind, value)


def _convert_dataclass(kind: Any, value: Mapping[Any, Any]) -> Any:
    """Convert a mapping to a dataclass inside a list, or to a dataclass that is not a Section."""
    if issubclass(kind, Section):
        return kind.from_dict_config(value)
    try:
        return kind(**value)
    except TypeError as error:
        raise Mismatch(str(error)) from None
