"""Which threads may wait for room, and which must not because others wait for them (DQ-11)."""

from __future__ import annotations

import sys
import threading


class _OwnThreads(threading.local):
    """`yes` on a thread of Penstock's own, or on one of the user's that does its work for the moment."""

    yes = False


own_threads = _OwnThreads()


def never_block_here() -> None:
    """Called by each thread of Penstock's own: a `submit` from it, as in a done-callback, must not wait."""
    own_threads.yes = True


def may_block() -> bool:
    if own_threads.yes:
        return False
    events = sys.modules.get("asyncio.events")
    return events is None or events._get_running_loop() is None
