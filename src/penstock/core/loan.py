"""
A lease without a job: may this much work start now? (SPEC LS-1)

Whoever asks is not in line, so everybody in line who could start now and counts for at least as much goes first. Asking often therefore wins nothing.
"""

from __future__ import annotations

from penstock.core.admission import AdmissionLimits, Admitted, Conditions, Decision, Denied, decide
from penstock.core.demand import AdmissionClass
from penstock.core.order import AdmissionView, Ordering, RoundResult, effective
from penstock.core.reasons import QueuedAhead, retry_after_sec

__all__ = ["decide_standalone_lease"]


def decide_standalone_lease(
    admission_view: AdmissionView,
    conditions: Conditions,
    limits: AdmissionLimits,
    ordering: Ordering,
    *,
    admission_class: AdmissionClass,
    priority: int,
) -> tuple[RoundResult, Decision]:
    decision = decide(admission_class, admission_view.ledger, conditions, limits, admission_view.now)
    if isinstance(decision, Denied):
        return RoundResult(), decision
    for line in admission_view.lines():
        head = next(line.jobs, None)
        if head is None or effective(head.turn, admission_view.now, ordering.aging) < priority:
            continue
        theirs = decide(
            line.admission_class,
            admission_view.ledger,
            conditions,
            limits,
            admission_view.now,
            urgent=line.urgent,
        )
        if isinstance(theirs, Admitted):
            reason = QueuedAhead(head.job_id, head.priority)
            return RoundResult(), Denied(reason, retry_after_sec(reason, admission_view.now))
    admission_view.ledger.take(admission_class, admission_view.now, ordering.sharing)
    return RoundResult(loan=admission_class), decision
