"""
`penstock top`: all jobs live, full screen. Keys act on the job under the cursor, or on all marked jobs.

A thread asks the scheduler once a second, so a slow answer never delays a key.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import click
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static
from textual.worker import Worker

from penstock.cli.job_commands import JOB_COLUMNS, job_row
from penstock.cli.parsers import short, span
from penstock.cli.printing import LOAD_COLORS, cell, cell_widths, fitting, printable
from penstock.cli.session import CliSession, passes

if TYPE_CHECKING:
    from penstock import wire
    from penstock.client.client import Client


_SHOWN = 200
#: The most FAILED and BLOCKED jobs among them, so that old ones do not hide those that wait.
_SHOWN_ENDED = 50


@click.command()
@passes
def top(session: CliSession) -> None:
    """
    Watch all jobs live, full screen. Keys: c cancel, r retry, e explain, p pause, q quit.

    m (or the space bar) marks a job, * marks all shown; c and r then act on the marked jobs. With --json:
    print one view and exit.
    """
    # The first request comes before the full screen, which would hide an error.
    view = TopView.of(session.client, open_only=True)
    if session.print_json(view._asdict()):
        return
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        raise click.UsageError("top needs a terminal; `penstock ls` and `penstock top --json` do not")
    Top(session.client).run()


class TopView(NamedTuple):
    """
    One view: running jobs first, then those that wait, the oldest first, then the last FAILED and BLOCKED
    ones.
    """

    stats: wire.Stats
    jobs: list[wire.JobSummary]

    @classmethod
    def of(cls, client: Client, *, open_only: bool) -> TopView:
        stats = client.stats()
        running = client.jobs(states=["RUNNING", "DISPATCHING"], limit=_SHOWN).jobs
        if open_only:
            ended = client.jobs(states=["FAILED", "BLOCKED"], limit=_SHOWN_ENDED, newest_first=True).jobs
            queued = client.jobs(states=["QUEUED"], limit=_SHOWN - len(ended)).jobs
            others = [*queued[: max(0, _SHOWN - len(ended) - len(running))], *ended]
        else:
            others = client.jobs(limit=_SHOWN, newest_first=True).jobs
        unique = {job.job_id: job for job in [*running, *others]}  # a job may move between the requests
        return cls(stats, list(unique.values())[:_SHOWN])


class TopDialog(ModalScreen[bool]):
    """A text in front of the screen, until a key closes it. Only `y` means yes."""

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
    #head { height: auto; max-height: 5; padding: 0 1; margin-bottom: 1; } #headline { width: 2fr; }
    #flow { width: 1fr; height: 3; }
    DataTable { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; } #status { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("m,space", "mark", "mark"),
        Binding("asterisk", "mark_all", "mark all", show=False),
        ("c", "change('cancel')", "cancel"),
        ("r", "change('retry')", "retry"),
        ("e", "explain", "why"),
        ("p", "pause", "pause"),
        ("a", "states", "all"),
        Binding("escape", "unmark", "unmark", show=False),
        ("q,ctrl+c", "quit", "quit"),
    ]
    #: The palette has no more than the keys, and takes their room in a narrow window.
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._open_only = True
        self._paused = False
        self._shown: list[str] = []
        self._marked: set[str] = set()
        self._done_before: int | None = None
        self._loading: Worker[None] | None = None
        self._jobs: dict[str, wire.JobSummary] = {}
        #: A message of the status line, and the job that was under the cursor then.
        self._notice: tuple[str, str | None] | None = None
        self._failed = False

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
        Load a new view, unless a request is under way: requests to a slow scheduler would occupy all threads.
        """
        if self._loading is None or self._loading.is_finished:
            self._loading = self.run_worker(self._load, thread=True, exit_on_error=False)

    def _load(self) -> None:
        from penstock.core.errors import PenstockError

        try:
            view = TopView.of(self._client, open_only=self._open_only)
        except PenstockError as error:
            self.call_from_thread(self._fail, f"{error}")
            return
        self.call_from_thread(self._draw, view)

    def _fail(self, text: str) -> None:
        if not self._is_closing():
            self._failed = True
            self._show_status(text)

    def _is_closing(self) -> bool:
        """Whether the screen is gone already: answers and events may still come then."""
        return not self.screen_stack or not self.query(DataTable)

    def _draw(self, view: TopView) -> None:
        if self._is_closing():
            return
        stats, jobs = view
        self._paused = stats.paused
        done = stats.jobs.get("DONE", 0)
        before = done if self._done_before is None else self._done_before
        flow = self.query_one(Sparkline)
        flow.data = [*(flow.data or [0.0]), float(max(0, done - before))][-120:]
        self._done_before = done
        self.query_one("#headline", Static).update(headline(stats))
        self._list(jobs)
        if self._failed:
            self._failed, self._notice = False, None
        self._show_standing()

    def _list(self, jobs: list[wire.JobSummary]) -> None:
        """
        Fill the table, with new columns each time: the window may have become narrower. The cursor stays on
        its job; on the first row it stays there, so that an unattended list shows what is newest.
        """
        self._shown = [job.job_id for job in jobs]
        self._jobs = {job.job_id: job for job in jobs}
        self._marked.intersection_update(self._shown)
        table = self.query_one(DataTable)
        at, chosen, scroll = table.cursor_row, self._chosen(), table.scroll_y
        places = fitting(JOB_COLUMNS, self.size.width)
        columns = [JOB_COLUMNS[place] for place in places]
        now = datetime.now(UTC)
        lines = []
        for job in jobs:
            row = job_row(job, now)
            lines.append([cell(column, row[place]) for column, place in zip(columns, places, strict=True)])
        # Each cell has a space on both sides; the mark and the scroll bar take one column each.
        widths = cell_widths(columns, lines, self.size.width - 2 * len(columns) - 4)
        table.clear(columns=True)
        table.add_column("", width=1)
        for column, width in zip(columns, widths, strict=True):
            table.add_column(column.title, width=width)
        for job, line in zip(jobs, lines, strict=True):
            for text, width in zip(line, widths, strict=True):
                text.truncate(width, overflow="ellipsis")
            mark = Text("*", style="bold yellow") if job.job_id in self._marked else Text("")
            table.add_row(mark, *line, key=job.job_id)
        table.scroll_y = scroll
        if at > 0 and chosen is not None and chosen in self._jobs:
            at = self._shown.index(chosen)
        table.move_cursor(row=min(at, max(0, len(jobs) - 1)))

    def _chosen(self) -> str | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _show_status(self, text: str) -> None:
        """Show a message, until the cursor is on another job."""
        self._notice = (text, self._chosen()) if text else None
        self._show_standing()

    def _show_standing(self) -> None:
        """Without a message: why the job under the cursor waits or how it ended, which a narrow window cuts."""
        chosen = self._chosen()
        if self._notice is not None and self._notice[1] == chosen:
            text = self._notice[0]
        else:
            self._notice = None
            job = self._jobs.get(chosen or "")
            text = "No jobs. `penstock submit -- echo hello` submits one." if job is None else job.why
        self.query_one("#status", Static).update(Text(printable(text)))

    def on_data_table_row_highlighted(self) -> None:
        if not self._failed and not self._is_closing():
            self._show_standing()

    def action_mark(self) -> None:
        if (job_id := self._chosen()) is not None:
            self._marked ^= {job_id}
            self.query_one(DataTable).action_cursor_down()
            self._show_marks()

    def action_mark_all(self) -> None:
        """Mark all shown jobs; if all are marked already, unmark them."""
        self._marked = set() if self._marked.issuperset(self._shown) else set(self._shown)
        self._show_marks()

    def action_unmark(self) -> None:
        self._marked = set()
        self._show_marks()

    def _show_marks(self) -> None:
        """Show the marks at once, without a request."""
        table = self.query_one(DataTable)
        for row, job_id in enumerate(self._shown[: table.row_count]):
            mark = Text("*", style="bold yellow") if job_id in self._marked else Text("")
            table.update_cell_at(Coordinate(row, 0), mark)
        self._show_status(f"{len(self._marked)} marked; * marks all, Esc none" if self._marked else "")

    def action_change(self, verb: str) -> None:
        """
        Cancel or retry the marked jobs, or the job under the cursor. Ask first for a cancel and for several
        jobs.
        """
        job_ids = [job_id for job_id in self._shown if job_id in self._marked]
        if not job_ids and (chosen := self._chosen()) is not None:
            job_ids = [chosen]
        if not job_ids:
            return
        name = short(job_ids[0]) if len(job_ids) == 1 else f"{len(job_ids)} jobs"
        if verb == "retry" and len(job_ids) == 1:
            self._act(verb, job_ids)
            return
        question = TopDialog(f"{verb.capitalize()} {name}?  y / n")
        self.push_screen(question, lambda yes: self._act(verb, job_ids) if yes else None)

    def action_explain(self) -> None:
        if (job_id := self._chosen()) is not None:
            self.run_worker(lambda: self._explain(job_id), thread=True, exit_on_error=False)

    def action_pause(self) -> None:
        verb = "resume" if self._paused else "pause"
        self._paused = not self._paused  # before the answer, so that a second press means the opposite
        self._act(verb, [])

    def action_states(self) -> None:
        self._open_only = not self._open_only
        self.reload()

    def _explain(self, job_id: str) -> None:
        from penstock.core.errors import PenstockError

        try:
            text = self._client.explain(job_id).text
        except PenstockError as error:
            self.call_from_thread(self._show_status, f"{error}")
            return
        self.call_from_thread(self._show_dialog, text)

    def _show_dialog(self, text: str) -> None:
        """Show one dialog, even if a key is pressed twice."""
        if not isinstance(self.screen, TopDialog):
            self.push_screen(TopDialog(text))

    def _act(self, verb: str, job_ids: list[str]) -> None:
        """Carry out a verb for these jobs; without any, for everything."""
        self.run_worker(lambda: self._do(verb, job_ids), thread=True, exit_on_error=False)

    def _do(self, verb: str, job_ids: list[str]) -> None:
        from penstock.core.errors import PenstockError

        act = getattr(self._client, verb)
        done, refusals = 0, []
        calls: list[tuple[str, ...]] = [(job_id,) for job_id in job_ids] or [()]
        for arguments in calls:
            try:
                act(*arguments)
                done += 1
            except PenstockError as error:
                refusals.append(str(error))
        what = "everything" if not job_ids else short(job_ids[0]) if len(job_ids) == 1 else f"{done} jobs"
        words = [f"{verb}: {what}"] * (done > 0)
        if refusals:
            words.append(refusals[0] if len(job_ids) < 2 else f"{len(refusals)} refused: {refusals[0]}")
        self.call_from_thread(self._show_status, "; ".join(words))
        self.call_from_thread(self._forget_marks, job_ids)
        self.call_from_thread(self.reload)

    def _forget_marks(self, job_ids: list[str]) -> None:
        self._marked.difference_update(job_ids)


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
