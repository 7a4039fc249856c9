"""Read command lines, YAML files and mappings into a typed configuration. Reports all errors at once.

Rules
- Assignments apply in order; the last one wins.
- A mapping for a *section* (``trainer.placement: {colocate_all: false}``) sets the fields that it names.
- A mapping for a *dict option* (``transformer_config_kwargs: {…}``) replaces the whole option, with its defaults. A
  dotted key into it (``transformer_config_kwargs.recompute_granularity=selective``) sets one entry and keeps the
  others. So any default can be removed: ``transformer_config_kwargs={}``.
- ``${other.key}`` is the value of another key, ``${oc.env:NAME}`` that of an environment variable (OmegaConf).
- If one command line or file sets a key twice, a warning shows both values. A command line may override a file.
- An unknown key is an error.
"""

from __future__ import annotations

import copy
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from skyrl_megatron.config import parse as legacy
from skyrl_megatron.config.fields import Section, default_of, field_types, members_of, sections_of
from skyrl_megatron.config.parse import Assignment, Mismatch, convert, nearest_keys, read_arguments, read_mapping
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning

Tree = dict[str, Any]  # field name → Assignment, or a Tree for a section


def from_mapping[C: Section](cls: type[C], mapping: Mapping[str, Any]) -> C:
    """Build ``cls`` from a mapping; see :meth:`Section.from_dict_config`."""
    plain, resolved = _plain(mapping)
    cfg, problems = _Builder(cls).build(read_mapping(plain, "mapping"), interpolate=not resolved)
    if problems:
        raise ConfigError(problems)
    return cfg


def parse[C: Section](cls: type[C], args: Sequence[str] | Mapping[str, Any]) -> tuple[C, list[Problem]]:
    """Return a configuration and every problem of ``args``. A field with an invalid value has its default.

    Raises ConfigError for a recipe that is none, or one of another verb.
    """
    problems: list[Problem] = []
    resolved = False
    if isinstance(args, Mapping):
        plain, resolved = _plain(args)
        assignments = read_mapping(plain, "mapping", text=True)
    else:
        verb = next((name for name in legacy.SUPERVISED if name in field_types(cls)), legacy.TRAIN)
        assignments, problems = read_arguments(args, verb)
    builder = _Builder(cls, {**legacy.DEPRECATED, **legacy.DROPPED, **legacy.ALIASES})
    cfg, of_values = builder.build(assignments, interpolate=not resolved)
    legacy.warn_deprecated({old: new for old, new in builder.renamed.items() if old not in legacy.ALIASES})
    if builder.repeated:
        repeated = "; ".join(builder.repeated)
        warnings.warn(f"given twice, the later one counts: {repeated}", SkyRLMegatronWarning, stacklevel=3)
    return cfg, [*problems, *of_values]


