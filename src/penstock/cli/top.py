"""
`penstock top`: everything live, full screen. Keys act on the job under the cursor.

A thread of its own asks the scheduler once a second, so a slow answer never makes a key slow.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import click
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static
from textual.worker import Worker

from penstock.cli.job_commands import JOB_COLUMNS, job_row
from penstock.cli.parsers import short, span
from penstock.cli.printing import LOAD_COLORS, cell, fitting, printable
from penstock.cli.session import CliSession, passes

if TYPE_CHECKING:
    from penstock import wire
    from penstock.client.client import Client


_SHOWN = 200


@click.command()
@passes
def top(session: CliSession) -> None:
    """
    Everything live, full screen: c cancel, r retry, e explain, p pause, q quit. With --json: what it would
    show now.
    """
    # Before the screen is taken: it would hide an error.
    view = TopView.of(session.client, open_only=True)
    if session.print_json(view._asdict()):
        return
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        raise click.UsageError("top needs a terminal; `penstock ls` and `penstock top --json` do not")
    Top(session.client).run()


class TopView(NamedTuple):
    """The screen at one moment: running jobs first, then those that wait or need attention."""

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


class TopDialog(ModalScreen[bool]):
    """A text above the rest, until a key closes it. Only `y` means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "yes"),
        ("n,e,q,enter,escape", "dismiss(False)", "close"),
        ("ctrl+c", "app.quit", "quit"),
    ]
    CSS = """
    TopDialog { align: center middle; }
    #text { width: auto; max-width: 80%; padding: 1 2; border: round $accent; background: $surface; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(Text(printable(self._text)), id="text")


class Top(App[None]):
    TITLE = "penstock top"
    CSS = """
    #head { height: 5; padding: 0 1; } #headline { width: 2fr; } #flow { width: 1fr; height: 3; }
    DataTable { height: 1fr; } #status { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("c", "cancel", "cancel"),
        ("r", "act('retry')", "retry"),
        ("e", "act('explain')", "explain"),
        ("p", "pause", "pause"),
        ("a", "states", "all"),
        ("q,ctrl+c", "quit", "quit"),
    ]
    #: It offers no more than the keys do, and takes their room in a narrow window.
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._open_only = True
        self._paused = False
        self._done_before: int | None = None
        self._loading: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="head"):
            yield Static(id="headline")
            yield Sparkline([0.0], id="flow", summary_function=max)
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        yield Static(id="status")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.reload()
        self.set_interval(1.0, self.reload)

    def reload(self) -> None:
        """
        One request at a time: requests to a slow scheduler would otherwise take all threads from the keys.
        """
        if self._loading is None or self._loading.is_finished:
            self._loading = self.run_worker(self._load, thread=True, exit_on_error=False)

    def _load(self) -> None:
        from penstock.core.errors import PenstockError

        try:
            view = TopView.of(self._client, open_only=self._open_only)
        except PenstockError as error:
            self.call_from_thread(self._show_status, f"{error}")
            return
        self.call_from_thread(self._draw, view)

    def _draw(self, view: TopView) -> None:
        stats, jobs = view
        self._paused = stats.paused
        done = stats.jobs.get("DONE", 0)
        before = done if self._done_before is None else self._done_before
        flow = self.query_one(Sparkline)
        flow.data = [*(flow.data or [0.0]), float(max(0, done - before))][-120:]
        self._done_before = done
        self.query_one("#headline", Static).update(headline(stats))
        self._list(jobs)
        if not jobs:
            self._show_status("No jobs. `penstock submit -- echo hello` submits one.")

    def _list(self, jobs: list[wire.JobSummary]) -> None:
        """With new columns each time: the window may have become narrower."""
        table = self.query_one(DataTable)
        at, scroll = table.cursor_row, table.scroll_y
        shown = fitting(JOB_COLUMNS, self.size.width)
        table.clear(columns=True)
        table.add_columns(*(JOB_COLUMNS[place].title for place in shown))
        now = datetime.now(UTC)
        for job in jobs:
            row = job_row(job, now)
            table.add_row(*(cell(JOB_COLUMNS[place], row[place]) for place in shown), key=job.job_id)
        table.move_cursor(row=min(at, max(0, len(jobs) - 1)))
        table.scroll_y = scroll

    def _chosen(self) -> str | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _show_status(self, text: str) -> None:
        self.query_one("#status", Static).update(Text(printable(text)))

    def action_cancel(self) -> None:
        if (job_id := self._chosen()) is not None:
            question = TopDialog(f"Cancel {short(job_id)}?  y / n")
            self.push_screen(question, lambda yes: self._act("cancel", job_id) if yes else None)

    def action_act(self, verb: str) -> None:
        if (job_id := self._chosen()) is not None:
            self._act(verb, job_id)

    def action_pause(self) -> None:
        verb = "resume" if self._paused else "pause"
        self._paused = not self._paused  # before the answer: a second press means the opposite
        self._act(verb, None)

    def action_states(self) -> None:
        self._open_only = not self._open_only
        self.reload()

    def _act(self, verb: str, job_id: str | None) -> None:
        self.run_worker(lambda: self._do(verb, job_id), thread=True, exit_on_error=False)

    def _do(self, verb: str, job_id: str | None) -> None:
        from penstock.core.errors import PenstockError

        act = getattr(self._client, verb)
        try:
            answer = act() if job_id is None else act(job_id)
        except PenstockError as error:
            self.call_from_thread(self._show_status, f"{error}")
            return
        if verb == "explain":
            self.call_from_thread(self.push_screen, TopDialog(answer.text))
        else:
            self.call_from_thread(self._show_status, f"{verb}: {short(job_id) if job_id else 'everything'}")
            self.call_from_thread(self.reload)


def headline(stats: wire.Stats) -> Text:
    text = Text()
    jobs = stats.jobs
    in_flight = jobs.get("RUNNING", 0) + jobs.get("DISPATCHING", 0)
    oldest = "" if stats.oldest_queued_sec is None else f", oldest {span(stats.oldest_queued_sec)}"
    text.append(f"{stats.quiet}  ", style=LOAD_COLORS[stats.quiet])
    alive = [host for host in stats.hosts if host.state == "alive"]
    if len(stats.hosts) > 1:
        units, may = sum(host.units for host in alive), sum(host.capacity for host in alive)
        text.append(f"{units}/{may} units on {len(alive)} hosts  ")
    else:
        text.append(f"{stats.units_in_use}/{stats.capacity} units  ")
    if stats.paused:
        text.append("PAUSED", style="bold yellow")
    text.append(f"\n{in_flight} in flight   {jobs.get('QUEUED', 0)} pending{oldest}\n")
    text.append(f"{jobs.get('DONE', 0)} done   ")
    trouble = jobs.get("FAILED", 0) + jobs.get("BLOCKED", 0)
    text.append(f"{trouble} failed or blocked", style="red" if trouble else "")
    if len(stats.hosts) > 1:
        text.append("\n")
        for host in stats.hosts:
            now = f"{host.units}/{host.capacity} {host.quiet}" if host.state == "alive" else "lost"
            text.append(
                f"{host.host} {now}{', draining' if host.draining else ''}   ",
                style="red" if host.state == "lost" else "",
            )
    return text
