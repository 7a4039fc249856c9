"""Tools that environments call: methods marked with ``@tool``, gathered in groups that share state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class tool:
    """Marks a method of a :class:`ToolGroup` as a tool under its own name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self.function, instance)


class ToolGroup:
    """Tools with common state, such as a connection. Subclasses mark their tools with ``@tool``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tools = {
            marked.name: getattr(self, attribute)
            for attribute in dir(type(self))
            if isinstance(marked := getattr(type(self), attribute), tool)
        }

    def get_name(self) -> str:
        """Return the group's name."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the tool of that name, or None."""
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the names of all tools."""
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return tool name → group name."""
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool. Raises ValueError for a name that the group does not have."""
        if name not in self._tools:
            raise ValueError(f"tool group {self.name!r} has no tool {name!r}; it has {self.get_tool_names()}")
        return self._tools[name](*args, **kwargs)
