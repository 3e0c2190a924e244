"""What a gate expects of the workers behind it, and what it counts of what they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from penstock.local.call import Call

if TYPE_CHECKING:
    from penstock.local.loops import Mailbox


class WorkerGroup(Protocol):
    """The workers behind a gate. Every method is called with the gate's lock held."""

    def pump(self, now: float) -> None:
        """Hand out whatever can be handed out."""

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        """This call's caller is gone; end its run."""

    def in_flight(self) -> Iterable[Call[Any]]: ...

    def attend(self, box: Mailbox) -> None:
        """Without the lock, on a loop's own thread: it is about to await a call."""

    def nudge(self, call: Call[Any]) -> None:
        """Something happened to this call; whoever leads for its sake should look (also without the lock)."""

    def lead(self, call: Call[Any], timeout: float | None = None, *, for_space: bool = False) -> bool:
        """
        Without the lock: this thread is about to sleep until the call is settled (or, `for_space`, until it has its
        place); it may do the crew's waiting meanwhile. False: it may not, and must sleep. True: it need not any
        more, or the time is over.
        """


class Unled:
    """The part of a crew whose workers tell it themselves what they have done: there is nothing to lead."""

    def nudge(self, call: Call[Any]) -> None: ...

    def lead(self, call: Call[Any], timeout: float | None = None, *, for_space: bool = False) -> bool:  # noqa: ARG002  # as above
        return False

    def attend(self, box: object) -> None: ...


class CallTotals:
    """Plain counters, changed under the gate's lock and read by anybody."""

    __slots__ = ("canceled", "crashed", "dispatched", "failed", "rejected", "requeued", "spawned", "succeeded", "terminated", "timed_out")  # fmt: skip

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    dispatched: int
    succeeded: int
    failed: int
    canceled: int
    timed_out: int
    rejected: int
    requeued: int
    spawned: int
    crashed: int
    terminated: int

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
