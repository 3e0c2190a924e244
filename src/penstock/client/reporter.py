"""
Reports outcomes to the scheduler, many in one request, and repeats a request until the scheduler answers or
the lease is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Final, NamedTuple

from msgspec import Raw

from penstock.client.transport import error_of
from penstock.core.errors import NotFound, Refused, StaleDispatch, Unavailable, Unreachable
from penstock.core.jobs.types import EndReason, seconds
from penstock.core.jobs.workers import SOON, BatchPlan
from penstock.core.text import safe_str, storable
from penstock.wire import Failure, OutcomeAnswer, OutcomeReport
from penstock.work.leases import FunctionLease
from penstock.work.outcome import RELEASED, Outcome

log = logging.getLogger("penstock.worker")

#: Results beyond this many bytes are split over several requests; the scheduler takes a megabyte.
MOST_BYTES: Final = 500_000
PAUSE: Final = 0.25
_REPORTED: Final = {EndReason.COMPLETED, *map(EndReason, Failure)}


class OutcomeToSend(NamedTuple):
    """The outcome of one attempt, with its lease."""

    lease: FunctionLease
    outcome: Outcome

    @property
    def released(self) -> bool:
        """
        Whether the lease is given back without a result: the function stopped on request, or never began.
        """
        return self.outcome.end not in _REPORTED


class Reporter:
    """
    Sends outcomes in a thread of its own.

    `complete` and `release` send the requests. `reported` is called with each lease when nothing more is sent
    for it. `renew` sends what a lease has not reported yet, and returns False when the scheduler did not
    answer. `plan` says how many of the waiting outcomes to send now. `on_idle` is called when nothing is left
    to send.
    """

    def __init__(
        self,
        complete: Callable[[Sequence[OutcomeReport]], list[OutcomeAnswer]],
        release: Callable[[str], object],
        reported: Callable[[FunctionLease, Outcome | None], None],
        renew: Callable[[FunctionLease], bool],
        *,
        plan: Callable[[int], BatchPlan],
        on_idle: Callable[[], None],
    ) -> None:
        self._complete, self._release, self._reported = complete, release, reported
        self._renew, self._plan, self._on_idle = renew, plan, on_idle
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
            if len(self._out) == 1 or self._plan(len(self._out)).report:
                self._changed.notify()

    def close(self) -> None:
        """Let `run` send the remaining outcomes and return."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def run(self) -> None:
        while count := self._next_count():
            unsent = self._send(self._take(count))
            self._sending = False
            if not unsent:
                self._on_idle()
            else:
                with self._changed:
                    self._out.extendleft(reversed(unsent))
                    self._changed.wait(PAUSE)

    def _next_count(self) -> int:
        """Wait until outcomes are due, and return how many. 0: the reporter is closed and has sent all."""
        with self._changed:
            while self._out or not self._closing:
                count = self._plan(len(self._out)).report
                if count:
                    self._sending = True
                    return count
                self._changed.wait(seconds(SOON) if self._out else None)
            return 0

    def _take(self, count: int) -> list[OutcomeToSend]:
        batch: list[OutcomeToSend] = []
        size = 0
        for _ in range(count):
            if size >= MOST_BYTES:
                break
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
        """Send a batch. Returns the outcomes to send again, because the scheduler did not answer."""
        given = [report for report in batch if report.released]
        reports = [report for report in batch if not report.released]
        try:
            for lease, _ in batch:
                # Send the spending first: after the end of the attempt the scheduler refuses it.
                if lease.owes_report and not self._renew(lease):
                    raise Unreachable("the spending of an attempt could not be reported", sent=True)
            if reports:
                self._settle(reports)
                reports = []
            while given:
                self._give_back(given[-1])
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
            answers = self._complete([_outcome(report) for report in batch])
        except Exception as error:
            if isinstance(error, Unavailable) and not _is_internal(error):
                raise
            self._send_separately(batch, error)  # refused, a fault of the scheduler, or not to be encoded
            return
        for report, answer in zip(batch, answers, strict=True):
            if answer.problem is None:
                self._reported(*report)
            else:
                self._refused(report, error_of(answer.problem))

    def _send_separately(self, batch: list[OutcomeToSend], error: Exception) -> None:
        """Send each outcome alone, to find the one for which the scheduler refused the batch."""
        if len(batch) == 1:
            self._refused(batch[0], error)
            return
        for report in batch:
            self._settle([report])

    def _refused(self, report: OutcomeToSend, error: Exception) -> None:
        lease, outcome = report
        if isinstance(error, (StaleDispatch, NotFound)):
            log.warning("job %s: its outcome was refused: %s", lease.facts.job_id, error)
            self._reported(lease, None)
        elif isinstance(error, Unavailable) and not _is_internal(error):
            self.put(lease, outcome)
        elif outcome.end is EndReason.COMPLETED:
            words = storable(f"its result was not accepted: {safe_str(error)}")
            self.put(lease, Outcome(EndReason.JOB_ERROR, error=words))
        else:
            log.error("job %s: its outcome was not accepted: %s", lease.facts.job_id, safe_str(error))
            self._reported(lease, None)

    def _give_back(self, report: OutcomeToSend) -> None:
        try:
            self._release(report.lease.dispatch_id)
        except Refused as error:
            log.info("job %s: its lease had ended already: %s", report.lease.facts.job_id, error)
        self._reported(*report)


def _is_internal(error: Exception) -> bool:
    """Whether the scheduler itself fails on this request, so that repeating it is of no use."""
    return getattr(error, "code", "") == "internal"


def _outcome(report: OutcomeToSend) -> OutcomeReport:
    lease_id, outcome = report.lease.dispatch_id, report.outcome
    if outcome.end is EndReason.COMPLETED:
        return OutcomeReport(lease_id=lease_id, state="DONE", result=Raw((outcome.result or "null").encode()))
    return OutcomeReport(
        lease_id=lease_id, state="FAILED", error=outcome.error or "", failure=Failure(outcome.end)
    )
