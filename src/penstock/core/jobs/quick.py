"""Frozen values in numbers: what is made by the thousand must not cost more than a plain object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, make_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["quick", "quick_but_one", "quick_tuple"]

V = TypeVar("V")


def quick(kind: type[V]) -> Callable[..., V]:
    """
    Makes a frozen value at the cost of a plain one, from all of its fields in their order. A frozen dataclass sets each field
    by `object.__setattr__`, eight times as slow; a twin with the same slots is filled in and then becomes the frozen thing.
    """
    maker: Callable[..., V] = _written(kind, [field.name for field in fields(kind)])()  # type: ignore[arg-type]  # it is a dataclass
    return maker


def quick_but_one(kind: type[V], name: str) -> Callable[[V], Callable[[Any], V]]:
    """Of a value, what makes others that differ from it by this one field alone."""
    maker, rest = _written(kind, [name]), [field.name for field in fields(kind) if field.name != name]  # type: ignore[arg-type]  # it is a dataclass
    known = attrgetter(*rest)
    return lambda like: maker(*known(like))


def _written(kind: type[Any], given: list[str]) -> Callable[..., Any]:
    """
    Written out, as dataclasses write their methods: what makes a value is one call that looks up nothing. It asks for the fields that are `given`;
    the others are handed to what is returned here.
    """
    names = [field.name for field in fields(kind)]
    known = [name for name in names if name not in given]
    lines = [
        f"def maker({', '.join(known)}):",
        f"    def make({', '.join(given)}):",
        "        draft = new(twin)",
        *(f"        draft.{name} = {name}" for name in names),
        "        draft.__class__ = kind",
        "        return draft",
        "    return make",
    ]
    scope: dict[str, Any] = {
        "new": object.__new__,
        "twin": make_dataclass(kind.__name__, names, slots=True),
        "kind": kind,
    }
    exec("\n".join(lines), scope)  # noqa: S102 - names of fields of our own, none of which is `draft`
    maker: Callable[..., Any] = scope["maker"]
    return maker


def quick_tuple(kind: type[V]) -> Callable[[Iterable[Any]], V]:
    """Makes a named tuple from all of its fields in their order, without the call of a Python function that its own constructor is."""
    return partial(tuple.__new__, kind)  # type: ignore[type-var]  # a named tuple is a tuple
