"""
Everything Penstock raises, in one tree. The first level says whose move it is.

    PenstockError
    ├── CallEnded              the call will give no result; nobody's mistake
    │   ├── CallCanceled       somebody asked for that (also a concurrent.futures.CancelledError)
    │   ├── CallTimeout        its time ran out (also a TimeoutError)
    │   ├── QueueDropError     a load-shedding policy refused or evicted it
    │   ├── PoolClosedError    its pool was closed (also a RuntimeError)
    │   ├── WorkerCrashedError its worker died with it
    │   ├── JobStopped         leaves the function of a job that was asked to end; where the job goes, the scheduler knows
    │   ├── JobUnavailable     raised by a job's function: what it needs is away, so it is tried again by that schedule
    │   ├── NodeSkipped        the node of a graph was never called: what it needs failed, or its run ended
    │   └── NodeFailed         the node raised what must not travel as itself (SystemExit, a CancelledError)
    └── BadCall                the caller's mistake; the message names what to change
        ├── NotPicklable       an argument, a function or a result cannot cross to a worker (also a TypeError)
        └── GraphError         a graph that cannot be compiled (also a ValueError)

A wrong option is a plain ValueError or TypeError, raised where it was given. An exception of the called
function is not in this tree: it reaches the caller as itself, with the worker's traceback attached.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any, Self

__all__ = [
    "BadCall",
    "CallCanceled",
    "CallEnded",
    "CallTimeout",
    "GraphError",
    "JobStopped",
    "JobUnavailable",
    "NodeFailed",
    "NodeSkipped",
    "NotPicklable",
    "PenstockError",
    "PoolClosedError",
    "QueueDropError",
    "WorkerCrashedError",
]


class PenstockError(Exception):
    """The fields are keyword arguments and attributes at once, so that a log line and a handler see the same."""

    code = "error"

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data = data

    def __getattr__(self, name: str) -> Any:
        # Looked up through __dict__: an instance under reconstruction has no `data` yet.
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        notes = self.__dict__.get("__notes__")
        return _rebuild, (type(self), self.args[0], self.data), {"__notes__": notes} if notes else None

    def copy(self, **changes: Any) -> Self:
        """The same error as a new object. To raise one object twice makes its traceback longer each time."""
        copy = type(self)(str(self), **{**self.data, **changes})
        copy.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy

    def as_problem(self) -> dict[str, Any]:
        return {"code": self.code, "message": str(self), "data": self.data}


def _rebuild(kind: type[PenstockError], message: str, data: dict[str, Any]) -> PenstockError:
    return kind(message, **data)


class CallEnded(PenstockError):
    code = "call_ended"


class CallCanceled(CallEnded, CancelledError):
    """`phase` is where the call was when it was cancelled: waiting, queued or in-flight."""

    code = "canceled"


class CallTimeout(CallEnded, TimeoutError):
    """`phase` as in CallCanceled; `timeout` in seconds, counted from the moment of the call."""

    code = "timeout"


class QueueDropError(CallEnded):
    """`policy`, `max_in_flight`, `max_queue_depth`: the limits that this call ran into."""

    code = "dropped"


class PoolClosedError(CallEnded, RuntimeError):
    """A RuntimeError too, as the standard executors raise one for a submit after shutdown."""

    code = "closed"


class WorkerCrashedError(CallEnded):
    """`worker`, `attempt`, `cause` (what ended the process, in words), `started` (had it begun this call?)."""

    code = "worker_crashed"


class JobStopped(CallEnded):
    """One for jobs of every kind: a function need not know whether a program, the runner or an add-on's worker runs it."""

    code = "job_stopped"


class JobUnavailable(CallEnded):
    """The job waits for a person (BLOCKED) when the schedule is used up."""

    code = "job_unavailable"


class NodeSkipped(CallEnded):
    """`node`: its name."""

    code = "node_skipped"


class NodeFailed(CallEnded):
    """`node`: its name; what it raised is the `__cause__`."""

    code = "node_failed"


class BadCall(PenstockError):
    code = "bad_call"


class NotPicklable(BadCall, TypeError):
    code = "not_picklable"


class GraphError(BadCall, ValueError):
    """`problems`: everything that is wrong, each with its `node`, `kind`, `text` and `fix`."""

    code = "bad_graph"
