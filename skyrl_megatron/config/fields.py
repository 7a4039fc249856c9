"""Typed fields of configuration classes: their allowed values, and which of them were set. Also reads the fields that
classes of other packages declare.

The type of a field may carry a rule, ``Annotated[int, Bounds(1)]`` or ``Annotated[str, OneOf("k1", "k2")]``.
:mod:`skyrl_megatron.config.load` checks it when a value is read, and CONFIG.md shows it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import importlib.util
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers from ``low`` to ``high`` (both ends included unless ``open_low``), or one of the values ``also``."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    also: tuple[float, ...] = ()

    def allows(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds; NaN never is."""
        if value in self.also:
            return True
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if self.high is None else f"at most {self.high:g}"
        also = "".join(f", or {value:g}" for value in self.also)
        return " and ".join(part for part in (low, high) if part) + also


class OneOf:
    """One of several strings."""

    __slots__ = ("choices",)

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def allows(self, value: object) -> bool:
        """Return whether ``value`` is one of the choices."""
        return value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"


class Registered(OneOf):
    """One of several strings, or a name that a plugin registers: the rules ask its registry, as plugins are loaded
    after the configuration is read."""

    __slots__ = ()

    def allows(self, value: object) -> bool:
        """Return whether ``value`` may be a name, as a list written as text is not."""
        return isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None

    def __str__(self) -> str:
        return f"{super().__str__()}, or the name of a plugin's"


Count = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
EverySteps = Annotated[int, Bounds(1, also=(-1, 0))]
Positive = Annotated[float, Bounds(0, open_low=True)]
NonNegative = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]


class Section:
    """Parent of all configuration dataclasses.

    Records which fields the constructor was given, so that derived and hardware-dependent values never override a
    user's value: see :meth:`is_set`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the names of the fields given to the constructor, which a dataclass does not keep."""
        self = super().__new__(cls)
        if dataclasses.is_dataclass(cls):
            positional = [field.name for field in dataclasses.fields(cls)][: len(args)] if args else []
            self.__dict__["_given"] = frozenset([*positional, *kwargs])
        return self

    def is_set(self, name: str) -> bool:
        """Return whether the field was set: given to the constructor, or different from its default."""
        return name in self.__dict__.get("_given", ()) or getattr(self, name) != default_of(type(self), name)

    def is_touched(self) -> bool:
        """Return whether this section, or one inside it, has a field that :meth:`is_set`."""
        for name in field_types(type(self)):
            value = getattr(self, name)
            if value.is_touched() if isinstance(value, Section) else self.is_set(name):
                return True
        return False

    @classmethod
    def with_named_sections(cls, given: Mapping[str, Any]) -> type[Self]:
        """Return this class, or a subclass with the sections that plugins add for what ``given`` names.

        ``given``: dotted key → value of everything that is assigned, before it is checked.
        """
        return cls

    @classmethod
    def from_dict_config(cls, cfg: Mapping[str, Any]) -> Self:
        """Build this class from a nested mapping: a plain dict or an OmegaConf ``DictConfig``.

        Fields left out take their defaults; a mapping given for a dict-typed field replaces its default. Raises
        ConfigError with every unknown key, wrong type and value out of range.
        """
        raise NotImplementedError


def _once_per_class[T](function: Callable[[type], T]) -> Callable[[type], T]:
    """Cache results with ``functools.cache``, and keep the type signature."""
    return functools.cache(function)


@_once_per_class
def field_types(cls: type) -> dict[str, Any]:
    """Return field name → type of a configuration class, in order, with ``Annotated`` rules."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a class defined in a function, whose local names are not accessible
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def default_of(cls: type, name: str) -> Any:
    """Return a fresh copy of the default value of a field."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return copy.deepcopy(field.default)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: members of unions, without ``Annotated``, ``None`` as ``NoneType``."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return members_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in members_of(part))
    return (annotation,)


@_once_per_class
def sections_of(cls: type) -> dict[str, type[Section]]:
    """Return field name → configuration class of the fields of ``cls`` that hold a section.

    If the default is of a subclass, that class is returned: ``algorithm: AlgorithmConfig =
    field(default_factory=MyAlgorithmConfig)`` has the keys of ``MyAlgorithmConfig``.
    """
    sections: dict[str, type[Section]] = {}
    for name, annotation in field_types(cls).items():
        for member in members_of(annotation):
            if isinstance(member, type) and issubclass(member, Section):
                default = default_of(cls, name)
                sections[name] = type(default) if isinstance(default, member) else member
    return sections


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield all settings below a configuration class: (dotted key, class that declares it, field name)."""
    sections = sections_of(cls)
    for name in field_types(cls):
        if name in sections:
            yield from leaves(sections[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", cls, name


def get_path(cfg: Section, key: str) -> Any:
    """Return the value at a dotted key below ``cfg``."""
    return functools.reduce(getattr, key.split("."), cfg)


def owner_of(cfg: Section, key: str) -> tuple[Section, str]:
    """Return the section that holds a dotted key, and the field's name in it."""
    path, _, name = key.rpartition(".")
    return (get_path(cfg, path) if path else cfg), name


@dataclass(frozen=True, slots=True)
class Declared:
    """A field that a class of another package declares."""

    annotation: ast.expr
    default: Any = dataclasses.MISSING
    """``MISSING`` if the source has no literal."""
    owner: tuple[str, str, str] | None = None
    """If the default is that of another class's field: module, class and field."""

    def wanted(self, value: Any) -> str | None:
        """Return what the value must be, if its type does not fit; None if it fits, or the type is not a plain one."""
        kinds = _plain_kinds(self.annotation)
        if kinds is None or any(fits(value) for _, fits in kinds):
            return None
        return "must be " + " or ".join(dict.fromkeys(name for name, _ in kinds))


