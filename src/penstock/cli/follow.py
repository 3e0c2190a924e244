"""Verbs that follow a job: run, logs, wait, events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import click

from penstock.cli.parsers import DURATION, JOB, Whole, short, span
from penstock.cli.printing import echo, output, printable
from penstock.cli.session import EXITS, CliSession, fail, passes
from penstock.cli.submit import COMMAND_LINE, described, submit_command
from penstock.client.signals import interruptible
from penstock.core.errors import Unavailable

if TYPE_CHECKING:
    from penstock import wire


_OPEN = frozenset({"QUEUED", "DISPATCHING", "RUNNING"})
_TIMEOUT = 124
#: How many events `penstock events` prints by default.
_EVENTS = 50
#: Seconds before the first explanation: a command that starts at once needs none.
_EXPLAIN_EVERY = 1.0
#: Reasons that pass within a moment.
_STARTS_SOON = ("", "awaits_worker")


@click.command(context_settings=COMMAND_LINE)
@click.argument("command", nargs=-1, required=True, metavar="CMD...")
@described
@click.option(
    "--detach-on-interrupt", is_flag=True, help="Ctrl-C leaves the job running instead of canceling it."
)
@passes
@interruptible()
def run(session: CliSession, /, command: tuple[str, ...], detach_on_interrupt: bool, **options: Any) -> None:
    """Submit a command, follow its output, and exit with its code."""
    # With --json standard output has the job, so the output of the command goes to standard error.
    show = partial(_print, out=sys.stderr if session.as_json else None)
    job_id = submit_command(session, command, **options).job_id
    try:
        job = _follow(session, job_id, show)
    except KeyboardInterrupt:
        if detach_on_interrupt:
            session.stderr.print(f"\nThe job continues: penstock logs -f {short(job_id)}")
        else:
            session.client.cancel(job_id)
            session.stderr.print(f"\nCanceled {short(job_id)}.")
        raise
    except Unavailable:
        follow = f"penstock logs -f {short(job_id)}"
        session.stderr.print(f"\nThe job is on disk. When the scheduler runs again: {follow}", markup=False)
        raise
    session.print_json(job)
    code = _code_of(job)
    if code is None:  # the command has not exited by itself
        why = job.error or str(job.end or "").replace("_", " ")
        session.stderr.print(f"{short(job_id)} {job.state}: {why}", style="yellow", markup=False)
    raise click.exceptions.Exit(EXITS.get(job.state, 1) if code is None else code)


def _code_of(job: wire.JobInfo) -> int | None:
    """The exit code of the command, if it has one."""
    import msgspec

    if job.state in ("DONE", "FAILED"):
        result = msgspec.json.decode(bytes(job.result))
        if isinstance(result, dict) and isinstance(result.get("exit_code"), int):
            code = int(result["exit_code"])
            return code if code >= 0 else 128 - code  # as shells report a signal
    return None


@click.command()
@click.argument("job", type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
@click.option("--attempt", type=Whole(1), help="The output of this attempt instead of the last.")
@click.option("--index", type=Whole(0), help="JOB is an array: the output of this index.")
@passes
@interruptible()
def logs(session: CliSession, job: str, follow: bool, attempt: int | None, index: int | None) -> None:
    """Print the output of a job: its standard output and its standard error, each to its own stream."""
    job_id = session.job_id(job) if index is None else _job_of_index(session, job, index)
    if follow:
        _follow(session, job_id, _lines if session.as_json else _print)
        return
    pages = _pages(session, job_id, attempt)
    if session.as_json:
        whole = next(pages)
        for page in pages:
            whole.pieces += page.pieces
            whole.next, whole.over = page.next, page.over
        session.print_json(whole)
    else:
        printed = False
        for page in pages:
            _print(page)
            printed = printed or bool(page.pieces)
        if not printed:
            session.stderr.print(f"[dim]{_why_empty(page)}[/]")


def _why_empty(page: wire.Logs) -> str:
    name = short(page.job_id)
    if page.over:
        return f"{name} printed nothing." if page.attempt else f"{name} was never started."
    so_far = "has printed nothing yet" if page.attempt else "has not been started yet"
    return f"{name} {so_far}: penstock logs -f {name}"


def _job_of_index(session: CliSession, array: str, index: int) -> str:
    from penstock.cli.arrays import find

    return str(session.client.array(find(session, array), index=index).job_id)


def _pages(session: CliSession, job_id: str, attempt: int | None) -> Iterator[wire.Logs]:
    page = session.client.logs(job_id, attempt=attempt)
    yield page
    while page.pieces:
        page = session.client.logs(job_id, attempt=page.attempt, offset=page.next)
        yield page


def _follow(session: CliSession, job_id: str, show: Callable[[wire.Logs], None]) -> wire.JobInfo:
    """Show the output of all attempts until the job is settled."""
    offset, attempt = 0, 0
    with _status(session, job_id, aloud=True) as seen:
        while True:
            page = session.client.logs(job_id, attempt=attempt or None, offset=offset, wait_sec=10)
            if page.attempt != attempt:
                if attempt:
                    session.stderr.print(f"[dim]attempt {page.attempt}[/]")
                attempt, offset = page.attempt, 0
            if page.pieces:
                seen()
                show(page)
            moved, offset = page.next != offset, page.next
            if page.over and not moved:
                job = session.client.job(job_id)
                if job.state not in _OPEN:
                    return job
                if job.attempts > attempt:
                    attempt, offset = 0, 0
                else:
                    session.client.job(job_id, wait_sec=1)


def _print(page: wire.Logs, out: TextIO | None = None) -> None:
    """Print a page of output. `out`: the stream for the standard output of the job."""
    for piece in page.pieces:
        if piece.skipped:
            echo(f"[... {piece.skipped} bytes are no longer stored ...]", err=True)
        stream = (out or sys.stdout) if piece.stream == "stdout" else sys.stderr
        stream.write(output(piece.text) if stream.isatty() else piece.text)
        stream.flush()


def _lines(page: wire.Logs) -> None:
    """Print one JSON line for each piece: the number of pieces is not known."""
    import msgspec

    for piece in page.pieces:
        echo(msgspec.json.encode(piece).decode())


@contextmanager
def _status(session: CliSession, job_id: str, *, aloud: bool = False) -> Iterator[Any]:
    """
    Show in the terminal why there is no output yet. `aloud`: also print each new reason to standard error,
    with the command that would change it.
    """
    if not (aloud or session.stderr.is_terminal):
        yield lambda: None
        return
    import threading

    status = session.stderr.status(f"{short(job_id)} submitted") if session.stderr.is_terminal else None
    over = threading.Event()

    def watch() -> None:
        printed = ""
        while not over.wait(_EXPLAIN_EVERY):
            explanation = _explained(session, job_id)
            if explanation is None or over.is_set():
                continue  # without an explanation this time
            if aloud and explanation.state == "QUEUED" and explanation.reason not in (*_STARTS_SOON, printed):
                printed = explanation.reason
                session.stderr.print(
                    f"{short(job_id)}: {printable(explanation.text)}", markup=False, soft_wrap=True
                )
            if status is not None:
                line = f"{short(job_id)} {explanation.state}: {printable(explanation.short)}"
                status.update(line[: session.stderr.width - 4])

    def stop() -> None:
        if status is not None:
            status.stop()

    if status is not None:
        status.start()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield stop
    finally:
        over.set()
        stop()


def _explained(session: CliSession, job_id: str) -> wire.Explained | None:
    """The explanation, by a connection of its own: the session's connection waits for output."""
    from penstock.client.client import Client
    from penstock.core.errors import PenstockError

    try:
        with Client(session.client.url, token=session.client.token) as client:
            return client.explain(job_id)
    except PenstockError:
        return None


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB, metavar="JOB...")
@click.option("--timeout", type=DURATION, help="Exit with 124 when a job is not settled by then.")
@passes
@interruptible()
def wait(session: CliSession, jobs: tuple[str, ...], timeout: float | None) -> None:
    """
    Wait until jobs are settled.

    The exit code says how they ended: 0 DONE, 1 FAILED, 6 CANCELED, 7 BLOCKED (the worst of several).
    """
    until = None if timeout is None else time.monotonic() + timeout
    ended = []
    for job_id in [session.job_id(job) for job in jobs]:
        with _status(session, job_id):
            rest = None if until is None else max(0.0, until - time.monotonic())
            job = session.client.wait(job_id, rest)
        if job.state in _OPEN:
            fail(f"{short(job_id)} is still {job.state} after {span(timeout)}", _TIMEOUT)
        ended.append(job)
    if not session.print_json(ended):
        for job in ended:
            echo(
                f"{short(job.job_id)}  {job.state}" + (f"  {job.error.splitlines()[-1]}" if job.error else "")
            )
    raise click.exceptions.Exit(max((EXITS[job.state] for job in ended), key=lambda code: (code > 0, -code)))


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@click.option("-j", "--job", type=JOB, help="Only events of this job.")
@click.option(
    "-n",
    "--limit",
    type=Whole(1, 500),
    help="How many events to print; 50 by default. With -f: how many earlier ones to begin with; none by default.",
)
@passes
@interruptible()
def events(session: CliSession, follow: bool, job: str | None, limit: int | None) -> None:
    """Print the audit trail: every event, in order."""
    if follow and job is not None and limit is not None:
        raise click.UsageError(
            "--limit cannot be given with --follow and --job: these begin with the job's first event"
        )
    job_id = None if job is None else session.job_id(job)
    count = limit or (0 if follow else _EVENTS)
    after = max(0, session.client.stats().newest_event - count) if count and job_id is None else None
    if follow:
        with session.client.stream(job_id=job_id, after=after) as stream:
            for event in stream:
                _event(session, event)
        return
    for event in session.client.events(job_id=job_id, limit=count, after=after or 0).events:
        _event(session, event)


def _event(session: CliSession, event: wire.EventInfo) -> None:
    if session.as_json:
        import msgspec

        echo(msgspec.json.encode(event).decode())
        return
    at = f"{event.at.astimezone():%H:%M:%S.%f}"[:-3]
    job = short(event.job_id) if event.job_id else "-"
    by = f" by {event.data['by']}" if event.kind != "DENIED" and "by" in event.data else ""
    of = "".join(f" {word} {name}" for word, name in _subjects(event.data))
    echo(f"{at}  {event.kind.lower():<16} {job:<9} {event.reason.replace('_', ' ')}{of}{by}")


def _subjects(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the event is about beside a job."""
    for field, word in (("schedule", "schedule"), ("batch", "batch"), ("array_id", "array")):
        if field in data:
            yield word, short(data[field]) if word == "array" else data[field]
