"""What a gate expects of the workers behind it, and what it counts of what they do.

One place in a crew whose workers can die: a process here, or an actor on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.errors import WorkerCrashedError
from penstock.pools.future import Call

if TYPE_CHECKING:
    from penstock.pools.loops import Mailbox


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


class Condition(Enum):
    COLD = "cold"  # not started, or stopped: the next call starts it
    LIVE = "live"
    LEAVING = "leaving"  # takes no more calls
    RESTING = "resting"  # crashed; waits out its delay
    STOPPED = "stopped"  # until somebody starts the workers again


# Read for every call that is handed out; a look at the member of an Enum takes longer than the rest of that.
LIVE: Final = Condition.LIVE
COLD: Final = Condition.COLD


class WorkerSlot:
    """What a crew has to know of a worker to restart, retire and bury it, whatever the worker is made of."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.condition = Condition.COLD
        self.calls: dict[int, Call[Any]] = {}
        self.handed = 0  # calls given to the present worker
        self.settled = 0  # calls settled by this place, over all its workers
        self.idle_since = 0.0
        self.looked_at = 0.0  # when its memory was last looked at
        # What it said before it went: a reason and a traceback.
        self.last_words: tuple[str, str] | None = None
        self.ending: str | None = None  # why we ended it ourselves; None if it dies on its own
        self.unread: set[int] = set()  # dispatches that it ran, and whose results are lost with it
        self.opened = False

    def open(self) -> None:
        """From now on calls can be given to it, and `close` must follow some day."""
        self.condition = Condition.LIVE
        self.opened = True
        self.handed = 0
        self.unread = set()
        self.ending = self.last_words = None

    @property
    def running(self) -> int:
        """The dispatch that it runs (or may run, where nobody can know), 0 if none. True even after its death."""
        raise NotImplementedError

    def kill(self, why: str) -> None:
        """End it now, whatever it does. Its death is told like any other."""
        if self.ending is None:
            self.ending = why
        self.condition = Condition.LEAVING

    def reap(self) -> str:
        """Collect the dead worker; how it ended, in words."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what `open` took. `running` is true until then."""
        self.opened = False

    def memory(self) -> int | None:
        """Its resident memory in bytes, where that can be known."""
        raise NotImplementedError

    def crashed(self, call: Call[Any] | None, cause: str, words: str = "") -> WorkerCrashedError:
        unread = call is not None and call.dispatch in self.unread
        when = "before the result of this call was read" if unread else "while it ran this call"
        error = WorkerCrashedError(
            words or f"worker {self.place} died {when}: {cause}",
            worker=self.place,
            attempt=call.attempt if call is not None else 0,
            cause=cause,
            started=call is not None,
        )
        if self.last_words is not None and self.last_words[1]:
            error.add_note(self.last_words[1])
        return error
