"""One place in a crew whose workers can die: a process here, or an actor on a cluster."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from penstock.core.errors import WorkerCrashedError
from penstock.local.call import Call


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
