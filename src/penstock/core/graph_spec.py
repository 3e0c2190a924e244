"""What the author of a graph wrote, before and after every name in it has been looked up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from penstock.core.graph import Const, Env, NodeRules, OnError, Queue
from penstock.core.text import safe_repr

__all__ = ["ITEM_SOURCE", "GraphProblem", "Leaf", "Node", "NodeSpec", "Resolved", "leaves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as its author gave it, unchecked: whatever is wrong with it is reported when the graph is compiled."""

    fn: Any
    name: Any = None
    inputs: Any = field(default_factory=dict)
    lane: Any = None
    retries: Any = 0
    retry_delay: Any = 0.0
    retry_on: Any = (Exception,)
    timeout: Any = None
    on_error: Any = OnError.FAIL
    maps: bool = False
    over: Any = None
    each: Any = None
    limit: Any = None

    @property
    def title(self) -> str:
        given = self.name if self.name is not None else getattr(self.fn, "__name__", None)
        return (
            given
            if isinstance(given, str) and given
            else safe_repr(given if given is not None else self.fn, 200)
        )


@dataclass(frozen=True, slots=True)
class GraphProblem:
    """One mistake: where, of which kind, what is wrong, and what to change."""

    node: str | None
    kind: str
    text: str
    fix: str

    def __str__(self) -> str:
        where = f"node {self.node!r}: " if self.node is not None else ""
        return f"{where}{self.text}; {self.fix}"


class _Item:
    """The source of a map node's own item."""


ITEM_SOURCE: Final = _Item()

#: A node's name, an input of the environment, a constant, or the item of a map.
Leaf: TypeAlias = str | Env | Const | _Item
#: What feeds one parameter: one leaf, or several that become a list.
Resolved: TypeAlias = Leaf | tuple[Leaf, ...]


def leaves(source: Resolved) -> tuple[Leaf, ...]:
    return source if isinstance(source, tuple) else (source,)


@dataclass(slots=True)
class Node:
    """A node whose every input is known to exist."""

    name: str
    spec: NodeSpec
    queue: Queue
    rules: NodeRules
    parameters: Mapping[str, inspect.Parameter]
    feeds: dict[str, Resolved] = field(default_factory=dict)  # by parameter, in the function's order
    over: Resolved | None = None

    def feeders(self) -> list[str]:
        """The nodes it waits for, each once, in the order of its parameters."""
        sources = [*self.feeds.values(), *([] if self.over is None else [self.over])]
        return list(dict.fromkeys(leaf for leaf in _all_leaves(sources) if isinstance(leaf, str)))


def _all_leaves(sources: list[Resolved]) -> Iterator[Leaf]:
    for source in sources:
        yield from leaves(source)
