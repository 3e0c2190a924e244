"""
One run at a time for those who look on: which worker was in which node, and when.

Recording every run would make graphs of short nodes several times slower, and nobody can look at a thousand runs a second. So whoever looks has the
next run recorded, sees it while it goes on, and by looking again after its end asks for another. Nobody looks: nothing is recorded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.graphs.trace import TraceNote, events_of
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.core.calls.graph_plan import Plan
    from penstock.graphs.result import RunResult
    from penstock.graphs.run import Run
    from penstock.graphs.trace import Trace, TraceEvent

__all__ = ["Bar", "LaneBars", "RunRecorder"]

#: A run of more nodes is not recorded only to be looked at: it would cost what is seen by nobody.
_MOST_NODES: Final = 5_000
_MOST_BARS: Final = 400
#: A run that has only begun tells less than the whole one before it.
_YOUNG: Final = 1.0  # seconds


class Bar(NamedTuple):
    """One attempt at a node, or at one item of a map node. Times in seconds since the run began."""

    node: str
    lane: str
    worker: str
    ready: float
    started: float
    ended: float | None  # None: it goes on
    failed: bool
    critical: bool  # known when the run is over: one of those that made it take as long as it did


class LaneBars(NamedTuple):
    """One run, as bars in the rows of those who worked on it."""

    graph: str
    run: int
    status: str  # running, or how it ended
    seconds: float
    nodes: int
    bars: tuple[Bar, ...]
    left_out: int  # earlier bars, where there are too many


class RunRecorder:
    """Of one executor. It keeps a run only while that is alive: of one that has ended the bars stay, and the values go."""

    def __init__(self, name: str) -> None:
        self.vacant = False
        self._prefix = f"{name}-"
        self._run: Run | None = None
        self._past: LaneBars | None = None

    def fits(self, plan: Plan) -> bool:
        return self.vacant and len(plan) <= _MOST_NODES

    def offer(self, run: Run) -> None:
        """A run that is recorded, whoever wanted that."""
        if self.vacant:
            self.vacant = False
            self._run = run

    def ended(self, run: Run, result: RunResult) -> None:
        if run is self._run and result.trace is not None:
            self._past = self._lanes(result.plan, run.id, str(result.status), result.seconds, result.trace)
            self._run = None

    def look(self) -> LaneBars | None:
        run = self._run
        if run is None:
            self.vacant = True
            return self._past
        if self._past is not None and clock() - run.started < _YOUNG:
            return self._past
        events = events_of(run.plan, run.started, [*_notes(run), *_flying(run)])
        return self._lanes(run.plan, run.id, "running", clock() - run.started, events)

    def _lanes(
        self, plan: Plan, run_id: int, status: str, seconds: float, seen: Trace | list[TraceEvent]
    ) -> LaneBars:
        events, critical = (seen, ()) if isinstance(seen, list) else (seen.events, seen.critical_path())
        shown = tuple(self._bar(event, event.node in critical) for event in events[-_MOST_BARS:])
        return LaneBars(plan.name, run_id, status, seconds, len(plan), shown, len(events) - len(shown))

    def _bar(self, event: TraceEvent, critical: bool) -> Bar:
        worker = event.worker.removeprefix(self._prefix)
        ended = None if math.isinf(event.ended) else event.ended
        failed = event.error is not None
        return Bar(event.node, event.lane, worker, event.ready, event.started, ended, failed, critical)


def _notes(run: Run) -> list[TraceNote]:
    return [] if run.recorder is None else list(run.recorder.notes)


def _flying(run: Run) -> list[TraceNote]:
    """What goes on, as if it would do so for ever."""
    flying = [] if run.attempts is None else run.attempts.flying()
    return [TraceNote.of(attempt, math.inf, None) for attempt in flying]
