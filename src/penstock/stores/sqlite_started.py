"""
The jobs that a round has started, for whoever runs them. They have just been looked at, so nobody reads them again; and they are made into values by
whoever asks for them, who has time while the start is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.core.demand import Demand
from penstock.core.intent import Intent, alike
from penstock.core.job import Job
from penstock.core.retry import NONE_YET, Counters
from penstock.core.states import State
from penstock.core.words import DispatchId, Span
from penstock.stores.rows import intent_from, make_job
from penstock.stores.sqlite_floor import Queued

__all__ = ["Draft", "Started", "made"]


class Started:
    """What jobs that start together share: most differ by their payload alone. `said`: as the statement `said_of` has it, by their numbers."""

    def __init__(
        self, demand: Demand, fresh: Mapping[int, Intent], said: Mapping[int, Sequence[Any]], per_point: Span
    ) -> None:
        self._demand, self._fresh, self._said, self._per_point = demand, fresh, said, per_point
        self._like: Any = None
        self._make: Callable[[str], Intent] | None = None

    def job(self, queued: Queued, dispatch_id: DispatchId) -> Job:
        no, job_id, priority, turn, fence, expected, _, _, _, max_runtime, max_active, _ = queued
        fence += 1
        intent = self._fresh.get(no)
        if intent is not None:  # submitted at this moment too
            since = turn + priority * self._per_point
            return make_job(
                no, job_id, intent, State.RUNNING, since, since, None, fence, dispatch_id, NONE_YET, 0, 0, 0, None, "", "{}",
                None, None, None
            )  # fmt: skip
        (_, payload, tags, unit, cost_limit, time_sensitive, retry_delays, earliest, deadline, key,
         created_at, ready_at, not_before, crash, unavailable, error, active, spent, spent_before, progress) = self._said[no]  # fmt: skip
        like = (
            (priority, earliest, deadline, expected, max_runtime, max_active, key),
            (tags, unit, cost_limit, time_sensitive, retry_delays),
        )
        if self._make is None or like != self._like:
            self._like = edited, said = like
            self._make = alike(intent_from(self._demand, edited, ("", *said)))
        failed = Counters(crash, unavailable, error, 0) if crash or unavailable or error else NONE_YET
        return make_job(
            no, job_id, self._make(payload), State.RUNNING, created_at, ready_at, not_before, fence, dispatch_id, failed,
            active, spent, spent_before, progress, "", "{}", None, None, None
        )  # fmt: skip


#: A job that was started, until somebody asks for it.
Draft: TypeAlias = tuple[Started, Queued, DispatchId]


def made(draft: Draft) -> Job:
    started, queued, dispatch_id = draft
    return started.job(queued, dispatch_id)
