"""`penstock chaos`: kill a scheduler and its jobs, and check that nothing was lost."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from penstock.cli.db import opened
from penstock.cli.session import FAILED, CliSession, passes


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(1, 100_000),
    default=20,
    show_default=True,
    help="How many kills.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1_000_000), default=60, show_default=True, help="How many jobs."
)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed kills in the same order.")
@click.option("--keep", is_flag=True, help="Keep the directory also when every promise holds.")
@passes
def chaos(session: CliSession, /, kills: int, jobs: int, seed: int, keep: bool) -> None:
    """
    Kill a real scheduler and its jobs again and again, and check its promises.

    It starts a scheduler of its own in a new directory, submits jobs, and kills now the scheduler, now a job,
    with SIGKILL. Then it checks every promise against the audit trail and against marks that the jobs left
    outside of it. Your own scheduler is not touched. Exits with 1 when a promise is broken, and says where to
    look.
    """
    from penstock.chaos import KillLoop, check_promises

    folder = Path(tempfile.mkdtemp(prefix="pst-chaos-"))
    with session.aside.status("starting") as status:
        aftermath = KillLoop(folder, jobs=jobs, kills=kills, seed=seed).run(status.update)
        store = opened(str(folder / "jobs.db"))
        try:
            promises = check_promises(aftermath, store)
        finally:
            store.close()
    broken = any(promise.broken for promise in promises) or not aftermath.settled
    if not (broken or keep):
        shutil.rmtree(folder)
    answer = {
        "holds": not broken,
        "folder": str(folder) if broken or keep else None,
        "jobs": len(aftermath.acknowledged),
        "killed": dict(aftermath.killed),
        "promises": [promise._asdict() for promise in promises],
    }
    if not session.print_json(answer):
        killed = " and ".join(f"{target} {count} times" for target, count in sorted(aftermath.killed.items()))
        session.console.print(f"{len(aftermath.acknowledged)} jobs; killed {killed}")
        for promise in promises:
            verdict = "[red]broken[/]" if promise.broken else "[green]holds[/] "
            session.console.print(f"  {verdict}  {promise.name}  {promise.promise}")
            for line in promise.broken[:5]:
                session.console.print(f"            {line}", markup=False)
        if not aftermath.settled:
            session.console.print("  [red]not all jobs ended[/]")
        if broken or keep:
            session.console.print(f"Database, log and marks are in {folder}.", markup=False)
    raise click.exceptions.Exit(FAILED if broken else 0)
