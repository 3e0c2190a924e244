"""The result of a run, by the names of its nodes; and the totals of all runs of an executor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import CancelledError
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from penstock.core.calls.graph_plan import UNSET, NodeStatus, Plan, RunStatus
from penstock.core.errors import CallCanceled, CallTimeout, NodeFailed, NodeSkipped
from penstock.core.text import error_line, is_kind
from penstock.pools.workers.base import CallTotals

if TYPE_CHECKING:
    from penstock.graphs.lanes import ThreadLane
    from penstock.graphs.trace import Trace


class RunResult:
    """
    The result of a run. `status` is its first cause: ok, error, canceled or deadline. `result["node"]` is
    that node's value; for a node without a value it raises the reason, so that a partial result is never
    taken for a complete one.

    Evaluated lazily: it keeps the list of values, and names are looked up on demand.

    For example:

        result = executor.run(plan, {"user_id": 7})
        if result.status == "ok":
            print(result["greeting"])
        else:
            print(result.status, result.errors)
    """

    # Defaults for a successful run; an instance sets only what differs.
    reason: str | None = None
    cause: str | None = None  # the node that failed
    trace: Trace | None = None  # of a recorded run
    _errors: Mapping[int, BaseException] = MappingProxyType({})
    _skipped: Mapping[int, int] = MappingProxyType({})  # and the failed node that each needs
    _begun: AbstractSet[int] = frozenset()

    def __init__(self, plan: Plan, status: RunStatus, values: Sequence[Any], seconds: float) -> None:
        self.status = status
        self.seconds = seconds
        self.plan = plan
        self._values = values

    def __repr__(self) -> str:
        counts = {status: len(self.nodes(status)) for status in NodeStatus}
        message = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        why = f" ({self.reason})" if self.reason else ""
        return f"<RunResult of {self.plan.name!r}: {self.status}{why}; {message}>"

    def __getitem__(self, node: str) -> Any:
        number = self._number(node)
        value = self._values[number]
        if value is UNSET:
            self._raise_for(number)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.names)

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def whole(self) -> bool:
        """
        Whether every node has its value. An ok run may lack the values of nodes that failed alone, and of
        their dependents.
        """
        return self.status is RunStatus.OK and not self._errors

    @property
    def values(self) -> dict[str, Any]:
        """The values by node, for nodes that have one."""
        # Not strict: the slots of constants and of the environment follow those of the nodes.
        pairs = zip(self.plan.names, self._values, strict=False)
        return {name: value for name, value in pairs if value is not UNSET}

    @property
    def errors(self) -> dict[str, BaseException]:
        return {self.plan.names[node]: error for node, error in sorted(self._errors.items())}

    @property
    def skipped(self) -> dict[str, str]:
        """The nodes that were never called, and why."""
        return {name: self._why_skipped(self.plan.index[name]) for name in self.nodes(NodeStatus.SKIPPED)}

    @property
    def canceled(self) -> list[str]:
        """The nodes that were in flight when the run ended, and whose results were dropped."""
        return self.nodes(NodeStatus.CANCELED)

    def node(self, name: str) -> NodeStatus:
        return self._status(self._number(name))

    def nodes(self, status: NodeStatus | str) -> list[str]:
        return [name for number, name in enumerate(self.plan.names) if self._status(number) == status]

    def check(self) -> RunResult:
        """
        Raise the error that ended the run, else return this result. A node's error is raised with a note that
        names the node. An error with another meaning in the caller (a SystemExit, a CancelledError) is raised
        as NodeFailed.
        """
        message = f"the run of {self.plan.name!r} {self.reason}"
        match self.status:
            case RunStatus.ERROR:
                self._raise_for(self.plan.index[str(self.cause)])
            case RunStatus.DEADLINE:
                raise CallTimeout(message, phase="in-flight", result=self)
            case RunStatus.CANCELED:
                raise CallCanceled(message, phase="in-flight", result=self)
        return self

    def set_failures(
        self, errors: Mapping[int, BaseException], skipped: Mapping[int, int], begun: AbstractSet[int]
    ) -> None:
        """
        Set the failures, by node number; called by the run. `skipped`: the failed node that each skipped node
        needs. Nodes in `begun` with neither value nor error were canceled.
        """
        self._errors, self._skipped, self._begun = errors, skipped, begun

    def _number(self, name: str) -> int:
        try:
            return self.plan.index[name]
        except KeyError:
            raise KeyError(f"graph {self.plan.name!r} has no node {name!r}") from None

    def _status(self, number: int) -> NodeStatus:
        if self._values[number] is not UNSET:
            return NodeStatus.OK
        if number in self._errors:
            return NodeStatus.ERROR
        return NodeStatus.CANCELED if number in self._begun else NodeStatus.SKIPPED

    def _why_skipped(self, number: int) -> str:
        if number in self._skipped:
            return f"it needs {self.plan.names[self._skipped[number]]!r}, which failed"
        if self.status is RunStatus.ERROR:
            return f"the run ended with the error of {self.cause!r}"
        return f"the run {self.reason}"

    def _raise_for(self, number: int) -> NoReturn:
        name = self.plan.names[number]
        error = self._errors.get(number)
        match self._status(number):
            case NodeStatus.ERROR if is_kind(error, Exception) and not is_kind(error, CancelledError):
                raise error
            case NodeStatus.ERROR:
                assert error is not None
                message = f"node {name!r} raised {error_line(error)}"
                raise NodeFailed(message, node=name) from error
            case NodeStatus.CANCELED:
                raise CallCanceled(
                    f"node {name!r} was in flight when the run {self.reason}", phase="in-flight", node=name
                )
            case _:
                raise NodeSkipped(f"node {name!r} was skipped: {self._why_skipped(number)}", node=name)


class GraphTotals:
    """
    The totals of an executor. They have the names of a pool's totals, with nodes in place of calls; runs are
    counted too.
    """

    def __init__(self, *lanes: ThreadLane) -> None:
        self.last_error: str | None = None
        self._lanes = lanes
        self._lock = threading.Lock()
        self._sums = CallTotals().as_dict() | {f"runs_{status}": 0 for status in RunStatus}

    def add(self, result: RunResult) -> None:
        succeeded, failed, canceled = len(result.plan), 0, 0
        if not result.whole:
            errors = result.errors
            succeeded, failed, canceled = len(result.values), len(errors), len(result.canceled)
            for node, error in errors.items():
                self.last_error = f"node {node!r} of {result.plan.name!r}: {error_line(error)}"
        with self._lock:
            sums = self._sums
            sums[f"runs_{result.status}"] += 1
            sums["dispatched"] += succeeded + failed + canceled
            sums["succeeded"] += succeeded
            sums["failed"] += failed
            sums["canceled"] += canceled

    def as_dict(self) -> dict[str, int]:
        spawned = sum(lane.threads_started for lane in self._lanes)
        terminated = sum(lane.threads_given_up for lane in self._lanes)
        with self._lock:
            return self._sums | {"spawned": spawned, "terminated": terminated}


class LaneCounts(NamedTuple):
    """The nodes of an executor now; the names are those of a pool's `QueueState`."""

    in_flight: int
    pending: int
    waiting: int
