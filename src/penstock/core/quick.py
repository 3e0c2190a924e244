"""Frozen values in numbers: what is read by the thousand must not cost more than a plain object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, make_dataclass
from functools import partial
from typing import Any, TypeVar

__all__ = ["quick", "quick_tuple"]

V = TypeVar("V")


def quick(kind: type[V]) -> Callable[..., V]:
    """
    Makes a frozen value at the cost of a plain one, from all of its fields in their order. A frozen dataclass sets each field
    by `object.__setattr__`, eight times as slow; a twin with the same slots is filled in and then becomes the frozen thing.
    """
    twin: Any = make_dataclass(kind.__name__, [field.name for field in fields(kind)], slots=True)  # type: ignore[arg-type]  # it is a dataclass

    def make(*values: Any) -> V:
        draft = twin(*values)
        draft.__class__ = kind
        made: V = draft
        return made

    return make


def quick_tuple(kind: type[V]) -> Callable[[Iterable[Any]], V]:
    """Makes a named tuple from all of its fields in their order, without the call of a Python function that its own constructor is."""
    return partial(tuple.__new__, kind)  # type: ignore[type-var]  # a named tuple is a tuple
