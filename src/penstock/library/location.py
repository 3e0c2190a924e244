"""Where the jobs are: a file, a database that several share, or memory; and what that means for whoever runs them here."""

from __future__ import annotations

import os
import platform
import secrets
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.types import HostId
from penstock.scheduler.clock import SteadyClock
from penstock.scheduler.rules import LOCAL, SchedulerRules
from penstock.stores.api import Store
from penstock.stores.opening import is_address, open_store

__all__ = ["MEMORY", "as_host", "location", "store_at"]

MEMORY: Final = ":memory:"


def location(where: Any) -> str:
    if not isinstance(where, str | os.PathLike):
        raise TypeError(f"{where!r} is not a path; {_GIVE}")
    text = os.fspath(where)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where!r} is not a path; {_GIVE}")
    if isinstance(where, str) and is_address(text):
        return text
    scheme, separator, _ = text.partition("://")
    if separator and isinstance(where, str):
        raise ValueError(f"{scheme}:// is not supported; {_GIVE}")
    return text if text == MEMORY else str(Path(text).absolute())


_GIVE: Final = "give the file that holds the jobs, 'postgresql://...' or ':memory:'"


def as_host(rules: SchedulerRules, place: str) -> SchedulerRules:
    """
    Where many share the jobs, each process is a host. A name that came again, as pids do in containers, would make a start put back what
    its namesake is running; so it has a part that does not.
    """
    if not is_address(place) or rules.host != LOCAL:
        return rules
    name = HostId(f"{platform.node() or 'local'}-{os.getpid()}-{secrets.token_hex(3)}")
    return replace(rules, host=name)


def store_at(place: str, clock: SteadyClock, ordering: Ordering) -> Store:
    if place == MEMORY:
        from penstock.stores.memory.store import MemoryStore  # noqa: PLC0415  # only the store that is used

        return MemoryStore(clock, ordering=ordering)
    return open_store(place, clock, ordering)
