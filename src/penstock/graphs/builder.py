"""
Building a graph.

    g = Graph("report", env={"day": date})

    @g.node(lane="io")
    async def orders(day: date) -> list[Order]: ...

    @g.node
    def revenue(orders: list[Order]) -> float: ...

    plan = g.compile()

The parameters of a function are the inputs of its node: each is fed by the node of that name, or by the
environment. A decorated function stays unchanged, so it can be tested, called and pickled as before.
`compile` checks the graph and reports all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Required, TypedDict, TypeVar, Unpack, overload

from penstock.core.calls.graph_checks import did_you_mean
from penstock.core.calls.graph_compile import compile_plan
from penstock.core.calls.graph_plan import NodeSpec, Plan

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [field.name for field in fields(NodeSpec) if field.name != "fn"]


class NodeOptions(TypedDict, total=False):
    """The options of `Graph.node`."""

    name: str | None
    inputs: Mapping[str, Any] | None
    lane: str | None
    retries: int
    retry_delay: float
    retry_on: tuple[type[BaseException], ...] | type[BaseException]
    timeout: float | None
    on_error: str


class MapOptions(NodeOptions, total=False):
    """The options of `Graph.map`."""

    over: Required[Any]
    each: str | None
    limit: int | None


class Graph:
    """
    Steps that are connected by their parameter names; `compile` checks them and makes a `Plan`.

    For example:

        g = penstock.Graph("greeting", env={"user_id": int})

        @g.node(lane="io")
        async def profile(user_id: int) -> str:
            return f"user {user_id}"

        @g.node
        def greeting(profile: str) -> str:
            return f"Hello, {profile}!"

        plan = g.compile()
    """

    def __init__(self, name: str = "graph", *, env: Mapping[str, Any] | Iterable[str] = ()) -> None:
        """
        `env`: the names of the inputs that each run must provide, with their types if they should be checked.
        """
        self.name = name
        self._env: dict[str, Any] = dict(env) if isinstance(env, Mapping) else dict.fromkeys(env, Any)
        self._specs: list[NodeSpec] = []

    def env(self, name: str, hint: Any = Any) -> None:
        """Declare a further input of the environment."""
        self._env[name] = hint

    @overload
    def node(self, fn: F, /) -> F: ...
    @overload
    def node(self, /, **options: Unpack[NodeOptions]) -> Callable[[F], F]: ...
    def node(self, fn: Any = None, /, **options: Any) -> Any:
        """
        Add a function as a node.

        `name` (default: the function's own) and `inputs` (what feeds each parameter). `lane`: "compute"
        (default), "io" (default for `async def`), "process" or "cluster". `timeout` is for one attempt, in
        seconds. `on_error`: "fail" (default) ends the run, "skip_dependents" skips only the nodes that need
        this one. `retries` (default 0), `retry_delay` (default 0 s) doubles with each; only errors in
        `retry_on` (default: every Exception) are retried.
        """
        return self._decorated(fn, options)

    @overload
    def map(self, fn: F, /, *, over: Any) -> F: ...
    @overload
    def map(self, /, **options: Unpack[MapOptions]) -> Callable[[F], F]: ...
    def map(self, fn: Any = None, /, **options: Any) -> Any:
        """
        Add a function that is called once for each item of a list from another node. The value of this node
        is the list of results, in the order of the items.

        The item is passed to the first parameter without another input, or to the one named by `each`.
        `limit` bounds how many items run at once. `retries` and `timeout` are for one item. If one item fails
        for good, the node fails.
        """
        return self._decorated(fn, {**options, "maps": True})

    def add(self, fn: Callable[..., Any], /, name: str | None = None, **options: Any) -> str:
        """
        Add a node without a decorator: `g.add(join, name="joined", inputs={"left": "orders", "right":
        Env("rates")})`. Takes the options of `node`, and with `over` those of `map`. Returns the node's name,
        to use as an input of other nodes.
        """
        return self._append(fn, {**options, "name": name, "maps": "over" in options}).title

    def compile(self) -> Plan:
        """Check the graph and make a plan. Raises one GraphError with all problems (`error.problems`)."""
        return compile_plan(self.name, self._specs, self._env)

    def _decorated(self, fn: Any, options: dict[str, Any]) -> Any:
        def decorate(fn: F) -> F:
            self._append(fn, options)
            return fn

        return decorate if fn is None else decorate(fn)

    def _append(self, fn: Any, options: Mapping[str, Any]) -> NodeSpec:
        unknown = next((option for option in options if option not in _OPTIONS), None)
        if unknown is not None:
            hint = did_you_mean(unknown, _OPTIONS) or f"there are {', '.join(_OPTIONS)}"
            raise TypeError(f"node {NodeSpec(fn=fn).title!r}: there is no option {unknown!r}; {hint}")
        given = {key: value for key, value in options.items() if key != "inputs" or value is not None}
        spec = NodeSpec(fn=fn, **given)
        self._specs.append(spec)
        return spec
