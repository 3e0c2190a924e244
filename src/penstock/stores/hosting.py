"""What the stores say alike about hosts."""

from __future__ import annotations

from penstock.core.changes import Note, principal_data
from penstock.core.hosts import Host
from penstock.core.job import EventKind
from penstock.core.refusals import DispatcherHeld
from penstock.core.words import HostId

__all__ = ["drain_note", "name_taken"]


def name_taken(host: Host) -> DispatcherHeld:
    return DispatcherHeld(
        f"another scheduler that is alive on this database is called {host.host} too: give this one a name of its own (host.name)",
        holder=host.host,
    )


def drain_note(host: HostId, draining: bool, by: str) -> Note:
    return Note(EventKind.HOST_SET, data={"host": host, "draining": draining, **principal_data(by)})
