"""Shows the scheduler through its own HTTP API: as a live picture, or as lines of text."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock import Client
from penstock.wire import EventInfo, Lease, Stats

__all__ = ["Board", "LiveBoard", "PlainBoard", "Sight"]

STATES = ("QUEUED", "DISPATCHING", "RUNNING", "DONE", "FAILED", "CANCELED", "BLOCKED")
TOLD = frozenset({"SUBMITTED", "RUNNING", "REQUEUED", "DONE", "FAILED", "CANCELED", "BLOCKED", "RETRIED"})


@dataclass(frozen=True, slots=True)
class View:
    stats: Stats
    leases: Sequence[Lease]
    news: Sequence[str]
    why: str


class Sight:
    """Reads the API and remembers the events since `after`. It requests a job's name once."""

    def __init__(self, client: Client, after: int) -> None:
        self._client = client
        self._after = after
        self._names: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def look(self) -> View:
        client = self._client
        page = client.events(after=self._after, limit=500)
        self._after = page.next
        news = [line for event in page.events if (line := self._line(event))]
        return View(client.stats(), client.leases(limit=12), news, self._why())

    def _line(self, event: EventInfo) -> str:
        if event.job_id is None or event.state is None:
            return ""
        self._states[event.job_id] = event.state
        if event.kind not in TOLD:
            return ""
        reason = f" ({event.reason})" if event.reason else ""
        return f"{event.at:%H:%M:%S}  {self._name(event.job_id):28} {event.kind}{reason}"

    def _name(self, job_id: str) -> str:
        if job_id not in self._names:
            job = self._client.job(job_id)
            self._names[job_id] = f"{job.addon_id} {job.job_type} {job_id[-8:]}"
        return self._names[job_id]

    def _why(self) -> str:
        """Why one of the waiting jobs waits."""
        waiting = self._client.jobs(states=["QUEUED"], limit=1).jobs
        if not waiting:
            return ""
        return f"{self._name(waiting[0].job_id)}: {self._client.explain(waiting[0].job_id).text}"

    def states(self, job_ids: Sequence[str]) -> dict[str, int]:
        return dict(Counter(self._states.get(job_id, "QUEUED") for job_id in job_ids))


class Board(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def show(self, view: View) -> None: ...


class PlainBoard:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()

    def show(self, view: View) -> None:
        for line in view.news:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class LiveBoard:
    def __init__(self) -> None:
        self._live = Live(auto_refresh=False)
        self._lines: deque[str] = deque(maxlen=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, view: View) -> None:
        self._lines.extend(view.news)
        page = Table.grid(padding=(0, 0, 1, 0))
        page.add_row(_counts(view.stats))
        page.add_row(_running(view))
        page.add_row(
            Text(f"next  {view.why}" if view.why else "nothing waits", style="yellow" if view.why else "dim")
        )
        page.add_row(Text("\n".join(self._lines), style="dim"))
        page.add_row(Text("Ctrl-C ends it; what is queued stays.", style="dim"))
        self._live.update(page, refresh=True)


def _counts(stats: Stats) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("addon")
    for state in STATES:
        table.add_column(state.lower(), justify="right")
    for addon, jobs in sorted(stats.addons.items()):
        table.add_row(addon, *(str(jobs.get(state, 0) or "·") for state in STATES))
    return table


def _running(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"running: {view.stats.units_in_use} of {view.stats.capacity} units", min_width=30)
    table.add_column("units", justify="right")
    table.add_column("")
    for lease in view.leases:
        bar = ProgressBar(total=1.0, completed=lease.progress or 0.0, width=24)
        table.add_row(
            f"{lease.addon_id} {lease.job_type} {(lease.job_id or '')[-8:]}", str(lease.cost_units), bar
        )
    return table
