"""
What the workers are asked to do, as little as possible: what remains is the cost of the call.

Module-level and free of imports, so that every start method finds the functions and none pays for more than them.
"""

from __future__ import annotations

import asyncio
from typing import Any


def bump(number: int) -> int:
    return number + 1


def echo(payload: Any) -> Any:
    return payload


def renew(payload: Any) -> Any:
    """An answer that did not exist before, for pools that could hand the question's own memory back."""
    return payload + 1


async def abump(number: int) -> int:
    return number + 1


async def abump_later(number: int) -> int:
    """Gives the loop one turn in between, as every real await does."""
    await asyncio.sleep(0)
    return number + 1
