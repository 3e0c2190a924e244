"""
The jobs that a round has started, for whoever runs them. They have just been looked at, so nobody reads them again; and they are made into values by
whoever asks for them, who has time while the start is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.demand import AdmissionClass
from penstock.core.intent import Intent, alike
from penstock.core.job import Job
from penstock.core.retry import NONE_YET, Counters
from penstock.core.states import JobState
from penstock.core.words import DispatchId, Moment, Money, Span
from penstock.stores.rows import intent_from, make_job
from penstock.stores.sqlite_floor import Queued

__all__ = ["Draft", "Drafts", "Started", "made"]

_decode: Final = msgspec.json.Decoder(tuple[Any, ...]).decode
#: What `said_of` leaves out of a job that has nothing of it.
_NOTHING: Final = (None, None, 0, None, None, None, None, None, 0, 0, 0, 0, 0, 0, None)
_UNTRIED: Final = (None, NONE_YET, 0, 0, 0, None)


class Started:
    """What jobs that start together share: most differ by their payload alone. `said`: as the statement `said_of` has it, by their numbers."""

    def __init__(
        self,
        admission_class: AdmissionClass,
        fresh: Mapping[int, Intent],
        said: Mapping[int, Sequence[Any]],
        per_point: Span,
    ) -> None:
        self._admission_class, self._fresh, self._said, self.per_point = (
            admission_class,
            fresh,
            said,
            per_point,
        )
        self._like: Any = None
        self._make: Callable[[str], Intent] | None = None
        self._life: tuple[Moment | None, Counters, Span, Money, Money, float | None] = _UNTRIED

    def job(self, queued: Queued, dispatch_id: DispatchId) -> Job:
        no, job_id, priority, turn, fence, expected, _, _, _, max_runtime, max_active, _ = queued
        fence += 1
        intent = self._fresh.get(no)
        if intent is not None:  # submitted at this moment too
            since = turn + priority * self.per_point
            return make_job(
                no, job_id, intent, JobState.RUNNING, since, since, None, fence, dispatch_id, NONE_YET, 0, 0, 0, None, "", "{}",
                None, None, None, None
            )  # fmt: skip
        _, payload, unit, created_at, ready_at, rest = self._said[no]
        like = (priority, expected, max_runtime, max_active, unit, rest)
        if self._make is None or like != self._like:
            self._read(like)
        assert self._make is not None
        not_before, failed, active, spent, spent_before, progress = self._life
        return make_job(
            no, job_id, self._make(payload), JobState.RUNNING, created_at, ready_at, not_before, fence, dispatch_id, failed,
            active, spent, spent_before, progress, "", "{}", None, None, None, None
        )  # fmt: skip

    def _read(self, like: tuple[Any, ...]) -> None:
        priority, expected, max_runtime, max_active, unit, rest = self._like = like
        (tags, cost_limit, time_sensitive, retry_delays, earliest, deadline, key,
         not_before, crash, unavailable, error, active, spent, spent_before, progress) = _NOTHING if rest is None else _decode(rest)  # fmt: skip
        edited = (priority, earliest, deadline, expected, max_runtime, max_active, key)
        said = ("", tags, unit, cost_limit, time_sensitive, retry_delays)
        self._make = alike(intent_from(self._admission_class, edited, said))
        failed = Counters(crash, unavailable, error, 0) if crash or unavailable or error else NONE_YET
        self._life = (not_before, failed, active, spent, spent_before, progress)


#: A job that was started, until somebody asks for it.
Draft: TypeAlias = tuple[Started, Queued, DispatchId]
#: By dispatch and its moment: one that never came to be, because its commit failed, comes back under the same name.
Drafts: TypeAlias = dict[tuple[DispatchId, Moment], Draft]


def made(draft: Draft) -> Job:
    started, queued, dispatch_id = draft
    return started.job(queued, dispatch_id)
