"""Where another process finds a function: by the name under which it lies in its module, behind its decorator."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Place", "place_of"]

#: Module, and the path inside it.
Place: TypeAlias = tuple[str, str]


def place_of(fn: Any) -> Place:
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} is defined inside a function, or is a lambda: no worker process can find it by name; "
            'define it at the top of a module, or use kind="thread"'
        )
    return fn.__module__, fn.__qualname__
