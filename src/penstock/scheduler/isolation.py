"""
Writing many operations in one transaction, so that one that cannot be written fails alone.

A store writes a batch or nothing. When it raises anything but Unavailable, some operation of the batch is at fault: the batch is halved until that one stands
alone. Each operation is tried at most as often as the batch can be halved, and nothing is retried for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.errors import Unavailable

__all__ = ["write_apart"]

T = TypeVar("T")
A = TypeVar("A")


def write_apart(write: Callable[[Sequence[T]], Sequence[A]], operations: Sequence[T]) -> list[A | Exception]:
    """The answer to each operation, or what the store raised for it alone. Unavailable: nothing can be written now."""
    if not operations:
        return []
    try:
        return list(write(operations))
    except Unavailable:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the store raises belongs to one operation
        if len(operations) == 1:
            return [error]
    half = len(operations) // 2
    return write_apart(write, operations[:half]) + write_apart(write, operations[half:])
