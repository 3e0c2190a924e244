"""
What an addon may learn about other addons.

An addon may learn that other addons use the machine, but no names of their jobs, addons or workers. `Viewer`
removes names before words are made, so no text contains them. An event shows only the fields that are listed
here; each reason removes its own names (`BaseReason.hidden`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from penstock.core.jobs.forecast import Ahead, Outlook
from penstock.core.jobs.job import DEPENDENCY_UNMET, Event, EventKind, Job
from penstock.core.jobs.reason_base import Hides
from penstock.core.jobs.reasons import REASONS, Reason, from_json
from penstock.core.jobs.types import AddonId, JobId

#: Fields of an event's data that are about its own job or addon, in events of every kind.
_OWN: Final = frozenset(
    {
        "addon_id", "after", "asked", "batch", "budget", "by", "canceled", "condition", "count", "deadline_at", "dispatch_id", "done",
        "earliest_start_at", "error", "failed", "fence", "fields", "first", "held_by", "instead_of", "key", "kind", "limit", "moment", "not_before", "open",
        "overshoot", "paused", "pid", "priority", "schedule", "spent", "text", "too_late_for", "until", "waited",
        "weight", "worker",
    }
)  # fmt: skip


class Viewer(Struct, frozen=True):
    """The addon that reads. `owns`: whether a job belongs to it."""

    addon_id: AddonId
    owns: Callable[[JobId], bool]

    def job(self, job_id: JobId | None) -> JobId | None:
        return job_id if job_id is not None and self.owns(job_id) else None

    def ended_job(self, job: Job) -> Job:
        """The job without the name of an unmet parent of another addon."""
        if job.denied != DEPENDENCY_UNMET:
            return job
        data = json.loads(job.denied_data)
        if self.job(data["parent"]) is not None:
            return job
        return replace(job, denied_data=json.dumps(data | {"parent": ""}))

    def signal(self, by: str) -> str:
        """A signal such as `p95_ms of shop`, without the name of another addon."""
        name, of, source = by.partition(" of ")
        return f"{name} of another addon" if of and source != self.addon_id else by

    def outlook(self, outlook: Outlook) -> Outlook:
        heads = (head if self.job(head.job_id) else Ahead(None, None, head.why) for head in outlook.ahead)
        return replace(
            outlook,
            reason=None if outlook.reason is None else self.reason(outlook.reason),
            ahead=tuple(heads),
            next_when_ends=self.job(outlook.next_when_ends),
        )

    def reason(self, reason: Reason) -> Reason:
        return reason.hidden(Hides(self.addon_id, self.job, self.signal))

    def event(self, event: Event) -> Event:
        """An event of this addon with the data that the addon may see."""
        return replace(event, data=self._data(event))

    def _data(self, event: Event) -> dict[str, Any]:
        match event.kind:
            case EventKind.DENIED if event.reason in REASONS:
                reason = asdict(self.reason(from_json(event.reason, event.data)))
                return reason | {name: event.data[name] for name in ("after",) if name in event.data}
            case EventKind.PREEMPT_REQUESTED:
                shown = {"for": self.job(event.data.get("for"))}
            case EventKind.SIGNALED:
                shown = {"for": event.data.get("for")}
            case _:
                shown = {}
        if "job_id" in event.data:
            shown["job_id"] = self.job(event.data["job_id"])
        if "parent" in event.data:
            shown["parent"] = self.job(event.data["parent"])
        return {name: value for name, value in event.data.items() if name in _OWN} | shown
