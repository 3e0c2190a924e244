"""Fixtures for pytest. They import nothing of Penstock before a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.testing.virtual import VirtualClock, VirtualScheduler


@pytest.fixture
def scheduler() -> Iterator[VirtualScheduler]:
    """A scheduler in memory, on a clock that stands still. Nothing runs until `scheduler.drain()`."""
    from penstock.testing.virtual import VirtualScheduler  # noqa: PLC0415  # as said above

    with VirtualScheduler() as virtual:
        yield virtual
    virtual.close()


@pytest.fixture
def clock(scheduler: VirtualScheduler) -> VirtualClock:
    """The clock of `scheduler`."""
    return scheduler.clock
