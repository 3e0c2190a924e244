"""
A graph as an SVG: lanes by color, times and critical path from a trace.

Graphviz does the layout, through pygraphviz: since 2.0 its wheels contain the Graphviz libraries, so there is
no program to install beside Python. Alternatives tried: `graphviz` and `pydot` start a `dot` program that
must be installed; igraph and grandalf lay out layers well but are GPL; networkx places layers without
untangling their edges.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from penstock.core.calls.graph_plan import Lane, NodeStatus, Plan
from penstock.core.errors import BadCall

if TYPE_CHECKING:
    from penstock.graphs.trace import Trace


_FONT: Final = "Helvetica,Arial,sans-serif"
_FILLS: Final = {
    Lane.COMPUTE: "#dbe9fb",
    Lane.IO: "#fdebc8",
    Lane.PROCESS: "#d9f2df",
    Lane.CLUSTER: "#eadcf7",
}
_RED: Final = "#c0392b"
_GREY: Final = "#8a8a8a"


def draw(plan: Plan, trace: Trace | None = None, *, limit: int = 500) -> str:
    """Without a trace: the plan. With one: what happened. Above `limit` nodes a picture is not readable."""
    if len(plan) > limit:
        raise BadCall(
            f"graph {plan.name!r} has {len(plan)} nodes; a picture of more than {limit} needs limit= set higher"
        )
    graph = _graphviz().AGraph(directed=True, strict=False)
    critical = [] if trace is None else [plan.index[node] for node in trace.critical_path()]
    on_path = set(pairwise(critical))
    graph.graph_attr.update(rankdir="LR", nodesep="0.25", ranksep="0.45", fontname=_FONT, fontsize="11")
    graph.graph_attr.update(label=_legend(plan, trace), labelloc="b", labeljust="l")
    graph.node_attr.update(
        shape="box", style="rounded,filled", fontname=_FONT, fontsize="12", margin="0.14,0.07"
    )
    graph.edge_attr.update(color="#555555", arrowsize="0.7")
    read = _env_readers(plan)
    for name in read:
        graph.add_node(f"env {name}", label=_text(name), shape="plain", style="", fontcolor=_GREY)
    for node in range(len(plan)):
        graph.add_node(f"n{node}", **_looks(plan, node, trace, node in critical))
    for name, readers in read.items():
        for node in readers:
            graph.add_edge(f"env {name}", f"n{node}", style="dashed", color=_GREY)
    for node, successors in enumerate(plan.successors):
        for successor in sorted(successors):
            graph.add_edge(
                f"n{node}",
                f"n{successor}",
                **({"color": _RED, "penwidth": "2.2"} if (node, successor) in on_path else {}),
            )
    svg: bytes = graph.draw(format="svg", prog="dot")
    return svg.decode("utf-8")


def _graphviz() -> Any:
    try:
        import pygraphviz  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise BadCall(
            "pictures of graphs need pygraphviz; install it with: pip install 'penstock[pictures]'"
        ) from error
    return pygraphviz


def _looks(plan: Plan, node: int, trace: Trace | None, critical: bool) -> dict[str, str]:
    name, lane = plan.names[node], plan.lane(node)
    lines = [name + (" [ ]" if plan.rules[node].over is not None else "")]
    looks = {"fillcolor": _FILLS[lane], "color": "#555555"}
    if trace is not None:
        status = trace.result.node(name)
        seconds = trace.durations().get(name)
        lines.append(
            str(status) if seconds is None else _time(seconds) + ("" if status == "ok" else f", {status}")
        )
        if status in (NodeStatus.SKIPPED, NodeStatus.CANCELED):
            looks = {
                "fillcolor": "#f4f4f4",
                "color": _GREY,
                "fontcolor": _GREY,
                "style": "rounded,filled,dashed",
            }
        elif status is NodeStatus.ERROR:
            looks["fillcolor"] = "#f6c9c4"
    if critical:
        looks |= {"color": _RED, "penwidth": "2.2"}
    return looks | {"label": "\\n".join(map(_text, lines))}


def _legend(plan: Plan, trace: Trace | None) -> str:
    cells = [
        f'<TD BGCOLOR="{_FILLS[lane]}">{lane}</TD>'
        for lane in Lane
        if any(plan.lane(node) is lane for node in range(len(plan)))
    ]
    if trace is not None:
        cells.append(f'<TD><FONT COLOR="{_RED}">critical path</FONT></TD>')
        cells.append(f"<TD>run: {trace.result.status}, {_time(trace.result.seconds)}</TD>")
    return f'<<TABLE BORDER="0" CELLSPACING="6" CELLPADDING="4"><TR>{"".join(cells)}</TR></TABLE>>'


def _env_readers(plan: Plan) -> dict[str, list[int]]:
    readers: dict[str, list[int]] = {name: [] for name in plan.env}
    slots = {slot: name for name, slot in plan.env.items()}
    for node in range(len(plan)):
        for slot in plan.bindings[node].slots() | plan.rules[node].slots():
            if slot in slots:
                readers[slots[slot]].append(node)
    return {name: nodes for name, nodes in readers.items() if nodes}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _text(text: str) -> str:
    return text.replace("\\", "\\\\") + " " * text.startswith("<")
