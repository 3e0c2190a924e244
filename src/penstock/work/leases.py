"""
The lease keeper renews the leases of running jobs, and learns which jobs must end. The library, the SDK
worker and the runner share it; each passes a function that sends renewals (a commit or a request) and one for
a stop.

A process measures a lease by its own clock, from the moment when it SENT the last renewal that was answered.
The scheduler counts from the arrival, which was later. So the process stops before the scheduler can grant
the job to another worker.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from penstock.core.errors import JobStopped, NotFound, StaleDispatch, Unavailable
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import DispatchId, EndReason, Money
from penstock.core.text import error_text
from penstock.work.context import JobFacts
from penstock.work.outcome import CurrentJob

log = logging.getLogger("penstock.work")

#: Fraction of a lease after which it is renewed: one lost renewal does no harm.
RENEW_AT: Final = 0.3
#: Seconds within which progress, spending and the process id reach the scheduler.
REPORT_SEC: Final = 1.0
RETRY_SEC: Final = 0.2
#: A clock that counts while the machine is suspended, because leases expire meanwhile.
boot_clock: Final = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class RenewalRequest(NamedTuple):
    """A renewal of one lease. A field is None if the scheduler has its value already."""

    dispatch_id: DispatchId
    progress: float | None
    #: The total spent by this attempt.
    spent: Money | None
    checkpoint: str | None
    pid: int | None


class RenewalReply(NamedTuple):
    """`ttl`: seconds from the moment of the request. `stop`: why the attempt must end. None: it need not."""

    ttl: float
    stop: EndReason | None = None
    should_yield: bool = False


class ActiveLease:
    """
    The lease of one dispatch that this process runs. Each attribute is written by one thread only, so no lock
    is needed.
    """

    #: On the keeper's clock. 0: the job has not begun.
    began_at = 0.0
    #: When the last renewal was sent, answered or not.
    tried_at = 0.0
    #: Why the attempt must end. None: it need not.
    stop: EndReason | None = None
    #: True when the scheduler refused the lease, or it was not renewed in time: the outcome does not count.
    lost = False
    #: True when the function has ended and its outcome is on its way to the scheduler.
    finished = False
    yielding = False
    pid_sent: int | None = None
    #: The latest values of the function, and the values that the scheduler has.
    latest_progress: float | None = None
    latest_spent: Money | None = None
    latest_checkpoint: str | None = None
    _sent: tuple[float | None, Money | None, str | None] = (None, None, None)

    def __init__(self, dispatch_id: DispatchId, sent_at: float, ttl: float) -> None:
        self.dispatch_id, self.sent_at, self.ttl = dispatch_id, sent_at, ttl

    @property
    def pid(self) -> int | None:
        """The process that runs the job."""
        return None

    @property
    def has_unsent(self) -> bool:
        latest = (self.latest_progress, self.latest_spent, self.latest_checkpoint)
        return self._sent != latest or self.pid not in (None, self.pid_sent)

    @property
    def owes_report(self) -> bool:
        """
        Whether spending or a checkpoint must still be sent, even after the end of the attempt. Progress need
        not.
        """
        return self.stop is None and self._sent[1:] != (self.latest_spent, self.latest_checkpoint)

    def request(self) -> RenewalRequest:
        progress, spent, checkpoint = self._sent
        return RenewalRequest(
            self.dispatch_id,
            None if self.latest_progress == progress else self.latest_progress,
            None if self.latest_spent == spent else self.latest_spent,
            None if self.latest_checkpoint == checkpoint else self.latest_checkpoint,
            None if self.pid == self.pid_sent else self.pid,
        )

    def was_sent(self, request: RenewalRequest) -> None:
        progress, spent, checkpoint = self._sent
        self._sent = (
            progress if request.progress is None else request.progress,
            spent if request.spent is None else request.spent,
            checkpoint if request.checkpoint is None else request.checkpoint,
        )
        self.pid_sent = request.pid or self.pid_sent

    def renewed(self, reply: RenewalReply, sent_at: float) -> None:
        """Apply a reply. Replies may overtake each other, so only that of the latest request counts."""
        if sent_at > self.sent_at:
            self.sent_at, self.ttl = sent_at, reply.ttl
        self.yielding = self.yielding or reply.should_yield
        self.stop = reply.stop or self.stop

    def lose(self, reason: EndReason = EndReason.LEASE_EXPIRED) -> None:
        self.stop, self.lost = self.stop or reason, True


def facts_of(
    job: Job, dispatch: Dispatch, attempt: int, checkpoint: str | None, parents: str | None = None
) -> JobFacts:
    intent = job.intent
    return JobFacts(
        job.job_id,
        intent.job_type,
        dispatch.dispatch_id,
        dispatch.fence,
        attempt,
        intent.addon_id,
        intent.tags,
        intent.deadline_at,
        intent.payload,
        checkpoint,
        parents,
    )


L = TypeVar("L", bound=ActiveLease)
#: A function that sends these renewals. Each reply may be an exception: StaleDispatch and NotFound refuse the
#: lease. It raises Unavailable when the scheduler cannot be reached.
Send: TypeAlias = Callable[[Sequence[RenewalRequest]], Sequence[RenewalReply | Exception]]


class LeaseKeeper(Generic[L]):
    """
    Renews the leases in `live`.

    In each step it calls `on_stop` for every lease that must end, and `on_yield` for every one that should
    yield, until the owner removes the lease from `live`. `at_risk`: the fraction of a lease after which an
    attempt must end without a renewal. `together`: when one lease is due, renew all in one request.
    """

    def __init__(
        self,
        send: Send,
        *,
        on_stop: Callable[[L], None],
        on_yield: Callable[[L], None],
        at_risk: float = 1.0,
        together: bool = False,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._send, self._on_stop, self._on_yield = send, on_stop, on_yield
        self._at_risk, self._together, self.clock = at_risk, together, clock
        #: The leases to renew. The owner adds and removes them, from any thread.
        self.live: dict[DispatchId, L] = {}
        self._unanswered = False

    def step(self) -> float:
        """Renew the leases that are due. Returns the moment of the next step."""
        leases = list(self.live.values())
        alive = [lease for lease in leases if not (self.must_stop(lease) and lease.lost)]
        for group in self._due(alive):
            if not self._try(group):
                break  # the other requests would fail in the same way
        now = self.clock()
        for lease in leases:
            if self.must_stop(lease):
                self._on_stop(lease)
            elif lease.yielding:
                self._on_yield(lease)
        next_at = min((self.due_at(lease) for lease in alive if not lease.lost), default=now + REPORT_SEC)
        return max(next_at, now + RETRY_SEC) if self._unanswered else next_at

    def _due(self, leases: list[L]) -> list[list[L]]:
        due = [lease for lease in leases if self.due_at(lease) <= self.clock()]
        if self._together:
            return [leases] if due else []
        return [[lease] for lease in due]

    def due_at(self, lease: ActiveLease) -> float:
        due = lease.sent_at + lease.ttl * RENEW_AT
        if lease.began_at and lease.has_unsent and not lease.finished:
            due = min(due, max(lease.tried_at, lease.began_at) + REPORT_SEC)
        return max(due, lease.tried_at + RETRY_SEC)

    def must_stop(self, lease: ActiveLease) -> bool:
        """
        Whether the attempt must stop. Reads the clock too: it must stop even if the keeper's thread could not
        run.
        """
        if lease.stop is None and self.clock() >= self.stop_at(lease):
            lease.lose()
        return lease.stop is not None

    def stop_at(self, lease: ActiveLease) -> float:
        """The moment when the attempt must end, unless the lease is renewed before."""
        return lease.sent_at + lease.ttl * self._at_risk

    def is_over(self, lease: ActiveLease) -> bool:
        """Whether the scheduler may have granted the job to another worker."""
        return self.clock() >= lease.sent_at + lease.ttl

    def note_stops(self, reasons: Mapping[DispatchId, EndReason | None]) -> None:
        """Note dispatches that the scheduler has told to end, other than by a reply."""
        for dispatch_id, reason in reasons.items():
            lease = self.live.get(dispatch_id)
            if lease is not None and reason is not None:
                lease.stop = reason
                self._on_stop(lease)

    def renew(self, lease: L) -> bool:
        """Renew a lease now. False: the scheduler did not answer; the next step sends the same values."""
        return self._try([lease])

    def _try(self, leases: list[L]) -> bool:
        try:
            for lease, error in self.send_now(leases):
                log.error("lease %s cannot be renewed: %s", lease.dispatch_id, error_text(error))
        except Unavailable as error:
            if not self._unanswered:
                log.warning("leases cannot be renewed now: %s", error)
            self._unanswered = True
            return False
        if self._unanswered:
            log.info("leases are renewed again")
        self._unanswered = False
        return True

    def send_now(self, leases: list[L]) -> list[tuple[L, Exception]]:
        """Renew these leases, and return the errors of single leases. Raises Unavailable."""
        sent_at = self.clock()
        requests = [lease.request() for lease in leases]
        for lease in leases:
            lease.tried_at = sent_at
        replies: Sequence[RenewalReply | Exception]
        try:
            replies = self._send(requests)
        except Unavailable:
            raise
        except Exception as error:  # noqa: BLE001  # the other leases go on
            replies = [error] * len(leases)
        problems = []
        for lease, request, reply in zip(leases, requests, replies, strict=True):
            lease.was_sent(request)  # even if its report was refused: the lease can be renewed without it
            if isinstance(reply, RenewalReply):
                lease.renewed(reply, sent_at)
            elif isinstance(reply, (StaleDispatch, NotFound)) and lease.finished:
                continue  # the outcome was sent meanwhile; its answer says whether it counts
            elif isinstance(reply, (StaleDispatch, NotFound)):
                log.warning("lease %s is lost: %s", lease.dispatch_id, reply)
                lease.lose()
            else:
                problems.append((lease, reply))
        return problems


class InvokedFunction(Protocol):
    """The function of a job, as an executor calls it."""

    @property
    def is_async(self) -> bool: ...

    def invoke(self, job: CurrentJob) -> Any: ...


class FunctionLease(ActiveLease):
    """The lease of a function that an executor of this process runs; also the channel of that function."""

    #: For the executor: the attempt is lost, and another thread has taken its place.
    given_up = False
    #: For the executor: the asyncio task or the pool's call by which it can end the function.
    ended_by: Any = None
    end_sent = False
    #: For the executor: called after each renewal.
    on_renewal: Callable[[], None] | None = None

    def __init__(
        self,
        facts: JobFacts,
        function: InvokedFunction,
        keeper: LeaseKeeper[Any],
        sent_at: float,
        ttl: float,
    ) -> None:
        self.dispatch_id, self.sent_at, self.ttl = facts.dispatch_id, sent_at, ttl
        self.facts, self.function, self._keeper = facts, function, keeper
        # Made here because every attempt sets it: an attribute that is made later costs a dictionary.
        self.began_at, self.finished = 0.0, False

    @property
    def pid(self) -> int | None:
        return self.ended_by.pid if hasattr(self.ended_by, "pid") else os.getpid()

    @property
    def canceled(self) -> bool:
        return self._keeper.must_stop(self)

    @property
    def over(self) -> bool:
        return self._keeper.is_over(self)

    @property
    def stop_at(self) -> float:
        return self._keeper.stop_at(self)

    def renewed(self, reply: RenewalReply, sent_at: float) -> None:
        super().renewed(reply, sent_at)
        if self.on_renewal is not None:
            self.on_renewal()

    def progress(self, fraction: float) -> None:
        self.latest_progress = fraction

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self.latest_spent = total

    def save_checkpoint(self, text: str) -> None:
        """Send the checkpoint at once. If the scheduler does not answer, the next renewal carries it."""
        if not self.canceled:
            self.latest_checkpoint = text
            self._keeper.renew(self)
        if self.lost:
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def log_handler(self) -> None:
        return None


class KeeperThread:
    """
    A thread that runs a keeper's steps. It runs no user code, so a function that computes for an hour keeps
    its lease. It calls `before_step` before each step, at most every 0.1 s however often `wake` is called.
    """

    def __init__(
        self, keeper: LeaseKeeper[Any], before_step: Callable[[], None], *, longest_pause: float = 0.5
    ) -> None:
        self._keeper, self._before_step, self._longest = keeper, before_step, longest_pause
        self._shortest = min(0.1, longest_pause)
        self._wakeup, self._stopping = Event(), Event()
        self._thread = Thread(target=self._run, name="penstock-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wakeup.set()

    def stop(self, timeout: float | None = None) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():  # not if a Ctrl-C came before its start
            self._thread.join(timeout)

    def _run(self) -> None:
        next_at = 0.0
        while not self._stopping.is_set():
            self._wakeup.clear()
            try:
                self._before_step()
                next_at = self._keeper.step()
            except Unavailable as error:
                log.warning("leases cannot be checked now: %s", error)
            except Exception:  # go on: without renewals every lease here expires
                log.exception("leases could not be renewed; the next step tries again")
            self._stopping.wait(self._shortest)
            self._wakeup.wait(max(0.0, min(self._longest, next_at - self._keeper.clock())))
