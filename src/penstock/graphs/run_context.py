"""The context of a running node: what its function can read about the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.core.calls.graph_plan import RunStatus
from penstock.core.errors import BadCall, CallCanceled, CallTimeout
from penstock.pools.context import current_call
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.graphs.lanes import LaneWorker
    from penstock.graphs.run import Run


#: The run of a node on the event loop or in a process. It is set in a copy of the context in which the run
#: was started, so nodes also see the caller's context variables, such as a tracing span. (The next node of
#: the same turn in a thread may or may not see a variable that a node sets.)
current_context: ContextVar[RunContext] = ContextVar("penstock_run")


class _ThreadState(threading.local):
    worker: LaneWorker | None = None


#: In a worker thread: the worker, which knows the run. So a turn sets nothing, and only `current_run` has a
#: cost.
thread_state = _ThreadState()


def current_run() -> RunContext | None:
    """
    The context of the run whose node executes this code. None: outside of a run.

    For example:

        def step(x: int) -> int:
            run = penstock.current_run()
            return 0 if run is not None and run.canceled else x
    """
    worker = thread_state.worker
    run = None if worker is None or worker.entry is None else worker.entry.run
    return current_context.get(None) if worker is None or run is None else RunContext(run, worker)


class RunContext:
    """
    Environment, deadline and cancellation of the run, from inside a node.

    For example:

        def step(rows: list[int]) -> int:
            run = penstock.current_run()
            for row in rows:
                if run.canceled:
                    break
            return len(rows)
    """

    __slots__ = ("_node", "_run")

    def __init__(self, run: Run | _RemoteRun, node: str | LaneWorker) -> None:
        self._run = run
        self._node = node  # its name, or the worker that is in it

    @property
    def id(self) -> int:
        return self._run.id

    @property
    def node(self) -> str:
        """The name of the node that runs here."""
        if isinstance(self._node, str) or isinstance(self._run, _RemoteRun):
            return str(self._node)
        return self._run.plan.names[self._run.node_by_worker[self._node]]

    @property
    def env(self) -> Mapping[str, Any]:
        """
        The environment of the run. Empty in the workers of a pool, where a node gets inputs only by its
        parameters.
        """
        return MappingProxyType(self._run.env)

    @property
    def deadline(self) -> float | None:
        """The deadline on the clock of `time.perf_counter`. None: there is none."""
        return self._run.deadline

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline. None: there is none."""
        return None if self._run.deadline is None else max(0.0, self._run.deadline - clock())

    @property
    def canceled(self) -> bool:
        """
        Whether the result of this node is not needed any more: the run was canceled, ran out of time, or
        another node failed. A long node should check this and return, to free its worker.
        """
        return self._run.cause is not None

    def check(self) -> None:
        """Raise if the run is over; useful in a deep loop."""
        cause = self._run.cause
        if cause is RunStatus.DEADLINE:
            raise CallTimeout("the run's deadline has passed", phase="in-flight")
        if cause is not None:
            raise CallCanceled("the run is over, and this node stopped", phase="in-flight")

    def cancel(self, reason: str | None = None) -> bool:
        """Cancel the whole run."""
        return self._run.cancel(reason)


class _RemoteRun:
    """The run as a worker of a pool sees it, with its deadline and its end, but without its environment."""

    def __init__(self, run_id: int, deadline: float | None) -> None:
        self.id = run_id
        self.deadline = deadline
        self.env: Mapping[str, Any] = {}

    @property
    def cause(self) -> RunStatus | None:
        if self.deadline is not None and clock() >= self.deadline:
            return RunStatus.DEADLINE
        call = current_call()
        return RunStatus.CANCELED if call is not None and call.canceled else None

    def cancel(self, reason: str | None = None) -> bool:
        raise BadCall(
            f"a node in the worker of a pool cannot cancel its run ({reason}); raise an error instead"
        )


def call_in_worker(
    where: tuple[int, str, float | None],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Call the node's function in a worker of a pool, with a context for `current_run`. The remaining time is
    sent instead of the deadline, because the worker may be on a machine with another clock.
    """
    run_id, node, remaining = where
    deadline = None if remaining is None else clock() + remaining
    token = current_context.set(RunContext(_RemoteRun(run_id, deadline), node))
    try:
        return fn(*args, **kwargs)
    finally:
        current_context.reset(token)
