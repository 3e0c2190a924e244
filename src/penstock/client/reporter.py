"""
Reports outcomes to the scheduler: many in one request, repeated until it answers or the lease is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Final, NamedTuple, Protocol

from msgspec import Raw

from penstock.client.transport import error_of
from penstock.core.errors import NotFound, Refused, StaleDispatch, Unavailable, Unreachable
from penstock.core.jobs.batching import MOST_AT_ONCE
from penstock.core.jobs.types import EndReason
from penstock.core.text import safe_str, storable
from penstock.wire import Ended, Failure, OutcomeReport
from penstock.work.leases import FunctionLease
from penstock.work.outcome import RELEASED, Outcome

log = logging.getLogger("penstock.worker")

#: A batch of results that is larger than this goes in pieces; the scheduler takes a megabyte.
MOST_BYTES: Final = 500_000
PAUSE: Final = 0.25
_REPORTED: Final = {EndReason.COMPLETED, *map(EndReason, Failure)}


class ReportCalls(Protocol):
    def complete_many(self, outcomes: Sequence[OutcomeReport]) -> list[Ended]: ...

    def release(self, lease_id: str) -> object: ...


class OutcomeToSend(NamedTuple):
    lease: FunctionLease
    outcome: Outcome

    @property
    def released(self) -> bool:
        """The lease is given back without a result: the function stopped on request, or never began."""
        return self.outcome.end not in _REPORTED


class Reporter:
    """
    `reported` is called with each lease about which nothing more is sent. `renew` sends what a lease has not reported;
    False: the scheduler did not answer. `on_idle` is called when nothing is left to send.
    """

    def __init__(
        self,
        client: ReportCalls,
        reported: Callable[[FunctionLease, Outcome | None], None],
        renew: Callable[[FunctionLease], bool],
        on_idle: Callable[[], None],
    ) -> None:
        self._client, self._reported, self._renew, self._on_idle = client, reported, renew, on_idle
        self._out: deque[OutcomeToSend] = deque()
        self._changed = Condition()
        self._closing = self._sending = False
        self._silent = False

    @property
    def idle(self) -> bool:
        return not self._out and not self._sending

    def put(self, lease: FunctionLease, outcome: Outcome) -> None:
        with self._changed:
            self._out.append(OutcomeToSend(lease, outcome))
            self._changed.notify()

    def close(self) -> None:
        """`run` sends what is left and returns."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._out and not self._closing:
                    self._changed.wait()
                if not self._out:
                    return
            self._sending = True
            left = self._send(self._take())
            self._sending = False
            if not left:
                self._on_idle()
            else:
                with self._changed:
                    self._out.extendleft(reversed(left))
                    self._changed.wait(PAUSE)

    def _take(self) -> list[OutcomeToSend]:
        batch: list[OutcomeToSend] = []
        size = 0
        while self._out and len(batch) < MOST_AT_ONCE and size < MOST_BYTES:
            report = self._out.popleft()
            lease, outcome = report
            if lease.over:
                log.warning(
                    "job %s: its lease was over before its outcome could be reported; the job runs again",
                    lease.facts.job_id,
                )
                self._reported(lease, None)
                continue
            if lease.canceled and lease.lost and not report.released:
                log.warning("job %s: its outcome does not count (%s)", lease.facts.job_id, lease.stop)
                outcome = RELEASED
            batch.append(OutcomeToSend(lease, outcome))
            size += len(outcome.result or "") + 200
        return batch

    def _send(self, batch: list[OutcomeToSend]) -> list[OutcomeToSend]:
        """Returns what must be sent again, because the scheduler did not answer."""
        given = [report for report in batch if report.released]
        reports = [report for report in batch if not report.released]
        try:
            for lease, _ in batch:
                # After the end of the attempt the scheduler refuses what it spent.
                if lease.owes_report and not self._renew(lease):
                    raise Unreachable("the spending of an attempt could not be reported", sent=True)
            if reports:
                self._settle(reports)
                reports = []
            while given:
                self._release(given[-1])
                given.pop()
        except (Unreachable, Unavailable) as error:
            if not self._silent:
                log.warning("outcomes cannot be reported: %s", error)
            self._silent = True
        else:
            self._silent = False
        return reports + given

    def _settle(self, batch: list[OutcomeToSend]) -> None:
        try:
            answers = self._client.complete_many([_outcome(report) for report in batch])
        except Exception as error:
            if isinstance(error, Unavailable) and not _is_internal(error):
                raise
            self._apart(batch, error)  # refused, a fault of the scheduler, or it cannot be encoded
            return
        for report, answer in zip(batch, answers, strict=True):
            if answer.problem is None:
                self._reported(*report)
            else:
                self._refused(report, error_of(answer.problem))

    def _apart(self, batch: list[OutcomeToSend], error: Exception) -> None:
        """The scheduler refuses the request for one of them: sends each alone to learn which."""
        if len(batch) == 1:
            self._refused(batch[0], error)
            return
        for report in batch:
            self._settle([report])

    def _refused(self, report: OutcomeToSend, error: Exception) -> None:
        lease, outcome = report
        if isinstance(error, (StaleDispatch, NotFound)):
            log.warning("job %s: its end was refused: %s", lease.facts.job_id, error)
            self._reported(lease, None)
        elif isinstance(error, Unavailable) and not _is_internal(error):
            self.put(lease, outcome)
        elif outcome.end is EndReason.COMPLETED:
            words = storable(f"its result was not accepted: {safe_str(error)}")
            self.put(lease, Outcome(EndReason.JOB_ERROR, error=words))
        else:
            log.error("job %s: its end was not accepted: %s", lease.facts.job_id, safe_str(error))
            self._reported(lease, None)

    def _release(self, report: OutcomeToSend) -> None:
        try:
            self._client.release(report.lease.dispatch_id)
        except Refused as error:
            log.info("job %s: its lease had ended already: %s", report.lease.facts.job_id, error)
        self._reported(*report)


def _is_internal(error: Exception) -> bool:
    """The scheduler fails on this request: it would fail again, where one that is away or busy comes back."""
    return getattr(error, "code", "") == "internal"


def _outcome(report: OutcomeToSend) -> OutcomeReport:
    lease_id, outcome = report.lease.dispatch_id, report.outcome
    if outcome.end is EndReason.COMPLETED:
        return OutcomeReport(lease_id=lease_id, state="DONE", result=Raw((outcome.result or "null").encode()))
    return OutcomeReport(
        lease_id=lease_id, state="FAILED", error=outcome.error or "", failure=Failure(outcome.end)
    )
