"""
Plots of several plays: the waits, and the length of the queue. plotext draws them in the terminal, matplotlib
as SVG; both come with the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.simulation.play import Curves

_WAITS: Final = "wait in seconds, by the share of jobs that waited at most so long (%)"
_QUEUED: Final = "jobs in the queue, by hour"
INSTALL: Final = "pip install 'penstock[plots]'"


def in_terminal(plays: Mapping[str, Curves], *, width: int, colors: bool = True) -> str:
    """The plots as text. ImportError: plotext is missing."""
    import plotext  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra; it has no types

    pictures = []
    for title in (_WAITS, _QUEUED):
        figure = plotext.figure
        figure.clear()
        figure.plot_size(max(40, width), 16)
        figure.title(title)
        for name, curves in plays.items():
            waits = (list(range(len(curves.waits))), curves.waits)
            across, up = waits if title is _WAITS else (curves.hours, curves.queued)
            if up:
                signal = figure.signal(across, up)
                signal.lines()
                signal.label(name)
                figure.draw(signal)
        picture = str(figure.build().string())
        pictures.append(picture if colors else plotext.uncolorize(picture))
    return "\n".join(pictures)


def as_svg(plays: Mapping[str, Curves], file: Path) -> None:
    """Write the plots to a file. ImportError: matplotlib is missing. OSError: the file cannot be written."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasSVG(figure)
    waits, queued = figure.subplots(2, 1)
    for name, curves in plays.items():
        waits.plot(range(len(curves.waits)), curves.waits, label=name)
        queued.plot(curves.hours, curves.queued, label=name)
    waits.set(title="How long jobs waited", xlabel="share of the jobs (%)", ylabel="wait (s)")
    queued.set(title="Jobs in the queue", xlabel="hours since the first arrival", ylabel="jobs")
    for axes in (waits, queued):
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(file, format="svg", metadata={"Date": None})
