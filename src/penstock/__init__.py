"""
Penstock admits, queues and dispatches work.

The public names are imported on first use, so that a program pays for what it touches: pools and graphs need
nothing but the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.attach import attach as attach
    from penstock.client.client import Client as Client
    from penstock.client.worker import Worker as Worker
    from penstock.cluster.engine import Cluster as Cluster
    from penstock.core.calls.graph_plan import Const as Const
    from penstock.core.calls.graph_plan import Env as Env
    from penstock.core.calls.graph_plan import Lane as Lane
    from penstock.core.calls.graph_plan import NodeStatus as NodeStatus
    from penstock.core.calls.graph_plan import Plan as Plan
    from penstock.core.calls.graph_plan import RunStatus as RunStatus
    from penstock.core.errors import AccessDenied as AccessDenied
    from penstock.core.errors import BadArgument as BadArgument
    from penstock.core.errors import BadCall as BadCall
    from penstock.core.errors import BadIntent as BadIntent
    from penstock.core.errors import CallCanceled as CallCanceled
    from penstock.core.errors import CallEnded as CallEnded
    from penstock.core.errors import CallTimeout as CallTimeout
    from penstock.core.errors import DispatcherHeld as DispatcherHeld
    from penstock.core.errors import GraphError as GraphError
    from penstock.core.errors import IllegalMove as IllegalMove
    from penstock.core.errors import JobCanceled as JobCanceled
    from penstock.core.errors import JobFailed as JobFailed
    from penstock.core.errors import JobStopped as JobStopped
    from penstock.core.errors import KeyConflict as KeyConflict
    from penstock.core.errors import NotFound as NotFound
    from penstock.core.errors import NotPicklable as NotPicklable
    from penstock.core.errors import OutcomeUnknown as OutcomeUnknown
    from penstock.core.errors import PenstockError as PenstockError
    from penstock.core.errors import PoolClosedError as PoolClosedError
    from penstock.core.errors import QueueDropError as QueueDropError
    from penstock.core.errors import QueueFull as QueueFull
    from penstock.core.errors import Refused as Refused
    from penstock.core.errors import StoreFailed as StoreFailed
    from penstock.core.errors import Unavailable as Unavailable
    from penstock.core.errors import Unreachable as Unreachable
    from penstock.core.errors import WorkerCrashedError as WorkerCrashedError
    from penstock.core.jobs.explain import Explanation as Explanation
    from penstock.core.jobs.states import JobState as JobState
    from penstock.flow.parallel import parallel_limit as parallel_limit
    from penstock.flow.parallel import parallel_limit_sync as parallel_limit_sync
    from penstock.flow.pullers import Raised as Raised
    from penstock.flow.pullers import Returned as Returned
    from penstock.flow.pullers import Settled as Settled
    from penstock.graphs.builder import Graph as Graph
    from penstock.graphs.executor import GraphExecutor as GraphExecutor
    from penstock.graphs.result import RunResult as RunResult
    from penstock.graphs.run_context import RunContext as RunContext
    from penstock.graphs.run_context import current_run as current_run
    from penstock.graphs.trace import Trace as Trace
    from penstock.graphs.trace import write_chrome as write_chrome
    from penstock.library.function import JobFunction as JobFunction
    from penstock.library.handle import JobHandle as JobHandle
    from penstock.library.scheduler import Scheduler as Scheduler
    from penstock.pools.calling import Task as Task
    from penstock.pools.child.protocol import RemoteError as RemoteError
    from penstock.pools.context import CallContext as CallContext
    from penstock.pools.context import current_call as current_call
    from penstock.pools.future import Call as Call
    from penstock.pools.guards import CancelSignal as CancelSignal
    from penstock.pools.options import set_defaults as set_defaults
    from penstock.pools.pool import SingletonWorker as SingletonWorker
    from penstock.pools.pool import WorkerPool as WorkerPool
    from penstock.telemetry.hooks import QueueHooks as QueueHooks
    from penstock.telemetry.registry import instrument as instrument
    from penstock.telemetry.registry import snapshot as snapshot
    from penstock.telemetry.registry import subscribe as subscribe
    from penstock.work.context import JobContext as JobContext
    from penstock.work.outcome import current_job as current_job

__version__ = "0.1.0"

#: Each module and the public names in it.
_HOMES = {
    "penstock.client.attach": "attach",
    "penstock.client.client": "Client",
    "penstock.client.worker": "Worker",
    "penstock.cluster.engine": "Cluster",
    "penstock.core.calls.graph_plan": "Const Env Lane NodeStatus Plan RunStatus",
    "penstock.core.errors": """
        AccessDenied BadArgument BadCall BadIntent CallCanceled CallEnded CallTimeout DispatcherHeld
        GraphError IllegalMove JobCanceled JobFailed JobStopped KeyConflict NotFound NotPicklable
        OutcomeUnknown PenstockError PoolClosedError QueueDropError QueueFull Refused StoreFailed
        Unavailable Unreachable WorkerCrashedError
    """,
    "penstock.core.jobs.explain": "Explanation",
    "penstock.core.jobs.states": "JobState",
    "penstock.flow.parallel": "parallel_limit parallel_limit_sync",
    "penstock.flow.pullers": "Raised Returned Settled",
    "penstock.graphs.builder": "Graph",
    "penstock.graphs.executor": "GraphExecutor",
    "penstock.graphs.result": "RunResult",
    "penstock.graphs.run_context": "RunContext current_run",
    "penstock.graphs.trace": "Trace write_chrome",
    "penstock.work.context": "JobContext",
    "penstock.work.outcome": "current_job",
    "penstock.library.function": "JobFunction",
    "penstock.library.handle": "JobHandle",
    "penstock.library.scheduler": "Scheduler",
    "penstock.pools.calling": "Task",
    "penstock.pools.child.protocol": "RemoteError",
    "penstock.pools.context": "CallContext current_call",
    "penstock.pools.future": "Call",
    "penstock.pools.guards": "CancelSignal",
    "penstock.pools.options": "set_defaults",
    "penstock.pools.pool": "SingletonWorker WorkerPool",
    "penstock.telemetry.hooks": "QueueHooks",
    "penstock.telemetry.registry": "instrument snapshot subscribe",
}
_home_of = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_home_of)]  # noqa: PLE0604  # strings, all of them


def __getattr__(name: str) -> Any:
    home = _home_of.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415  # only for names that were not used before

    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "penstock").partition(".")[0] == "penstock":
            raise
        # Pools, graphs and flow control import no other package: only the durable half gets here.
        message = (
            f'penstock.{name} needs {missing.name}, which is not installed: pip install "penstock[jobs]"'
        )
        raise ModuleNotFoundError(message, name=missing.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
