"""
Traces: the attempts of one run with their times and workers (GR-7); and the recorder of one run at a time.

Only runs that were chosen at their beginning are recorded, so other runs have no cost. A record is one
attempt at a node. The moment when a node became ready is not recorded: it is the end of its last predecessor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.calls.graph_plan import NodeStatus, Plan, Queue, critical_path
from penstock.core.text import error_line
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.graphs.graph_telemetry import RunSpans
    from penstock.graphs.node_attempts import NodeAttempt
    from penstock.graphs.result import RunResult
    from penstock.graphs.run import Run


#: The most nodes of a run that is recorded for `lanes()`: most of a larger one would not be shown.
_MOST_NODES: Final = 5_000
_MOST_BARS: Final = 400
#: A run that is younger than this is not shown yet: the complete one before it shows more.
_YOUNG: Final = 1.0  # seconds


class TraceEvent(NamedTuple):
    """One attempt at a node, or at one item of a map node. Times in seconds since the run began."""

    node: str
    lane: str
    worker: str
    attempt: int
    item: int | None
    ready: float
    started: float
    ended: float
    error: str | None

    @property
    def queue_delay(self) -> float:
        return max(0.0, self.started - self.ready)

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class TraceRecorder:
    """Keeps the attempts of a run that have ended: one `list.append` for each, from any thread."""

    def __init__(self, spans: RunSpans | None = None) -> None:
        self.attempts: list[NodeAttempt] = []
        self.spans = spans  # of OpenTelemetry, if the run is sampled

    def record(self, attempt: NodeAttempt, error: BaseException | None) -> None:
        attempt.ended, attempt.error = clock(), error
        if self.spans is not None:
            self.spans.end(attempt)
        self.attempts.append(attempt)


class Trace:
    """
    The record of one run: `events` to read, `chrome()` for Perfetto, `svg()` for a picture of the graph.

    For example:

        result = executor.run(plan, {"user_id": 7})
        penstock.write_chrome("run.json", result.trace)  # open it in Perfetto
    """

    def __init__(self, result: RunResult, run_id: int, began: float, recorder: TraceRecorder) -> None:
        self.result = result
        self.run_id = run_id
        self.events = events_of(result.plan, began, recorder.attempts)

    def durations(self) -> dict[str, float]:
        """
        Seconds by node, from the beginning of its first attempt to the end of its last.
        """
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for event in self.events:
            first.setdefault(event.node, event.started)
            last[event.node] = max(last.get(event.node, 0.0), event.ended)
        return {node: last[node] - first[node] for node in first}

    def critical_path(self) -> list[str]:
        """
        The chain of nodes with the longest total time. The run gets shorter only if this chain does.
        """
        plan = self.result.plan
        durations = {plan.index[node]: seconds for node, seconds in self.durations().items()}
        return [plan.names[node] for node in critical_path(plan, durations)]

    def chrome(self) -> dict[str, Any]:
        """As the Trace Event Format, which chrome://tracing and ui.perfetto.dev open."""
        return {"traceEvents": list(_chrome_events(self)), "displayTimeUnit": "ms"}

    def svg(self) -> str:
        """
        A picture of the graph with lanes, times and the critical path. Needs `pip install
        penstock[pictures]`.
        """
        from penstock.graphs.picture import draw  # noqa: PLC0415  # most traces are never drawn

        return draw(self.result.plan, self)


