"""Which threads may wait for room, and which must not because others wait for them (DQ-11).

In words: why a call ended otherwise than by its run.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from penstock.core.calls.ticket import CancelPhase, Policy, QueueLimits
from penstock.core.errors import CallCanceled, CallTimeout, QueueDropError


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


_WHERE: Final = {
    CancelPhase.WAITING: "while it waited for room",
    CancelPhase.QUEUED: "in the queue",
    CancelPhase.IN_FLIGHT: "while it ran",
}


def canceled(reason: str | None, phase: CancelPhase) -> CallCanceled:
    why = f": {reason}" if reason else ""
    return CallCanceled(f"canceled {_WHERE[phase]}{why}", phase=phase, reason=reason)


def timed_out(timeout: float, phase: CancelPhase) -> CallTimeout:
    return CallTimeout(f"timed out after {timeout:g} s, {_WHERE[phase]}", phase=phase, timeout=timeout)


def dropped(pool: str, limits: QueueLimits) -> QueueDropError:
    how = "dropped for a newer call" if limits.policy is Policy.DROP_OLDEST else "refused"
    return QueueDropError(
        f"{how}: {pool} is full ({limits.max_in_flight} in flight, {limits.max_queue_depth} pending)",
        policy=limits.policy,
        max_in_flight=limits.max_in_flight,
        max_queue_depth=limits.max_queue_depth,
    )
