"""`penstock simulate`: replay the jobs of this scheduler, or a made-up load, with other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.daemon import load_settings, pair
from penstock.cli.db import opened
from penstock.cli.parsers import span
from penstock.cli.session import CliSession, fail, passes
from penstock.cli.tables import Column, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.settings import Settings
    from penstock.simulation import Arrival, Figures


@click.command()
@click.option("--set", "flags", multiple=True, metavar="KEY=VALUE", help="A setting to try; may be repeated.")
@click.option("--made-up", is_flag=True, help="Random jobs instead of those of the database.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 10_000_000),
    default=1_000,
    show_default=True,
    help="How many jobs to make up.",
)
@click.option(
    "--addons",
    type=click.IntRange(1, 1_000),
    default=3,
    show_default=True,
    help="How many addons submit them.",
)
@click.option(
    "--load",
    type=click.FloatRange(0.01, 100),
    default=0.9,
    show_default=True,
    help="The load, where 1 is what the hosts can do; above 1 the queue grows.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed makes up the same jobs.")
@click.option(
    "--hosts", type=click.IntRange(1, 10_000), default=1, show_default=True, help="How many equal hosts."
)
@passes
def simulate(session: CliSession, /, flags: tuple[str, ...], made_up: bool, hosts: int, **more: Any) -> None:
    """
    Replay the jobs of the database with the current settings and with those of --set, and compare.

    Waits, shares and deadlines come from the scheduler's own rules on a virtual clock; no job is run and
    nothing is changed. The machine counts as quiet, and every job takes as long as it took. No daemon is
    needed.
    """
    settings = load_settings(None, {})
    tried = load_settings(None, dict(pair(flag) for flag in flags)) if flags else None
    arrivals, weights = _made_up(settings, hosts, more) if made_up else _known(session, settings)
    if not arrivals:
        fail("there are no jobs to replay: submit some, or give --made-up")
    before = _play(session, "as it is", arrivals, settings, weights, hosts)
    after = None if tried is None else _play(session, " ".join(flags), arrivals, tried, weights, hosts)
    answer = {
        "as_it_is": _plain(before),
        "tried": None if after is None else _plain(after),
        "set": list(flags),
    }
    if not session.print_json(answer):
        _show(session, before, after)


def _made_up(settings: Settings, hosts: int, more: Mapping[str, Any]) -> tuple[list[Arrival], dict[str, int]]:
    from penstock.simulation import made_up

    capacity = settings.rules().capacity.most
    return made_up(
        more["jobs"], capacity=capacity, hosts=hosts, **{k: more[k] for k in ("addons", "load", "seed")}
    ), {}


def _known(session: CliSession, settings: Settings) -> tuple[list[Arrival], dict[str, int]]:
    from pathlib import Path

    from penstock.simulation import replayed
    from penstock.stores.opening import is_address, shown

    place = settings.jobs_at
    if not is_address(place) and not Path(place).exists():
        fail(f"there is no database {place}: --made-up needs none")
    with session.aside.status(f"reading {shown(place)}"):
        store = opened(place)
        try:
            return replayed(store), {str(addon.addon_id): addon.weight for addon in store.addons()}
        finally:
            store.close()


def _play(
    session: CliSession,
    what: str,
    arrivals: Sequence[Arrival],
    settings: Settings,
    weights: Mapping[str, int],
    hosts: int,
) -> Figures:
    from penstock.simulation import figures, play

    given = {name: addon.weight for name, addon in settings.addons.items() if addon.weight is not None}
    with _progress(session, what, len(arrivals)) as tell:
        return figures(play(arrivals, settings.rules(), hosts=hosts, weights={**weights, **given}, tell=tell))


@contextmanager
def _progress(session: CliSession, what: str, total: int) -> Iterator[Callable[[int], object]]:
    from rich.progress import Progress

    with Progress(console=session.aside, transient=True, disable=not session.aside.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda settled: progress.update(task, completed=settled)


def _plain(told: Figures) -> dict[str, Any]:
    return told._asdict() | {
        "addons": [addon._asdict() for addon in told.addons],
        "everything": told.everything._asdict(),
    }


def _show(session: CliSession, before: Figures, after: Figures | None) -> None:
    def both(tell: Callable[[Any], str], one: Any, other: Any) -> str:
        """An arrow where it changes."""
        old, new = tell(one), None if other is None else tell(other)
        return old if new is None or new == old else f"{old} \N{RIGHTWARDS ARROW} {new}"

    columns = [
        Column("addon"), Column("jobs", True), Column("wait p50", True, 60), Column("wait p95", True), Column("longest", True, 90),
        Column("share", True, 70), Column("late", True), Column("refused", True, 80),
    ]  # fmt: skip
    old = [*before.addons, before.everything]
    new = [None] * len(old) if after is None else [*after.addons, after.everything]
    rows = [
        (
            one.addon_id, one.jobs, both(lambda f: span(f.wait_p50), one, other), both(lambda f: span(f.wait_p95), one, other),
            both(lambda f: span(f.wait_max), one, other), both(lambda f: f"{f.share:.0%}", one, other),
            both(lambda f: str(f.late), one, other), both(lambda f: str(f.refused), one, other),
        )
        for one, other in zip(old, new, strict=True)
    ]  # fmt: skip
    table(session.console, columns, rows)
    used = both(lambda f: f"{f.used:.0%}", before, after)
    lasted = both(lambda f: span(f.lasted_sec), before, after)
    session.console.print(f"All jobs ended after {lasted}; {used} of the units were in use.")