def write_chrome(path: str | Path, *traces: Trace) -> None:
    """
    Several runs in one file, each as a process of its own.

    For example:

        penstock.write_chrome("runs.json", *(result.trace for result in results))
    """
    events = [event for trace in traces for event in _chrome_events(trace)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def events_of(plan: Plan, began: float, recorded: list[NodeAttempt]) -> list[TraceEvent]:
    attempts = sorted(recorded, key=lambda attempt: attempt.started)
    done_at: dict[int, float] = {}
    for attempt in attempts:
        done_at[attempt.node] = max(done_at.get(attempt.node, 0.0), attempt.ended)
    # Calls on the event loop and in a pool overlap, so each gets the first free row.
    rows: dict[str, list[float]] = {}
    events = []
    for attempt in attempts:
        node, thread = attempt.node, attempt.worker and attempt.worker.thread.name
        ready = max((done_at.get(feeder, began) for feeder in plan.predecessors[node]), default=began)
        events.append(
            TraceEvent(
                node=plan.names[node],
                lane=str(plan.lane(node)),
                worker=thread or _row(rows, Queue(plan.queues[node]).name.lower(), attempt),
                attempt=attempt.number,
                item=attempt.item if attempt.item >= 0 else None,
                ready=ready - began,
                started=attempt.started - began,
                ended=attempt.ended - began,
                error=None if attempt.error is None else error_line(attempt.error),
            )
        )
    return events


def _row(rows: dict[str, list[float]], kind: str, attempt: NodeAttempt) -> str:
    ends = rows.setdefault(kind, [])
    for number, end in enumerate(ends):
        if end <= attempt.started:
            ends[number] = attempt.ended
            return f"{kind}-{number + 1}"
    ends.append(attempt.ended)
    return f"{kind}-{len(ends)}"


def _chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    result, pid = trace.result, trace.run_id
    rows = {
        worker: number
        for number, worker in enumerate(sorted({event.worker for event in trace.events}), start=1)
    }
    title = f"graph {result.plan.name!r}, run {pid}: {result.status}"
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": title}}
    for worker, tid in {"run": 0, **rows}.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": worker}}
    whole = {
        "ph": "X",
        "pid": pid,
        "tid": 0,
        "name": "run",
        "cat": "run",
        "ts": 0,
        "dur": _us(result.seconds),
    }
    yield {**whole, "args": {"status": str(result.status), "reason": result.reason}}
    ended: dict[str, TraceEvent] = {}
    for event in trace.events:
        yield _slice(event, pid, rows[event.worker])
        ended[event.node] = event
    yield from _arrows(trace, ended, rows)
    for status in (NodeStatus.SKIPPED, NodeStatus.CANCELED):
        for node in result.nodes(status):
            mark = {"ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": _us(result.seconds)}
            yield {**mark, "name": f"{status}: {node}", "cat": str(status)}


def _slice(event: TraceEvent, pid: int, tid: int) -> dict[str, Any]:
    name = event.node if event.item is None else f"{event.node}[{event.item}]"
    args: dict[str, Any] = {"queue_delay_ms": round(event.queue_delay * 1e3, 3), "attempt": event.attempt}
    if event.error is not None:
        args["error"] = event.error
    times = {"ts": _us(event.started), "dur": _us(event.seconds)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": event.lane, **times, "args": args}


def _arrows(trace: Trace, ended: dict[str, TraceEvent], rows: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Arrows from the end of each node to the beginning of its successors."""
    plan = trace.result.plan
    for event in trace.events:
        if event.attempt > 1 or event.item:
            continue
        for fed in plan.predecessors[plan.index[event.node]]:
            feeder = ended.get(plan.names[fed])
            if feeder is not None:
                edge = {"pid": trace.run_id, "name": "feeds", "cat": "edge", "id": f"{fed}-{event.node}"}
                yield {**edge, "ph": "s", "tid": rows[feeder.worker], "ts": _us(feeder.ended)}
                yield {**edge, "ph": "f", "bp": "e", "tid": rows[event.worker], "ts": _us(event.started)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class Bar(NamedTuple):
    """One attempt at a node, or at one item of a map node. Times in seconds since the run began."""

    node: str
    lane: str
    worker: str
    ready: float
    started: float
    ended: float | None  # None: it goes on
    failed: bool
    critical: bool  # known when the run is over: on the critical path


class LaneBars(NamedTuple):
    """One run, as bars in the rows of its workers."""

    graph: str
    run: int
    status: str  # running, or how it ended
    seconds: float
    nodes: int
    bars: tuple[Bar, ...]
    left_out: int  # earlier bars that are not shown


class RunRecorder:
    """
    Records one run of an executor at a time, for `GraphExecutor.lanes()`: which worker ran which node, and
    when.

    Recording every run would make graphs of short nodes several times slower. So a call of `lanes()` makes
    the executor record the next run, and after its end another one. Without such calls nothing is recorded.
    The recorder refers to a run only while it is alive; of an ended run it keeps the bars and not the values.
    """

    def __init__(self, name: str) -> None:
        self.wanted = False
        self._prefix = f"{name}-"
        self._run: Run | None = None
        self._past: LaneBars | None = None

    def accepts(self, plan: Plan) -> bool:
        return self.wanted and len(plan) <= _MOST_NODES

    def show_run(self, run: Run) -> None:
        """Show this recorded run."""
        if self.wanted:
            self.wanted = False
            self._run = run

    def ended(self, run: Run, result: RunResult) -> None:
        if run is self._run and result.trace is not None:
            self._past = self._lane_bars(
                result.plan, run.id, str(result.status), result.seconds, result.trace
            )
            self._run = None

    def current_bars(self) -> LaneBars | None:
        run = self._run
        if run is None:
            self.wanted = True
            return self._past
        if self._past is not None and clock() - run.started < _YOUNG:
            return self._past
        ended = [] if run.recorder is None else run.recorder.attempts
        events = events_of(run.plan, run.started, [*ended, *run.attempts.in_flight()])
        return self._lane_bars(run.plan, run.id, "running", clock() - run.started, events)

    def _lane_bars(
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
