"""
The base class of worker groups, with the methods that a call queue uses; the counters of calls and workers;
and the slot of one worker.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.errors import WorkerCrashedError
from penstock.pools.context import watch_forks
from penstock.pools.future import Call

if TYPE_CHECKING:
    from penstock.pools.call_queue import CallQueue
    from penstock.pools.options import WorkerOptions
    from penstock.pools.workers.replies import ReplyReader


class ReportedWorker(Protocol):
    """One worker, as a snapshot reads it."""

    settled: int


class WorkerGroup(ABC):
    """
    The workers of one pool. Methods are called with the call queue's lock held, unless they say otherwise.
    """

    kind: str
    can_be_killed = True
    workers: Sequence[ReportedWorker]
    reader: ReplyReader | None = None  # None: the workers report their results themselves
    #: Prepare a call, without the lock. Returns the function that makes its payload. None: the payload is
    #: made.
    pack_call: Callable[[Call[Any], Any, tuple[Any, ...], dict[str, Any]], Callable[[], None] | None]

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        self._call_queue = call_queue
        self._options = options
        self._closing = False
        self.gone = threading.Event()  # set when the group is closed and its last worker has ended
        self.halted: WorkerCrashedError | None = None
        self.last_crash: str | None = None
        watch_forks(self)

    @abstractmethod
    def dispatch_pending(self, now: float) -> None:
        """Give pending calls to workers, as many as they can take."""

    @abstractmethod
    def stop_call(self, call: Call[Any], now: float) -> None:
        """Stop this running call, because its caller is gone."""

    @abstractmethod
    def in_flight(self) -> Iterable[Call[Any]]: ...

    @abstractmethod
    def loads(self) -> tuple[int, ...]:
        """The number of calls that each worker has."""

    @abstractmethod
    def worker_counts(self) -> dict[str, int]:
        """How many workers are running, restarting, stopped, halted."""

    # Without the lock

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """End the workers; nothing starts until `resume`."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def close(self, *, kill: bool) -> None:
        """Start no more calls. Each worker ends when it is idle; with `kill`, now."""

    def abandon(self) -> None:
        """Disable the group in a forked copy of this process: the workers belong to the parent."""
        self._call_queue.abandon()
        self.gone.set()


@dataclass(slots=True)
class CallTotals:
    """Plain counters, changed under the call queue's lock and read from anywhere."""

    dispatched: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    timed_out: int = 0
    rejected: int = 0
    requeued: int = 0
    spawned: int = 0
    crashed: int = 0
    terminated: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Condition(Enum):
    """The condition of a worker slot."""

    COLD = "cold"  # not started, or stopped when idle: the next call starts it
    LIVE = "live"
    RETIRING = "retiring"  # takes no more calls
    BACKING_OFF = "backing off"  # crashed; restarts after its delay
    STOPPED = "stopped"  # until `resume`


# Module constants, because they are read for every call and reading a member of an Enum is slow.
LIVE: Final = Condition.LIVE
COLD: Final = Condition.COLD


class WorkerSlot:
    """
    One slot of a group whose workers can die: the state that the group needs to restart, retire and replace
    the worker in it, which is a process of this machine or an actor on a cluster.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.condition = Condition.COLD
        self.calls: dict[int, Call[Any]] = {}
        self.assigned = 0  # calls given to the present worker
        self.settled = 0  # calls settled in this slot, over all its workers
        self.idle_since = 0.0
        self.looked_at = 0.0  # when its memory was last measured
        # The error that the worker itself reported: a reason and a traceback.
        self.failure: tuple[str, str] | None = None
        self.kill_reason: str | None = None  # why the pool ended it; None if it died on its own
        self.unread: set[int] = set()  # dispatches that it ran and whose results are lost with it
        self.opened = False

    def open(self) -> None:
        """Open the slot for calls. `close` must follow."""
        self.condition = Condition.LIVE
        self.opened = True
        self.assigned = 0
        self.unread = set()
        self.kill_reason = self.failure = None

    @property
    def running(self) -> int:
        """
        The dispatch that the worker runs, or may run. 0: none. Valid even after its death.
        """
        raise NotImplementedError

    def kill(self, why: str) -> None:
        """Kill the worker. Its death is handled like any other."""
        if self.kill_reason is None:
            self.kill_reason = why
        self.condition = Condition.RETIRING

    def reap(self) -> str:
        """Reap the dead worker. Returns how it ended, in words."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of `open`. `running` is valid until then."""
        self.opened = False

    def memory(self) -> int:
        """The resident memory of the worker in bytes. 0: unknown."""
        raise NotImplementedError

    def crashed(self, call: Call[Any] | None, cause: str, words: str = "") -> WorkerCrashedError:
        unread = call is not None and call.dispatch in self.unread
        when = "before the result of this call was read" if unread else "while it ran this call"
        error = WorkerCrashedError(
            words or f"worker {self.number} died {when}: {cause}",
            worker=self.number,
            attempt=call.attempt if call is not None else 0,
            cause=cause,
            started=call is not None,
        )
        if self.failure is not None and self.failure[1]:
            error.add_note(self.failure[1])
        return error
