"""
`penstock top`: everything live, full screen. Keys act on the job under the cursor.

It reads the same beats as the page, a second at a time, from a thread of its own, so a slow answer never
makes a key slow.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import click
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static
from textual.worker import Worker

from penstock.cli.job_commands import standing
from penstock.cli.parsers import age, short, span
from penstock.cli.printing import Column, printable, state_text
from penstock.cli.session import CliSession, passes

if TYPE_CHECKING:
    from penstock import wire
    from penstock.client.client import Client


_SHOWN = 200

#: Why a job waits is what one looks for: in a narrow window whatever else there is makes room for it.
COLUMNS: Final = (
    Column("job"), Column("state"), Column("addon", keep=85), Column("type", keep=70), Column("units", keep=100),
    Column("prio", keep=100), Column("age", keep=45), Column("reason or progress"),
)  # fmt: skip


@click.command()
@passes
def top(session: CliSession) -> None:
    """
    Everything live, full screen: c cancel, r retry, e explain, p pause, q quit. With --json: what it would
    show now.
    """
    seen = TopView.of(
        session.client, open_only=True
    )  # an error is told in the terminal, not on a screen that goes away
    if session.print_json(seen._asdict()):
        return
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        raise click.UsageError("top needs a terminal; `penstock ls` and `penstock top --json` do not")
    Top(session.client).run()


class TopView(NamedTuple):
    """What is shown at one time: those that run first, then those that wait or need a person."""

    stats: wire.Stats
    jobs: list[wire.JobSummary]

    @classmethod
    def of(cls, client: Client, *, open_only: bool) -> TopView:
        stats = client.stats()
        running = client.jobs(states=["RUNNING", "DISPATCHING"], limit=_SHOWN).jobs
        states = ["QUEUED", "FAILED", "BLOCKED"] if open_only else []
        others = client.jobs(states=states, limit=_SHOWN, newest_first=not open_only).jobs
        seen = {job.job_id for job in running}
        return cls(stats, [*running, *(job for job in others if job.job_id not in seen)][:_SHOWN])


class TopData(ModalScreen[None]):
    """A few sentences on top of everything, until a key is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "app.pop_screen", "close"),
        ("enter", "app.pop_screen", "close"),
        ("e", "app.pop_screen", "close"),
    ]
    CSS = "Told { align: center middle; } #told { width: 80%; max-width: 100; padding: 1 2; border: round $accent; background: $surface; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(Text(printable(self._text)), id="told")


class TopQuery(ModalScreen[bool]):
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "yes"),
        ("n", "dismiss(False)", "no"),
        ("escape", "dismiss(False)", "no"),
    ]
    CSS = "Asked { align: center middle; } #asked { width: auto; padding: 1 2; border: round $error; background: $surface; }"

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}  y / n"), id="asked")


