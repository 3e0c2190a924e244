"""
A lease without a job: may this much work start now? (SPEC LS-1)

Whoever asks is not in line, so everybody in line who could start now and counts for at least as much goes first. Asking often therefore wins nothing.
"""

from __future__ import annotations

from penstock.core.admission import Admitted, Conditions, Decision, Denied, Limits, decide
from penstock.core.demand import Demand
from penstock.core.order import Floor, Ordering, Verdict, effective
from penstock.core.reasons import QueuedAhead, retry_after_sec

__all__ = ["weigh_loan"]


def weigh_loan(
    floor: Floor, conditions: Conditions, limits: Limits, ordering: Ordering, *, demand: Demand, priority: int
) -> tuple[Verdict, Decision]:
    decision = decide(demand, floor.books, conditions, limits, floor.now)
    if isinstance(decision, Denied):
        return Verdict(), decision
    for line in floor.lines():
        head = next(line.jobs, None)
        if head is None or effective(head.turn, floor.now, ordering.aging) < priority:
            continue
        theirs = decide(line.demand, floor.books, conditions, limits, floor.now, urgent=line.urgent)
        if isinstance(theirs, Admitted):
            reason = QueuedAhead(head.job_id, head.priority)
            return Verdict(), Denied(reason, retry_after_sec(reason, floor.now))
    floor.books.take(demand, floor.now, ordering.sharing)
    return Verdict(loan=demand), decision
