"""
OpenTelemetry as an option (OB-1): `instrument()` is the switch, docs/telemetry.md has the names.

This file imports OpenTelemetry only inside its functions, so `penstock.instrument` can be imported without
the extra installed, and a program that does not use it pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.telemetry import registry

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from penstock.graphs.executor import GraphExecutor
    from penstock.pools.pool import WorkerPool


def instrument(
    pool: WorkerPool | GraphExecutor | None = None,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    histograms: bool = True,
    spans: bool = True,
) -> None:
    """
    Give the metrics of a pool to OpenTelemetry and a span to each of its calls; or those of a graph executor,
    with a span to each of its runs; or of all of them, present and future. The providers are the global ones
    unless given, also if those are set later.

    Gauges and counters are read at collection and cost a call nothing. Histograms and spans cost what the SDK
    takes for them, many times the cost of a call; pools of very short calls may leave them out.
    """
    from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # imports much more; workers import this module, too

    if pool is not None and not isinstance(pool, WorkerPool) and not hasattr(pool, "attach_telemetry"):
        raise TypeError(
            f"pool is {pool!r}; it must be a WorkerPool or a GraphExecutor, or None for all of them"
        )
    meters_for, trace_calls = _load()
    meters = meters_for(meter_provider)

    def attach(thing: Any) -> None:
        if isinstance(thing, WorkerPool):
            meters.watch(thing.internals, histograms=histograms)
            if spans:
                trace_calls(thing.internals, tracer_provider)
        elif hasattr(thing, "attach_telemetry"):
            thing.attach_telemetry(meters, tracer_provider, histograms=histograms, spans=spans)

    if pool is not None:
        attach(pool)
    else:
        registry.watch(attach)


def _load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from penstock.telemetry.meters import meters_for  # noqa: PLC0415  # only on demand
        from penstock.telemetry.spans import trace_calls  # noqa: PLC0415  # as above
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("opentelemetry"):
            raise
        raise ModuleNotFoundError(
            "OpenTelemetry is not installed; pip install 'penstock[otel]'", name=missing.name
        ) from missing
    return meters_for, trace_calls


def run_traced(trace: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a worker: run the function as a child of the trace that `CallSpans.begin` put beside the call."""
    from penstock.telemetry.spans import run_as_child  # noqa: PLC0415  # a worker without traced calls never imports it

    return run_as_child(trace, fn, args, kwargs)