def declared_fields(module: str, name: str) -> frozenset[str] | None:
    """Return the names of :func:`declared`; None if the package is not installed."""
    fields = declared(module, name)
    return None if fields is None else frozenset(fields)


@functools.cache
def declared(module: str, name: str) -> Mapping[str, Declared] | None:
    """Return the annotated fields of the class ``name`` in ``module`` and of its bases; None if the package is not
    installed. Raises LookupError if the module has no such class.

    Bases in other modules of the same package are read too; bases of other packages are left out. Names of literal
    types, and defaults that are those of another class (``other: int = Config.other``), are looked up where they are.
    """
    tree = source_of(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inherited = [_fields_of(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
            return {name: field for fields in (*inherited, _fields_in(module, node)) for name, field in fields.items()}
    raise LookupError(f"{module} has no class {name}")


@functools.cache
def source_of(module: str) -> ast.Module | None:
    """Return the syntax tree of a module without importing it; None if it is not installed."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _fields_in(module: str, node: ast.ClassDef) -> dict[str, Declared]:
    return {
        item.target.id: _declared_by(module, item)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not item.target.id.startswith("_") and "ClassVar" not in ast.unparse(item.annotation)
    }


def _declared_by(module: str, item: ast.AnnAssign) -> Declared:
    annotation, value = _Literals(module).visit(copy.deepcopy(item.annotation)), item.value
    match value:
        case ast.Attribute(ast.Name(cls), of) | ast.Call(
            ast.Name("get_field"), [ast.Name(cls), ast.Constant(str(of))]
        ):
            if other := _fields_of(module, cls).get(of):
                return Declared(annotation, other.default, (_definition(module, cls)[0], cls, of))
        case ast.Call(keywords=keywords):
            arguments = {keyword.arg: keyword.value for keyword in keywords}
            empty: dict[Any, Any] = {"list": [], "dict": {}, "set": []}
            if "default_factory" in arguments and (factory := ast.unparse(arguments["default_factory"])) in empty:
                return Declared(annotation, empty[factory])
            value = arguments.get("default")
    if isinstance(value, ast.Name):  # a constant
        value = getattr(_definition(module, value.id)[1], "value", None)
    return Declared(annotation, _literal(value))


class _Literals(ast.NodeTransformer):
    """Replaces names of literal types by the types."""

    def __init__(self, module: str) -> None:
        self.module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = getattr(_definition(self.module, node.id)[1], "value", None)
        return value if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal" else node


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):  # 1024 * 1024, 2**32
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int) and isinstance(right, int):
            return left**right if isinstance(node.op, ast.Pow) else left * right
    try:
        return dataclasses.MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return dataclasses.MISSING


def _fields_of(module: str, cls: str) -> Mapping[str, Declared]:
    """Return the fields of a class that ``module`` has or imports; {} if it is of another package."""
    home, node = _definition(module, cls)
    return (declared(home, cls) or {}) if isinstance(node, ast.ClassDef) else {}


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """Return where a name of a module is defined, and the statement; None if it is in another package."""
    defined, imported = _names_of(module)
    if name in defined or name not in imported:
        return module, defined.get(name)
    home, original = imported[name]
    return _definition(home, original) if home.split(".")[0] == module.split(".")[0] else (home, None)


@functools.cache
def _names_of(module: str) -> tuple[dict[str, ast.stmt], dict[str, tuple[str, str]]]:
    """Return the statements that define names of a module, and names that it imports → (module, name)."""
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    if (tree := source_of(module)) is None:
        return defined, imported
    parts = module.split(".")
    package = parts if source_of(f"{module}.__init__") is not None else parts[:-1]
    under_a_condition = (node for block in tree.body if isinstance(block, ast.If | ast.Try) for node in block.body)
    for node in [*tree.body, *under_a_condition]:
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            imported |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}
            continue
        for target in [node, *getattr(node, "targets", []), getattr(node, "target", None)]:
            if name := getattr(target, "name", None) or getattr(target, "id", None):
                defined[name if isinstance(name, str) else name.id] = node
    return defined, imported


_Kind = tuple[str, Callable[[Any], bool]]
_KINDS: dict[str, _Kind] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an int", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "str": ("a str", lambda value: isinstance(value, str)),
    **{name: ("a list", lambda value: isinstance(value, list | tuple)) for name in ("list", "List", "tuple", "Tuple")},
    **{name: ("a mapping", lambda value: isinstance(value, Mapping)) for name in ("dict", "Dict")},
}


def _plain_kinds(node: ast.expr) -> list[_Kind] | None:
    """Return the kinds of values of an annotation; None if it has a type that configurations cannot contain."""
    if isinstance(node, ast.Constant) and node.value is None:
        return [("null", lambda value: value is None)]
    if isinstance(node, ast.Name):
        return [_KINDS[node.id]] if node.id in _KINDS else None
    parts: Sequence[ast.expr | None] = [None]
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Literal" and all(isinstance(choice, ast.Constant) for choice in inside):
            choices = [choice.value for choice in inside if isinstance(choice, ast.Constant)]
            return [(f"one of {', '.join(map(str, choices))}", lambda value: value in choices)]
        if node.value.id in _KINDS:
            return [_KINDS[node.value.id]]
        if node.value.id in ("Optional", "Union"):
            parts = [*inside, *([ast.Constant(None)] if node.value.id == "Optional" else [])]
    kinds = [None if part is None else _plain_kinds(part) for part in parts]
    return None if None in kinds else [kind for part in kinds for kind in part or ()]


def field_docstrings(cls: type) -> dict[str, str]:
    """Return field name → its docstring in the source, for a class and its parents."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not issubclass(owner, Section) or not inspect.get_annotations(owner) or owner.__module__ == "types":
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    return texts