def _plain(mapping: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return (plain mapping, whether its interpolations are resolved, as OmegaConf does for a DictConfig)."""
    if isinstance(mapping, dict):
        return mapping, False
    from omegaconf import DictConfig, OmegaConf

    if isinstance(mapping, DictConfig):
        return cast("dict[str, Any]", OmegaConf.to_container(mapping, resolve=True)), True
    return mapping, False


@dataclass
class _Builder[C: Section]:
    """Collects assignments in a tree with the structure of ``cls``, then builds the objects from the leaves up."""

    cls: type[C]
    renames: Mapping[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    given: dict[tuple[str, str], Assignment] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)

    def build(self, assignments: Sequence[Assignment], interpolate: bool = True) -> tuple[C, list[Problem]]:
        self.cls = self.cls.with_named_sections(dict(_values_below(assignments)))
        for assignment in assignments:
            self._place(assignment)
        if interpolate:
            self._interpolate()
        cfg = self._construct(self.cls, self.tree, None, "")
        return cast("C", cfg), self.problems

    # --- placing -----------------------------------------------------------------------------------------------

    def _place(self, item: Assignment) -> None:
        """Insert one assignment into the tree at its key. A mapping for a section is split into its entries."""
        cls: type[Section] = self.cls
        tree = self.tree
        names = item.key.split(".")
        for depth, name in enumerate(names):
            key = ".".join(names[: depth + 1])
            if name not in field_types(cls):
                return self._place_renamed(item, key) if key in self.renames else self._reject(item, cls, key)
            section = sections_of(cls).get(name)
            if section is None:
                return self._place_leaf(item, cls, tree, name, names[depth + 1 :])
            last = depth == len(names) - 1
            if last and not isinstance(item.value, Mapping):
                tree[name] = item
                return None
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
            cls, tree = section, tree[name]
        for name, value in item.value.items():
            self._place(item.below(name, value))
        return None

    def _place_renamed(self, item: Assignment, key: str) -> None:
        new = self.renames[key]
        self.renamed[key] = new
        if key not in legacy.DROPPED:
            self._place(item.renamed(new + item.key[len(key) :]))

    def _place_leaf(self, item: Assignment, cls: type, tree: Tree, name: str, inside: list[str]) -> None:
        """Assign a setting, or, with ``inside``, one entry of a dict option."""
        before = tree.get(name)
        self._compare(item)
        if inside:
            self._place_entry(item, cls, tree, name, inside)
        elif before is not None and before.source == item.source and before.spelled != item.spelled:
            fix = f"given twice, as {before.spelled} and as {item.spelled}: remove one"
            self.problems.append(Problem(item.key, item.value, fix))
        else:
            tree[name] = item

    def _compare(self, item: Assignment) -> None:
        """Record a value that replaces another one from the same command line or file."""
        before = self.given.get((item.source, item.key))
        self.given[item.source, item.key] = item
        if before is not None and before.spelled == item.spelled and before.value != item.value:
            self.repeated.append(f"{item.spelled}={before.value}, then {item.spelled}={item.value}")

    def _place_entry(self, item: Assignment, cls: type, tree: Tree, name: str, inside: list[str]) -> None:
        """Change one entry of the mapping set earlier, else of the default."""
        before, option_key = tree.get(name), item.key[: -len(".".join(inside)) - 1]
        kinds = members_of(field_types(cls)[name])
        if not any(kind is dict or typing.get_origin(kind) is dict for kind in kinds):
            fix = f"{option_key} is a single value without keys: set {option_key}"
            self.problems.append(Problem(item.spelled, item.value, fix))
            return
        option = copy.deepcopy(default_of(cls, name) if before is None else before.value)
        node = option = option if isinstance(option, dict) else {}
        for step in inside[:-1]:
            node[step] = dict(child) if isinstance(child := node.get(step), dict) else {}
            node = node[step]
        node[inside[-1]] = item.value
        spelled = option_key if before is None else before.spelled
        tree[name] = Assignment(option_key, option, None, item.source, spelled)

    def _reject(self, item: Assignment, cls: type, key: str) -> None:
        near = nearest_keys(self.cls, cls, key, item.key)
        hint = f"closest: {', '.join(near)}" if near else "CONFIG.md has all keys"
        self.problems.append(Problem(item.spelled, item.value, f"unknown key; {hint}"))

    # --- interpolation -----------------------------------------------------------------------------------------

    def _interpolate(self) -> None:
        """Replace ``${…}`` in assigned values. A name refers to an assigned value, else to the default."""
        waiting = [(tree, name, item) for tree, name, item in _assigned(self.tree) if _has_interpolation(item.value)]
        if not waiting:
            return
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        for tree, name, item in list(waiting):
            try:
                OmegaConf.create({"value": item.value}, flags={"allow_objects": True})
            except OmegaConfBaseException as error:
                self.problems.append(Problem(item.spelled, item.value, _unresolved(error)))
                waiting.remove((tree, name, item))
                del tree[name]
        full = OmegaConf.create(_merged(self.cls, None, self.tree), flags={"allow_objects": True})
        for tree, name, item in waiting:
            try:
                value = OmegaConf.select(full, item.key, throw_on_resolution_failure=True)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
                tree[name] = item.with_value(value)
            except OmegaConfBaseException as error:
                self.problems.append(Problem(item.spelled, item.value, _unresolved(error)))
                del tree[name]

    # --- building ----------------------------------------------------------------------------------------------

    def _construct(self, cls: type[Section], tree: Tree, base: Section | None, at: str) -> Section:
        """Build an object of ``cls``: the default of its parent, ``base``, with the values of the tree."""
        values: dict[str, Any] = {}
        for name, item in tree.items():
            key = f"{at}{name}"
            if isinstance(item, dict):
                section = sections_of(cls)[name]
                parent_default = getattr(base, name) if base is not None else default_of(cls, name)
                values[name] = self._construct(section, item, parent_default, f"{key}.")
                continue
            try:
                values[name] = self._convert(field_types(cls)[name], item)
            except Mismatch as mismatch:
                self.problems.append(Problem(item.spelled, item.value, str(mismatch)))
            except ConfigError as error:
                self.problems += [Problem(f"{item.spelled}.{p.key}", p.value, p.fix) for p in error.problems]
        inherited = {} if base is None else {n: getattr(base, n) for n in field_types(cls) if _differs(base, n)}
        try:
            cfg = cls(**(inherited | values))
        except (ValueError, AssertionError) as error:  # a check in the __post_init__ of a custom subclass
            self.problems.append(Problem(at.rstrip(".") or cls.__name__, "", str(error)))
            cfg = base if base is not None else cls()
        cfg.__dict__["_given"] = frozenset(values)
        return cfg

    def _convert(self, annotation: Any, item: Assignment) -> Any:
        try:
            return convert(annotation, item.value, item.text)
        except Mismatch:
            if item.text is None or not isinstance(item.value, str):
                raise
            typed = item.typed()  # a string in a mapping of overrides: "4" for an int
            if isinstance(typed, str):
                raise
            return convert(annotation, typed)


def _unresolved(error: Exception) -> str:
    """Return what is wrong with an interpolation, and how one is written."""
    return f"{str(error).splitlines()[0]}; write ${{other.key}} or ${{oc.env:NAME}}"


def _values_below(assignments: Iterable[Assignment]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each assignment, and of each entry of its mappings."""
    for item in assignments:
        yield item.key, item.typed() if item.text is not None and isinstance(item.value, str) else item.value
        if isinstance(item.value, Mapping):
            yield from _values_below(item.below(str(name), value) for name, value in item.value.items())


def _differs(base: Section, name: str) -> bool:
    return bool(getattr(base, name) != default_of(type(base), name))


def _assigned(tree: Tree) -> Iterator[tuple[Tree, str, Assignment]]:
    """Yield each assignment with the tree that holds it."""
    for name, item in list(tree.items()):
        if isinstance(item, dict):
            yield from _assigned(item)
        else:
            yield tree, name, item


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(_has_interpolation(entry) for entry in value.values())
    return isinstance(value, list | tuple) and any(_has_interpolation(entry) for entry in value)


def _merged(cls: type[Section], base: Section | None, tree: Tree) -> dict[str, Any]:
    """Return nested values: those assigned, else the defaults."""
    values: dict[str, Any] = {}
    for name in field_types(cls):
        default = getattr(base, name) if base is not None else default_of(cls, name)
        item = tree.get(name)
        if name in sections_of(cls) and (isinstance(item, dict) or (item is None and default is not None)):
            values[name] = _merged(sections_of(cls)[name], default, item or {})
        else:
            values[name] = item.value if isinstance(item, Assignment) else default
    return values


class BaseConfig(Section):
    """Parent of all configuration dataclasses."""

    @classmethod
    def from_dict_config(cls, cfg: Mapping[str, Any]) -> Self:
        return from_mapping(cls, cfg)