class Top(App[None]):
    TITLE = "penstock top"
    CSS = """
    #head { height: 5; padding: 0 1; } #numbers { width: 2fr; } #flow { width: 1fr; height: 3; }
    DataTable { height: 1fr; } #said { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("c", "cancel", "cancel"),
        ("r", "retry", "retry"),
        ("e", "explain", "explain"),
        ("p", "pause", "pause"),
        ("a", "states", "all"),
        ("q", "quit", "quit"),
    ]
    ENABLE_COMMAND_PALETTE = (
        False  # it has no more to offer than the keys, and takes their room in a narrow window
    )

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._open_only = True
        self._paused = False
        self._done_before: int | None = None
        self._looking: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="head"):
            yield Static(id="numbers")
            yield Sparkline([0.0], id="flow", summary_function=max)
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        yield Static(id="said")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self._refresh()
        self.set_interval(1.0, self._refresh)

    def _refresh(self) -> None:
        """
        One look at a time: were a slow scheduler asked again every second, nothing would be left to carry
        keys to it.
        """
        if self._looking is None or self._looking.is_finished:
            self._looking = self.run_worker(self._load, thread=True, exit_on_error=False)

    def _load(self) -> None:
        from penstock.core.errors import PenstockError

        try:
            seen = TopView.of(self._client, open_only=self._open_only)
        except PenstockError as error:
            self.call_from_thread(self._say, f"{error}")
            return
        self.call_from_thread(self._draw, seen)

    def _draw(self, seen: TopView) -> None:
        stats, jobs = seen
        self._paused = stats.paused
        done = stats.jobs.get("DONE", 0)
        flow = self.query_one(Sparkline)
        flow.data = [
            *(flow.data or [0.0]),
            float(max(0, done - (done if self._done_before is None else self._done_before))),
        ][-120:]
        self._done_before = done
        self.query_one("#numbers", Static).update(_numbers(stats))
        self._list(jobs)
        if not jobs:
            self._say("No jobs. `penstock submit -- echo hello` submits one.")

    def _list(self, jobs: list[wire.JobSummary]) -> None:
        """Anew each time, as the window may have become narrower."""
        table = self.query_one(DataTable)
        at, scroll = table.cursor_row, table.scroll_y
        columns = [column for column in COLUMNS if column.keep <= self.size.width]
        table.clear(columns=True)
        table.add_columns(*(column.title for column in columns))
        now = datetime.now(UTC)
        for job in jobs:
            cells = {
                "job": Text(short(job.job_id)),
                "state": state_text(job.state),
                "addon": Text(printable(job.addon_id)),
                "type": Text(printable(job.job_type)),
                "units": Text(str(job.cost_units), justify="right"),
                "prio": Text(str(job.priority), justify="right"),
                "age": Text(age(job.created_at, now), justify="right"),
                "reason or progress": Text(printable(standing(job, now))),
            }
            table.add_row(*(cells[column.title] for column in columns), key=job.job_id)
        table.move_cursor(row=min(at, max(0, len(jobs) - 1)))
        table.scroll_y = scroll

    def _chosen(self) -> str | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(Text(printable(text)))

    def action_cancel(self) -> None:
        job_id = self._chosen()
        if job_id is not None:
            self.push_screen(
                TopQuery(f"Cancel {short(job_id)}?"), lambda yes: self._act("cancel", job_id) if yes else None
            )

    def action_retry(self) -> None:
        if (job_id := self._chosen()) is not None:
            self._act("retry", job_id)

    def action_explain(self) -> None:
        if (job_id := self._chosen()) is not None:
            self._act("explain", job_id)

    def action_pause(self) -> None:
        verb = "resume" if self._paused else "pause"
        self._paused = not self._paused  # before the answer: whoever presses twice means two things
        self._act(verb, None)

    def action_states(self) -> None:
        self._open_only = not self._open_only
        self._refresh()

    def _act(self, verb: str, job_id: str | None) -> None:
        self.run_worker(lambda: self._do(verb, job_id), thread=True, exit_on_error=False)

    def _do(self, verb: str, job_id: str | None) -> None:
        from penstock.core.errors import PenstockError

        act = getattr(self._client, verb)
        try:
            answer = act() if job_id is None else act(job_id)
        except PenstockError as error:
            self.call_from_thread(self._say, f"{error}")
            return
        if verb == "explain":
            self.call_from_thread(self.push_screen, TopData(answer.text))
        else:
            self.call_from_thread(self._say, f"{verb}: {short(job_id) if job_id else 'everything'}")
            self.call_from_thread(self._refresh)


def _numbers(stats: wire.Stats) -> Text:
    text = Text()
    jobs = stats.jobs
    oldest = "" if stats.oldest_queued_sec is None else f", oldest {span(stats.oldest_queued_sec)}"
    text.append(
        f"{stats.quiet}  ",
        style={"QUIET": "green", "BUSY": "yellow", "PANIC": "red"}.get(stats.quiet, "white"),
    )
    alive = [host for host in stats.hosts if host.state == "alive"]
    if len(stats.hosts) > 1:
        units, may = sum(host.units for host in alive), sum(host.capacity for host in alive)
        text.append(f"{units}/{may} units on {len(alive)} hosts  ")
    else:
        text.append(f"{stats.units_in_use}/{stats.capacity} units  ")
    if stats.paused:
        text.append("PAUSED", style="bold yellow")
    text.append(
        f"\n{jobs.get('RUNNING', 0) + jobs.get('DISPATCHING', 0)} in flight   {jobs.get('QUEUED', 0)} pending{oldest}\n"
    )
    text.append(f"{jobs.get('DONE', 0)} done   ")
    trouble = jobs.get("FAILED", 0) + jobs.get("BLOCKED", 0)
    text.append(f"{trouble} failed or blocked", style="red" if trouble else "")
    if len(stats.hosts) > 1:
        text.append("\n")
        for host in stats.hosts:
            now = f"{host.units}/{host.capacity} {host.quiet}" if host.state == "alive" else "lost"
            text.append(
                f"{host.host} {now}{', draining' if host.draining else ''}   ", style=_HOST_STYLE[host.state]
            )
    return text


_HOST_STYLE: Final = {"alive": "", "lost": "red"}
