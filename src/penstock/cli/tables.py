"""
Tables that fit the terminal: on a narrow one the columns that matter least go first, and nothing is cut where
it is piped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import IO, Final, NamedTuple

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from penstock.cli.printing import printable

COLORS: Final = {
    "QUEUED": "white", "DISPATCHING": "yellow", "RUNNING": "cyan", "DONE": "green",
    "FAILED": "red", "BLOCKED": "magenta", "CANCELED": "bright_black",
}  # fmt: skip


_NO_LIMIT: Final = 10_000


class Column(NamedTuple):
    """`keep`: 0 always; else the width of the terminal below which it is left out."""

    title: str
    right: bool = False
    keep: int = 0


def table(console: Console, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    width = console.width if console.is_terminal else _NO_LIMIT
    shown = [place for place, column in enumerate(columns) if column.keep <= width]
    grid = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "")
    for place in shown:
        column = columns[place]
        justify: JustifyMethod = "right" if column.right else "left"
        grid.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(
            *(
                cell if isinstance(cell, Text) else Text(printable(str(cell)))
                for cell in (row[place] for place in shown)
            )
        )
    if console.is_terminal:
        console.print(grid)
    else:
        _print_plainly(console.file, grid)


def _print_plainly(file: IO[str], grid: Table) -> None:
    """As wide as it is, and no blanks at the ends of lines: what reads it may compare them."""
    text = StringIO()
    Console(file=text, width=_NO_LIMIT, highlight=False, color_system=None).print(grid)
    file.writelines(f"{line.rstrip()}\n" for line in text.getvalue().removesuffix("\n").split("\n"))


def state_text(state: str) -> Text:
    return Text(state, style=COLORS.get(state, ""))
