"""
What intents that are alike but for their payload have in common, as a submit writes it.

Most submits are one call each of the same few functions, so all that does not depend on the moment is put together once and kept: it was a third of what
a submit costs in its process.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from penstock.core.demand import AdmissionClass, admission_class_of
from penstock.core.intent import Intent, all_but_payload
from penstock.core.job import Place, place
from penstock.core.order import Ordering
from penstock.core.words import JobId, Moment
from penstock.stores.postgres_pages import PostgresAdmissionClasses
from penstock.stores.postgres_wire import columns, text
from penstock.stores.rows import intent_row, job_row

__all__ = ["Forms"]

#: Beyond it they are put together anew: somebody gives every job something of its own.
MOST_KEPT: Final = 1_000
#: As `job_row` and `intent_row` have them.
_NAMES: Final = (
    *("addon_id", "demand", "line", "turn", "ready_at", "urgent_at", "priority", "created_at"),
    *("earliest_start_at", "deadline_at", "expected_sec", "max_runtime_sec", "max_active_sec"),
    *("idempotency_key", "tags", "unit", "cost_limit", "time_sensitive", "retry_delays", "body_hash"),
)


class _Form(NamedTuple):
    """`row`: by name, with the values as the server reads them."""

    admission_class: AdmissionClass
    row: dict[str, bytes | None]


class Forms:
    def __init__(self, demands: PostgresAdmissionClasses, ordering: Ordering) -> None:
        self._demands, self._ordering = demands, ordering
        self._kept: dict[Hashable, _Form] = {}

    def prepare(self, intents: Sequence[Intent]) -> None:
        """Their demands, before the transaction that needs them."""
        if len(intents) == 1 and all_but_payload(intents[0]) in self._kept:
            return
        new, like = set(), None
        for intent in intents:
            if (its := all_but_payload(intent)) != like:
                like = its
                if its not in self._kept:
                    new.add(admission_class_of(intent))
        self._demands.make(new)

    def columns(self, firsts: Sequence[Intent], now: Moment) -> dict[str, bytes]:
        """For `submit_jobs`: one row for each, and each is one of many."""
        rows = [self._row(intent, place(intent, now, None, self._ordering), now) for intent in firsts]
        return dict(zip(_NAMES, columns(rows), strict=True))

    def row(self, intent: Intent, now: Moment) -> dict[str, bytes | None]:
        """For `submit_alike`. What does not depend on the moment was perhaps put together before."""
        form = self._kept.get(all_but_payload(intent)) or self._make(intent, now)
        its = place(intent, now, None, self._ordering, form.admission_class)
        return {
            **form.row,
            "line": b"%d" % its.line(now),
            "turn": b"%d" % its.turn,
            "ready_at": b"%d" % its.ready_at,
            "created_at": b"%d" % now,
        }

    def _make(self, intent: Intent, now: Moment) -> _Form:
        its = place(intent, now, None, self._ordering)
        form = _Form(
            its.admission_class, dict(zip(_NAMES, map(text, self._row(intent, its, now)), strict=True))
        )
        if intent.idempotency_key is None:  # or it would have the payload's hash, and never come again
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[all_but_payload(intent)] = form
        return form

    def _row(self, intent: Intent, its: Place, now: Moment) -> tuple[Any, ...]:
        class_no = self._demands.number(its.admission_class)
        _, _, *of_job = job_row(0, JobId(""), intent, its, class_no=class_no, now=now)
        _, _, *of_intent, body = intent_row(0, intent)
        return (*of_job, *of_intent, None if body is None else body.hex())
