"""The graphs that everybody runs, as lists of predecessors, with the cheapest functions that still prove the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random

Preds = Sequence[Sequence[int]]

MASK = 0xFFFF


def none():
    return 1


def one(a):
    return a + 1 & MASK


def two(a, b):
    return a + b & MASK


def three(a, b, c):
    return a + b + c & MASK


def many(parts):
    return sum(parts) & MASK


def function(arity: int) -> Callable[..., int]:
    """`many` takes a list; the others take their inputs one by one."""
    return (none, one, two, three)[arity] if arity <= 3 else many


@cache
def shape(name: str) -> Preds:
    kind, _, size = name.partition(" ")
    return {"chain": chain, "fan": fan, "layered": layered, "tree": tree, "small": small}[kind](int(size))


def chain(size: int) -> Preds:
    return [[node - 1] if node else [] for node in range(size)]


def fan(width: int) -> Preds:
    return [[], *([0] for _ in range(width)), list(range(1, width + 1))]


def layered(size: int, width: int = 100) -> Preds:
    """Each node needs three of the layer before it; the same graph every time."""
    dice = Random(2030)
    above = [range(max(0, node // width - 1) * width, node // width * width) for node in range(size)]
    return [dice.sample(layer, 3) if layer else [] for layer in above]


def tree(leaves: int) -> Preds:
    preds: list[list[int]] = [[] for _ in range(leaves)]
    level = list(range(leaves))
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        level = list(range(len(preds), len(preds) + len(pairs)))
        preds += map(list, pairs)
    return preds


def small(size: int) -> Preds:
    """A few steps such as a request has: one to begin with, some side by side, one that joins them."""
    return [[], *([0] for _ in range(size - 2)), [1, 2, size - 2]]


def answer(preds: Preds) -> int:
    """The value of the last node, by a plain loop."""
    values: list[int] = []
    for needs in preds:
        inputs = [values[node] for node in needs]
        values.append(many(inputs) if len(inputs) > 3 else function(len(inputs))(*inputs))
    return values[-1]
