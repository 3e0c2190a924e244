"""The trail, read with a cursor of one's own: who was away misses nothing, and who is slow delays nobody."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.job import Event
from penstock.stores.protocol import Store

__all__ = ["feed"]


def feed(store: Store, after: int = 0, page: int = 500) -> Iterator[Event]:
    """Everything written since `after`, then it ends; the `seq` of the last event is the next cursor."""
    while batch := store.events(after, page):
        yield from batch
        after = batch[-1].seq
