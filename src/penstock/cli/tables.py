"""Tables that fit the terminal: on a narrow one the columns that matter least go first, and nothing is cut where it is piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["COLORS", "Column", "state_text", "table"]

COLORS: Final = {
    "QUEUED": "white", "DISPATCHING": "yellow", "RUNNING": "cyan", "DONE": "green",
    "FAILED": "red", "BLOCKED": "magenta", "CANCELED": "bright_black",
}  # fmt: skip


class Column(NamedTuple):
    """`keep`: 0 always; else the width of the terminal below which it is left out."""

    title: str
    right: bool = False
    keep: int = 0


def table(console: Console, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    width = console.width if console.is_terminal else 10_000
    shown = [place for place, column in enumerate(columns) if column.keep <= width]
    grid = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "")
    for place in shown:
        column = columns[place]
        grid.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis" if console.is_terminal else "ignore",
        )
    for row in rows:
        grid.add_row(
            *(cell if isinstance(cell, Text) else Text(str(cell)) for cell in (row[place] for place in shown))
        )
    if not console.is_terminal:
        console = Console(file=console.file, width=10_000, highlight=False, color_system=None)
    console.print(grid)


def state_text(state: str) -> Text:
    return Text(state, style=COLORS.get(state, ""))
