"""
What happened in one run, when and where (GR-7).

Recorded only for runs that were picked when they began, so an ordinary run pays nothing. A record is one attempt at a
node. When a node became ready is not recorded, because it follows: when the last of its predecessors ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.calls.graph_plan import NodeStatus, Plan, Queue, critical_path
from penstock.core.text import error_line

if TYPE_CHECKING:
    from penstock.graphs.graph_telemetry import RunSpans
    from penstock.graphs.node_calls import NodeAttempt
    from penstock.graphs.result import RunResult

__all__ = ["Trace", "TraceEvent", "TraceNote", "TraceRecorder", "events_of", "write_chrome"]


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


class TraceNote(NamedTuple):
    node: int
    item: int
    number: int
    worker: str
    started: float
    ended: float
    error: BaseException | None

    @classmethod
    def of(cls, attempt: NodeAttempt, ended: float, error: BaseException | None) -> TraceNote:
        worker = attempt.worker.thread.name if attempt.worker is not None else ""
        return cls(attempt.node, attempt.item, attempt.number, worker, attempt.started, ended, error)


class TraceRecorder:
    """Takes notes while the run goes on: one `list.append` an attempt, from any thread."""

    def __init__(self, spans: RunSpans | None = None) -> None:
        self.notes: list[TraceNote] = []
        self.spans = spans  # of OpenTelemetry, if the run is sampled there

    def note(self, attempt: NodeAttempt, now: float, error: BaseException | None) -> None:
        if self.spans is not None:
            self.spans.end(attempt.span, now, error)
        self.notes.append(TraceNote.of(attempt, now, error))


class Trace:
    """The record of one run: `events` to read, `chrome()` for Perfetto, `svg()` for a picture of the graph."""

    def __init__(self, result: RunResult, run_id: int, began: float, recorder: TraceRecorder) -> None:
        self.result = result
        self.run_id = run_id
        self.events = events_of(result.plan, began, recorder.notes)

    def durations(self) -> dict[str, float]:
        """By node: from its first attempt to the end of its last, so a map node counts as long as it lasted."""
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for event in self.events:
            first.setdefault(event.node, event.started)
            last[event.node] = max(last.get(event.node, 0.0), event.ended)
        return {node: last[node] - first[node] for node in first}

    def critical_path(self) -> list[str]:
        """The chain of nodes that took the most time together: what must get shorter for the run to get shorter."""
        plan = self.result.plan
        durations = {plan.index[node]: seconds for node, seconds in self.durations().items()}
        return [plan.names[node] for node in critical_path(plan, durations)]

    def chrome(self) -> dict[str, Any]:
        """As the Trace Event Format, which chrome://tracing and ui.perfetto.dev open."""
        return {"traceEvents": list(_chrome_events(self)), "displayTimeUnit": "ms"}

    def svg(self) -> str:
        """A picture of the graph with lanes, times and the critical path. Needs `pip install penstock[pictures]`."""
        from penstock.graphs.picture import draw  # noqa: PLC0415  # most traces are never drawn

        return draw(self.result.plan, self)


def write_chrome(path: str | Path, *traces: Trace) -> None:
    """Several runs in one file, each as a process of its own."""
    events = [event for trace in traces for event in _chrome_events(trace)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def events_of(plan: Plan, began: float, taken: list[TraceNote]) -> list[TraceEvent]:
    notes = sorted(taken, key=lambda note: note.started)
    done_at: dict[int, float] = {}
    for note in notes:
        done_at[note.node] = max(done_at.get(note.node, 0.0), note.ended)
    # Several calls overlap on the event loop and in a pool: each gets the first row that is free, as a worker would.
    rows: dict[str, list[float]] = {}
    events = []
    for note in notes:
        worker = note.worker or _row(rows, Queue(plan.queues[note.node]).name.lower(), note)
        ready = max((done_at.get(fed, began) for fed in plan.predecessors[note.node]), default=began)
        events.append(
            TraceEvent(
                node=plan.names[note.node],
                lane=str(plan.lane(note.node)),
                worker=worker,
                attempt=note.number,
                item=note.item if note.item >= 0 else None,
                ready=ready - began,
                started=note.started - began,
                ended=note.ended - began,
                error=None if note.error is None else error_line(note.error),
            )
        )
    return events


def _row(rows: dict[str, list[float]], kind: str, note: TraceNote) -> str:
    ends = rows.setdefault(kind, [])
    for number, end in enumerate(ends):
        if end <= note.started:
            ends[number] = note.ended
            return f"{kind}-{number + 1}"
    ends.append(note.ended)
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
    """From the end of each node to the beginning of each that needs it."""
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
