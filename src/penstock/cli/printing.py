"""
Printing: replaces control codes in texts of jobs, and fits tables to the terminal.

A terminal obeys control codes: a stored one could move the cursor, set the title, or send input in the user's
name. So they are replaced by visible text. JSON escapes them already.

On a narrow terminal a table omits the least important columns, and cuts the widest of the others, so that an
id stays whole beside a long command. In a pipe nothing is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import click

if TYPE_CHECKING:  # imported late, because many verbs print no table
    from rich.console import Console, JustifyMethod, OverflowMethod
    from rich.table import Table
    from rich.text import Text

#: All control codes but tab and line feed: C0, DEL, C1, and those that change the direction of text.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Group 1: colors, which are harmless in output, and carriage returns, by which programs show progress.
_COLOR_OR_CONTROL: Final = re.compile(r"(\x1b\[[0-9;]{0,40}m|\r)|" + _CONTROL.pattern)


def printable(text: str) -> str:
    return _CONTROL.sub(_shown, text.replace("\r\n", "\n"))


def output(text: str) -> str:
    """The output of a job, with its colors."""
    return _COLOR_OR_CONTROL.sub(lambda found: found[1] or _shown(found), text)


def echo(text: str, *, err: bool = False) -> None:
    click.echo(printable(text), err=err)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def printed(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


_STATE_COLORS: Final = {
    "QUEUED": "white", "DISPATCHING": "yellow", "RUNNING": "cyan", "DONE": "green",
    "FAILED": "red", "BLOCKED": "magenta", "CANCELED": "bright_black",
}  # fmt: skip
LOAD_COLORS: Final = {"QUIET": "green", "NORMAL": "white", "BUSY": "yellow", "PANIC": "red"}
_NO_LIMIT: Final = 10_000
#: Spaces between two columns.
_GAP: Final = 2


class Column(NamedTuple):
    """
    A column. `keep`: omit it on terminals narrower than this; 0: never. `wrap`: wrap a long text instead of
    cutting it.
    """

    title: str
    right: bool = False
    keep: int = 0
    wrap: bool = False

    @property
    def justify(self) -> JustifyMethod:
        return "right" if self.right else "left"


def fitting(columns: Sequence[Column], width: int) -> list[int]:
    """The numbers of the columns that a terminal of this width shows."""
    return [place for place, column in enumerate(columns) if column.keep <= width]


def cut_widths(widths: Sequence[int], room: int) -> list[int]:
    """Cut widths so that together they fit into `room`. The widest are cut first, to one common width."""
    widest = max(widths, default=0)
    while widest > 1 and sum(min(width, widest) for width in widths) > room:
        widest -= 1
    return [min(width, widest) for width in widths]


def cell_widths(columns: Sequence[Column], lines: Sequence[Sequence[Text]], room: int) -> list[int]:
    """The width of each column, titles included, so that all fit into `room`."""
    needed = [
        max([len(column.title), *(line[at].cell_len for line in lines)]) for at, column in enumerate(columns)
    ]
    return cut_widths(needed, room)


def cell(column: Column, value: object) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(printable(str(value)), justify=column.justify)


def table(console: Console, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    from rich.table import Table

    width = console.width if console.is_terminal else _NO_LIMIT
    shown = fitting(columns, width)
    lines = [[cell(columns[place], row[place]) for place in shown] for row in rows]
    widths = cell_widths([columns[place] for place in shown], lines, width - _GAP * (len(shown) - 1))
    grid = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "")
    for place, room in zip(shown, widths, strict=True):
        column = columns[place]
        overflow: OverflowMethod = "fold" if column.wrap else "ellipsis"
        grid.add_column(
            column.title, justify=column.justify, no_wrap=not column.wrap, overflow=overflow, width=room
        )
    for line in lines:
        grid.add_row(*line)
    if console.is_terminal:
        console.print(grid)
    else:
        _print_plainly(console.file, grid)


def _print_plainly(file: IO[str], grid: Table) -> None:
    """Print a table in full width, without spaces at line ends, so that programs can compare lines."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=_NO_LIMIT, highlight=False, color_system=None).print(grid)
    file.writelines(f"{line.rstrip()}\n" for line in text.getvalue().removesuffix("\n").split("\n"))


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """
    Print a line for each fact that has a value. In a terminal long values wrap beside their names, not below.
    """
    from rich.table import Table
    from rich.text import Text

    shown = {name: printable(str(value)) for name, value in facts.items() if value not in (None, "")}
    widest = max(map(len, facts), default=0) + 2
    if not console.is_terminal:
        console.file.writelines(f"{name:>{widest}}  {value}\n" for name, value in shown.items())
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", no_wrap=True, min_width=widest)
    grid.add_column(overflow="fold")
    for name, value in shown.items():
        grid.add_row(name, Text(value))
    console.print(grid)


def state_text(state: str) -> Text:
    from rich.text import Text

    return Text(state, style=_STATE_COLORS.get(state, ""))
