"""
Every error that Penstock raises, in one tree. The first level says who has to act.

    PenstockError
    ├── CallEnded              the call or job gives no result; the caller made no mistake
    │   ├── CallCanceled       the call was canceled (also a concurrent.futures.CancelledError)
    │   ├── CallTimeout        its time ran out (also a TimeoutError)
    │   ├── QueueDropError     a load-shedding policy refused or evicted it
    │   ├── PoolClosedError    its pool was closed (also a RuntimeError)
    │   ├── WorkerCrashedError its worker died with it
    │   ├── NodeSkipped        the node of a graph was never called: its input failed, or its run ended
    │   ├── NodeFailed         the node raised what must not travel as itself (SystemExit, a CancelledError)
    │   ├── JobStopped         leaves the function of a job that was asked to end
    │   ├── JobFailed          the job that the caller waits for is FAILED or BLOCKED
    │   └── JobCanceled        the awaited job was canceled (also a concurrent.futures.CancelledError)
    ├── BadCall                the caller's mistake; the message names what to change
    │   ├── NotPicklable       an argument, a function or a result cannot cross to a worker (also a TypeError)
    │   ├── BadArgument        an argument does not fit the job's function (also a TypeError)
    │   └── GraphError         a graph that cannot be compiled (also a ValueError)
    ├── Refused                the rules of the scheduler forbid the request; nothing changed      HTTP 400
    │   ├── BadIntent          a field is out of bounds (also a ValueError)                        422
    │   ├── NotFound           no such job, lease or addon, or not yours (also a LookupError)      404
    │   ├── IllegalMove        the job's state has no such move                                    409
    │   ├── StaleDispatch      a newer dispatch has taken over, or this one has ended              409
    │   ├── NotWritten         the store cannot write this operation, only this one                422
    │   ├── KeyConflict        the idempotency key was used with another body                      409
    │   ├── QueueFull          the depth limit; `retry_after_sec`                                  429
    │   └── AccessDenied       the token is missing, wrong, or may not do this                     403
    └── Unavailable            something outside the caller is away; try again later               503
        ├── Unreachable        the scheduler did not answer
        ├── StoreFailed        disk full, read-only, damaged, locked; nothing was acknowledged
        │   └── OutcomeUnknown the commit failed half-way: it may be written
        ├── SchemaNewer        the database belongs to a newer Penstock
        └── DispatcherHeld     another process dispatches from this file; `holder` names it

A job function raises Unavailable when something that it needs is away: the job is tried again by the schedule
for that, then waits for a person (BLOCKED).

A wrong option is a plain ValueError or TypeError, raised where it was given. An exception of the called
function is not in this tree: a pool raises it to the caller as itself with the worker's traceback, and a job
stores it as text.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any, ClassVar, Self


class PenstockError(Exception):
    """
    Its fields are keyword arguments and attributes at once: a log line and a handler see the same.

    For example:

        try:
            index.enqueue("/data")
        except penstock.PenstockError as error:
            log.warning("not enqueued: %s", error, extra=error.data)
    """

    code = "error"

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data = data

    def __getattr__(self, name: str) -> Any:
        # Read from __dict__: an instance under reconstruction has no `data` yet.
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


def _rebuild(kind: type[PenstockError], message: str, data: dict[str, Any]) -> PenstockError:
    return kind(message, **data)


class CallEnded(PenstockError):
    """
    The call or job gives no result, and the caller made no mistake.

    For example:

        try:
            result = call.result()
        except penstock.CallEnded:
            result = None  # canceled, timed out, dropped, or its worker died
    """

    code = "call_ended"


class CallCanceled(CallEnded, CancelledError):
    """
    `phase`: where the call was at that moment: waiting, queued or in-flight.

    For example:

        try:
            call.result()
        except penstock.CallCanceled as canceled:
            print(canceled.phase, canceled.reason)
    """

    code = "canceled"


class CallTimeout(CallEnded, TimeoutError):
    """
    `phase` as in CallCanceled; `timeout` in seconds, counted from the moment of the call.

    For example:

        try:
            await pool.task(fetch, timeout=5).call(url)
        except penstock.CallTimeout as late:
            print(late.timeout)  # 5
    """

    code = "timeout"


class QueueDropError(CallEnded):
    """
    `policy`, `max_in_flight`, `max_queue_depth`: the limits that this call ran into.

    For example:

        pool = penstock.WorkerPool(2, policy="reject", max_queue_depth=8)
        try:
            await pool.call(render, page)
        except penstock.QueueDropError:
            status = 503
    """

    code = "dropped"


class PoolClosedError(CallEnded, RuntimeError):
    """
    A RuntimeError too, as the standard executors raise one for a submit after shutdown.

    For example:

        pool.shutdown()
        try:
            pool.submit(work)
        except penstock.PoolClosedError:
            print("closed")
    """

    code = "closed"


class WorkerCrashedError(CallEnded):
    """
    `worker`, `attempt`, `cause` (what ended the process, in words), `started` (it had begun this call).

    For example:

        try:
            pool.submit(convert, path).result()
        except penstock.WorkerCrashedError as crash:
            print(crash.cause, crash.started)  # killed by signal 9 True
    """

    code = "worker_crashed"


class NodeSkipped(CallEnded):
    """`node`: its name."""

    code = "node_skipped"


class NodeFailed(CallEnded):
    """`node`: its name; what it raised is the `__cause__`."""

    code = "node_failed"


class JobStopped(CallEnded):
    """
    The same for every job: a function need not know whether a program, a worker or the runner runs it.

    For example:

        try:
            ctx.check()
        except penstock.JobStopped:
            release_files()
            raise  # the job returns to the queue, or ends by the reason of the stop
    """

    code = "job_stopped"


class JobFailed(CallEnded):
    """
    `job_id`, `state`, `reason` (its end reason), `traceback` (the function's own, as text).

    For example:

        try:
            job.result()
        except penstock.JobFailed as failed:
            print(failed.state, failed.traceback)
    """

    code = "job_failed"


class JobCanceled(CallEnded, CancelledError):
    """
    The job that the caller waits for was canceled.

    For example:

        try:
            job.result()
        except penstock.JobCanceled:
            print("a person canceled it")
    """

    code = "job_canceled"


class BadCall(PenstockError):
    """
    The caller's mistake: nothing was run, and the message names what to change.

    For example:

        try:
            pool.submit(fn, argument)
        except penstock.BadCall as mistake:
            raise SystemExit(str(mistake))  # the message names what to change
    """

    code = "bad_call"


class NotPicklable(BadCall, TypeError):
    """
    An argument, a function or a result cannot cross to a worker.

    For example:

        try:
            pool.submit(open("data.txt").read).result()
        except penstock.NotPicklable as refused:
            print(refused)  # names the object that cannot cross to a worker process
    """

    code = "not_picklable"


class BadArgument(BadCall, TypeError):
    """
    `argument`: its name. `job`: the name of the function that it was meant for.

    For example:

        try:
            index.enqueue(path=7)
        except penstock.BadArgument as bad:
            print(bad.argument, bad.job)  # path index
    """

    code = "bad_argument"


class GraphError(BadCall, ValueError):
    """
    `problems`: everything that is wrong, each with its `node`, `kind`, `text` and `fix`.

    For example:

        try:
            g.compile()
        except penstock.GraphError as wrong:
            for problem in wrong.problems:
                print(problem)
    """

    code = "bad_graph"


class Refused(PenstockError):
    """
    The rules of the scheduler forbid the request, and nothing changed.

    For example:

        try:
            job.cancel()
        except penstock.Refused as refused:
            print(refused)  # the rules of the scheduler forbid it; nothing changed
    """

    code = "refused"
    status: ClassVar[int] = 400


class BadIntent(Refused, ValueError):
    """
    `problems` is a list of {"field", "message"}: all of them, so that one round trip reports them all.

    For example:

        try:
            client.submit("photos", "thumbnail", cost_units=1_000)
        except penstock.BadIntent as bad:
            print(bad.problems)  # every field that is out of bounds
    """

    code = "bad_intent"
    status = 422

    @classmethod
    def of(cls, *problems: tuple[str, str]) -> Self:
        """From pairs of a field and what is wrong with it. The text is the first of them."""
        listed = [{"field": field, "message": message} for field, message in problems]
        return cls(" ".join(problems[0]), problems=listed)


class NotFound(Refused, LookupError):
    """
    There is no such job, lease or addon, or it belongs to another addon.

    For example:

        try:
            client.job("01a1e377-2fce-7742-bc66-1951bd7861bc")
        except penstock.NotFound:
            print("no such job, or not one of this token's addon")
    """

    code = "not_found"
    status = 404


class IllegalMove(Refused):
    """
    `state`, `move`, `allowed`: the move that was tried, and the moves that the state has.

    For example:

        try:
            job.retry()
        except penstock.IllegalMove as refused:
            print(refused.state, refused.allowed)
    """

    code = "illegal_move"
    status = 409


class StaleDispatch(Refused):
    code = "stale_dispatch"
    status = 409


class NotWritten(Refused):
    """Something in it is not fit for the database. The other operations of its transaction were written."""

    code = "not_written"
    status = 422


class KeyConflict(Refused):
    """
    The idempotency key was used with another body.

    For example:

        try:
            client.submit("mail", "send", {"to": "b"}, idempotency_key="order-7")
        except penstock.KeyConflict:
            print("order-7 was used for another request")
    """

    code = "key_conflict"
    status = 409


class QueueFull(Refused):
    """
    The depth limit of the queue is reached; `retry_after_sec` says when to try again.

    For example:

        try:
            index.enqueue("/data")
        except penstock.QueueFull as full:
            time.sleep(full.retry_after_sec)
    """

    code = "queue_full"
    status = 429


class AccessDenied(Refused):
    """
    The token is missing, wrong, or may not do this.

    For example:

        try:
            client.pause()
        except penstock.AccessDenied as denied:
            print(denied)  # names the scope that the token lacks
    """

    code = "denied"
    status = 403


class Unavailable(PenstockError):
    """
    Something outside of the caller is away; try again later. A job function may raise it: the job is retried
    by the schedule for that, then waits for a person.

    For example:

        @scheduler.job
        def send(to: str) -> None:
            try:
                post(to)
            except ConnectionError as error:
                raise penstock.Unavailable("the mail server is away") from error
    """

    code = "unavailable"
    status: ClassVar[int] = 503


class Unreachable(Unavailable):
    """
    `sent`: whether the request may have been carried out all the same.

    For example:

        try:
            client.stats()
        except penstock.Unreachable:
            print("no scheduler answers: `penstock up` starts one")
    """

    code = "unreachable"


class StoreFailed(Unavailable):
    """
    The database cannot write: disk full, read-only, damaged or locked. Nothing was acknowledged.

    For example:

        try:
            index.enqueue("/data")
        except penstock.StoreFailed as failed:
            print(failed)  # disk full, read-only, damaged or locked; nothing was acknowledged
    """

    code = "store_failed"


class OutcomeUnknown(StoreFailed):
    """
    The database may or may not have written this. `job_ids`: of a submit, the jobs that exist if it has. Ask
    for them, or submit again with the same idempotency key; a second submit without a key may make a second
    job.

    For example:

        try:
            job = index.enqueue("/data")
        except penstock.OutcomeUnknown as unknown:
            print(unknown.job_ids)  # look them up before you enqueue again
    """

    code = "outcome_unknown"


class SchemaNewer(Unavailable):
    code = "schema_newer"


class DispatcherHeld(Unavailable):
    """
    Another process runs the jobs of this file; `holder` names it.

    For example:

        try:
            scheduler.run()
        except penstock.DispatcherHeld as held:
            print(held.holder)  # the process that runs the jobs of this file
    """

    code = "dispatcher_held"
