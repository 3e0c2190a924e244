"""The demo as a live picture. It fits 80 x 24; a larger terminal shows more of the diary and of the latest photo."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from examples.demo.lab import IN_PROGRESS, Lab
from examples.demo.ledger import Diary
from examples.demo.photo import Photo
from examples.demo.plain import proof, summary
from examples.demo.story import ACTS, Story
from rich.align import Align
from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

_DIM: Final = "grey50"
_EMPTY: Final = "grey19"
_MOODS: Final = {
    "plain": ("·", "white"),
    "good": ("✓", "green"),
    "warn": ("!", "dark_orange"),
    "bad": ("✗", "red"),
}
_SPARKS: Final = " ▁▂▃▄▅▆▇█"


class LiveDisplay:
    interval = 0.1

    def __init__(self, lab: Lab, story: Story, console: Console | None = None) -> None:
        self._lab = lab
        self._story = story
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._rates = {pool.name: _Rate() for pool in lab.pools}
        self._loads: dict[str, list[float]] = {}
        self._print: _Print | None = None
        self._ticks = 0

    def __enter__(self) -> None:
        self._live.__enter__()

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def draw(self, snapshots: list[Any]) -> None:
        self._live.update(self.picture(snapshots), refresh=True)

    def picture(self, snapshots: list[Any]) -> Layout:
        self._ticks += 1
        for now in snapshots:
            self._rates[now.name].note(sum(now.settled_by_worker))
            before = self._loads.get(now.name) or now.load_by_worker
            pairs = zip(before, now.load_by_worker, strict=True)
            self._loads[now.name] = [old + (new - old) * 0.4 for old, new in pairs]
        return self._compose({now.name: now for now in snapshots})

    def _compose(self, by_name: dict[str, Any]) -> Layout:
        height, width = self._console.height, self._console.width
        lines = max(height - 16, 1)  # for the diary and the photo
        picture = Layout()
        picture.split_column(
            Layout(self._header(), size=1),
            Layout(self._pipeline(by_name), size=10),
            Layout(self._counters(by_name), size=3),
            Layout(name="below"),
        )
        diary = Panel(_Tail(self._lab.diary), title="diary", title_align="left", border_style=_DIM)
        latest, shown = self._lab.latest, self._print
        if latest is not None and (shown is None or time.perf_counter() - shown.since > 0.5):
            shown = self._print = _Print(latest.photo)
        columns = shown.fit(lines, width // 2) if shown is not None else 18
        title = f"photo {shown.photo.number}" if shown is not None else "photo"
        photo = Panel(Align.center(shown or Text(""), vertical="middle"), title=title, border_style=_DIM)
        picture["below"].split_row(Layout(diary), Layout(photo, size=columns + 4))
        return picture

    def _header(self) -> RenderableType:
        acts = Text(no_wrap=True)
        for number, name in enumerate(ACTS, 1):
            style = "cyan" if number < self._story.act else _DIM
            if number == self._story.act:
                style = "bold black on cyan"
            acts.append(f" {name} ", style)
        grid = Table.grid(expand=True)
        grid.add_column()
        grid.add_column(justify="center", ratio=1)
        grid.add_column(justify="right")
        grid.add_row(
            Text(" PENSTOCK ", "bold white on blue"), acts, Text(f"{self._lab.diary.elapsed:5.1f} s ", "bold")
        )
        return grid

    # The stages

    def _pipeline(self, by_name: dict[str, Any]) -> RenderableType:
        grid = Table.grid(expand=True)
        cells: list[RenderableType] = []
        for pool in self._lab.pools:
            if cells:
                grid.add_column(width=1, vertical="middle")
                cells.append(Text("▸" if self._ticks // 3 % 2 else "▹", "bold cyan"))
            grid.add_column(ratio=1)
            cells.append(self._stage(by_name[pool.name]) if pool.name in by_name else Text(""))
        grid.add_row(*cells)
        return grid

    def _stage(self, now: Any) -> Panel:
        rows = Table.grid(expand=True, padding=(0, 1, 0, 0))
        rows.add_column(width=9, no_wrap=True)
        rows.add_column(ratio=1)
        rows.add_column(width=5, justify="right", no_wrap=True)
        full = now.pending_queue_depth > 0.8 * now.max_queue_depth
        flight, depth, waiting = now.in_flight, now.pending_queue_depth, now.waiting_queue_depth
        rows.add_row("in flight", _bar(flight, now.max_in_flight, "cyan"), f"{flight}/{now.max_in_flight}")
        rows.add_row(
            "pending",
            _bar(depth, now.max_queue_depth, "dark_orange" if full else "green"),
            Text(f"{depth}/{now.max_queue_depth}", "bold dark_orange" if full else ""),
        )
        rows.add_row(
            Text("waiting", "bold red" if waiting else ""),
            _bar(waiting, IN_PROGRESS / 2, "red"),
            Text(str(waiting), "bold red" if waiting else ""),
        )
        rows.add_row()
        loads = self._loads[now.name]
        for place in range(2):
            if place < len(loads):
                bar = _bar(loads[place], now.max_in_flight / len(loads), "blue")
                rows.add_row(
                    Text(f"worker {place}", _DIM), bar, Text(f"{now.settled_by_worker[place]:,}", _DIM)
                )
            else:
                rows.add_row()
        rows.add_row()
        rows.add_row(Text("per sec", _DIM), self._rates[now.name], f"{self._rates[now.name].latest:.0f}")
        restarting, halted = now.workers.get("restarting", 0), now.workers.get("halted", 0)
        hurt = restarting or halted
        state = (
            f"{restarting or halted} worker {'restarting' if restarting else 'halted'}"
            if hurt
            else now.policy
        )
        return Panel(
            rows,
            title=Text(now.name, "bold"),
            subtitle=Text(state, "bold white on red" if hurt else _DIM),
            border_style="red" if hurt else "cyan",
            height=10,
        )

    def _counters(self, by_name: dict[str, Any]) -> Panel:
        photos, totals = self._lab.photos, [now.totals for now in by_name.values()]
        counts = (
            ("taken", photos.taken, "white"),
            ("analysed", photos.analysed, "green"),
            ("canceled", photos.canceled.total(), "yellow"),
            ("shed", photos.shed, "magenta"),
            ("requeued", sum(total["requeued"] for total in totals), "dark_orange"),
            ("crashes", sum(total["crashed"] for total in totals), "red"),
        )
        grid = Table.grid(expand=True)
        for _ in counts:
            grid.add_column(ratio=1, justify="center", no_wrap=True)
        grid.add_row(
            *(
                Text.assemble((f"{number:,} ", f"bold {style}" if number else _DIM), (name, _DIM))
                for name, number, style in counts
            )
        )
        memory = f" negatives in memory {self._lab.in_memory:2}, most {photos.most_negatives} of {self._lab.places} places "
        return Panel(
            grid,
            title="photos",
            title_align="left",
            subtitle=Text(memory, _DIM),
            subtitle_align="right",
            border_style=_DIM,
        )

    def summarize(self, *, interrupted: bool) -> None:
        head, *rows = summary(self._lab)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold cyan")
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        *lines, last = proof(self._lab, interrupted=interrupted)
        style = "bold green" if self._lab.balanced else "bold red"
        self._console.print(Group(table, "", *lines, Text(last, style)))


def _bar(value: float, size: float, color: str) -> Bar:
    return Bar(size=max(size, 1), begin=0, end=min(value, max(size, 1)), color=color, bgcolor=_EMPTY)


class _Rate:
    """Recent settled calls a second, as a line of blocks that fills the width."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=10)
        self._line: deque[float] = deque(maxlen=200)
        self.latest = 0.0

    def note(self, settled: int) -> None:
        self._seen.append((time.perf_counter(), settled))
        (then, before), (now, after) = self._seen[0], self._seen[-1]
        self.latest = (after - before) / (now - then) if now > then else 0.0
        self._line.append(self.latest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = list(self._line)[-options.max_width :]
        highest = max(line, default=0) or 1
        yield Text("".join(_SPARKS[round(rate / highest * 8)] for rate in line), "cyan", no_wrap=True)


class _Tail:
    """The end of the diary, as many lines as fit."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for entry in list(self._diary.entries)[-(options.height or 5) :]:
            sign, style = _MOODS[entry.mood]
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f"{entry.at:5.1f} ", _DIM)
            line.append(f"{sign} ", f"bold {style}")
            line.append(entry.text, style if style != "white" else "")
            yield line


class _Print:
    """A photo in half blocks: two pixels a character, so that they are square. Printed again only at another size."""

    def __init__(self, photo: Photo) -> None:
        self.photo = photo
        self.since = time.perf_counter()
        self._size = (0, 0)
        self._printed: list[Segment] = []

    def fit(self, lines: int, columns: int) -> int:
        """Fit the photo into the space, at most in its own size. Returns its number of columns."""
        photo = self.photo
        width = max(min(lines * 2 * photo.width // photo.height, columns, photo.width), 2)
        size = (width, max(width * photo.height // photo.width // 2, 1))
        if size != self._size:
            self._size = size
            self._printed = list(self._segments(*size))
        return width

    def _segments(self, width: int, height: int) -> Iterator[Segment]:
        photo = self.photo

        def color(x: int, y: int) -> Color:
            at = (y * photo.height // (height * 2) * photo.width + x * photo.width // width) * 3
            return Color.from_rgb(*photo.pixels[at : at + 3])

        for y in range(height):
            for x in range(width):
                yield Segment("▀", Style(color=color(x, 2 * y), bgcolor=color(x, 2 * y + 1)))
            yield Segment.line()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._printed

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self._size[0], self._size[0])
