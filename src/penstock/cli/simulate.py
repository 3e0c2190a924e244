"""
`penstock simulate`: replay the jobs of the database, or a made-up load, with other settings, and compare.

It touches no running scheduler, runs no job and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from penstock.cli.daemon import SET, load_settings
from penstock.cli.db import opened_store
from penstock.cli.parsers import Amount, Whole, span
from penstock.cli.printing import Column, echo, table
from penstock.cli.session import CliSession, fail, passes
from penstock.stores.opening import shown

if TYPE_CHECKING:
    from penstock.settings import Settings
    from penstock.simulation import Curves, Figures, Load, PlayedHost
    from penstock.simulation.play import Change

_AS_IT_IS = "as it is"
_SCHEDULES = "schedules."
_MOST_PLAYS = 20
_LOAD_WORDS = "lines of seconds since the first arrival and a busy score from 0 to 10"


class _Scene(NamedTuple):
    """The load and the hosts of all plays."""

    load: Load
    hosts: Sequence[PlayedHost]
    weights: Mapping[str, int]
    changes: Sequence[Change]
    notes: Sequence[str]
    by_trail: bool
    host_load: bool


class _Play(NamedTuple):
    name: str
    flags: Mapping[str, str]
    figures: Figures
    curves: Curves


def _sweep(_: object, __: object, values: Sequence[str]) -> list[dict[str, str]]:
    """One dictionary for each value of `KEY=A,B`; with two keys, for each pair."""
    plays: list[dict[str, str]] = [{}]
    for value in values:
        key, equals, rest = value.partition("=")
        choices = [choice.strip() for choice in rest.split(",") if choice.strip()]
        if not equals or not key or not choices:
            raise click.BadParameter(f"{value!r}: give it as KEY=VALUE,VALUE,...")
        plays = [{**play, key: choice} for play in plays for choice in choices]
    if len(plays) > _MOST_PLAYS:
        raise click.BadParameter(f"makes {len(plays)} plays; at most {_MOST_PLAYS} are compared")
    return plays if values else []


@click.command()
@SET
@click.option(
    "--sweep", multiple=True, metavar="KEY=A,B,...", callback=_sweep,
    help="Compare several values of a setting; with two settings, all pairs.",
)  # fmt: skip
@click.option(
    "--from", "source", type=click.Choice(["trail", "made-up"]), default="trail",
    help="trail: the jobs of the database; made-up: random jobs.",
)  # fmt: skip
@click.option("--made-up", is_flag=True, help="The same as --from made-up.")
@click.option("--jobs", type=Whole(1, 10_000_000), default=1_000, help="How many jobs to make up.")
@click.option("--addons", type=Whole(1, 1_000), default=3, help="How many addons submit them.")
@click.option(
    "--load",
    type=Amount(0.01, 100),
    default=0.9,
    help="The load, where 1 is what the hosts can do; above 1 the queue grows.",
)
@click.option("--seed", type=Whole(), default=1, help="The same seed makes up the same jobs.")
@click.option("--hosts", type=Whole(1, 10_000), default=1, help="How many equal hosts a made-up load has.")
@click.option(
    "--host-load", metavar="recorded|FILE",
    help=f"The load of the hosts: recorded, by the hour of the week; or a file with {_LOAD_WORDS}.",
)  # fmt: skip
@click.option("--plot", is_flag=True, help="Draw waits and queue in the terminal.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw them into this file.")
@passes
def simulate(
    session: CliSession,
    /,
    flags: dict[str, str],
    sweep: list[dict[str, str]],
    source: str,
    made_up: bool,
    hosts: int,
    host_load: str | None,
    plot: bool,
    svg: Path | None,
    **more: Any,
) -> None:
    """
    Replay the jobs of the database with the current settings and with those of --set or --sweep, and compare.

    Waits, shares and deadlines come from the scheduler's own rules on a virtual clock; no job is run and
    nothing is changed. Every job takes as long as it took, on the workers and hosts that the trail has seen.
    Arrays and schedules of the database submit their jobs by their rules; --set schedules.NAME.overlap=queue (or cron,
    every_sec, zone, missed) tries a schedule otherwise. Settings and events that are not played are named. No daemon is
    needed.
    """
    settings = load_settings(None, {})
    if made_up or source == "made-up":
        scene = _made_up(settings, hosts, more)
    else:
        scene = _recorded(session, settings, recorded_load=host_load == "recorded")
    if scene.load.is_empty:
        fail("there are no jobs to replay: submit some, or give --from made-up")
    if host_load not in (None, "recorded"):
        scene = _with_load(scene, Path(str(host_load)))
    tried = [{**flags, **swept} for swept in sweep] or ([flags] if flags else [])
    # All are checked before the first play.
    every = [load_settings(None, _settings_of(one)) for one in tried]
    loads = [_with_schedules(scene.load, one, given) for one, given in zip(tried, every, strict=True)]
    plays = [_play(session, {}, settings, scene)]
    plays += [
        _play(session, one, given, scene._replace(load=load))
        for one, given, load in zip(tried, every, loads, strict=True)
    ]
    notes = [*scene.notes, *_unplayed(tried, every, scene)]
    if svg is not None:
        _draw(svg, plays)
    if not session.print_json(_answer(plays, notes, flags)):
        _show(session, plays, notes)
        if plot:
            _plot(session, plays)


# what is played


def _made_up(settings: Settings, hosts: int, more: Mapping[str, Any]) -> _Scene:
    from penstock.core.jobs.types import HostId
    from penstock.simulation import PlayedHost, made_up

    load = made_up(capacity=settings.rules().capacity.most, hosts=hosts, **more)
    played = [PlayedHost(HostId(f"host{number}")) for number in range(hosts)]
    return _Scene(load, played, {}, (), (), by_trail=False, host_load=False)


def _recorded(session: CliSession, settings: Settings, *, recorded_load: bool) -> _Scene:
    from penstock.simulation import recorded
    from penstock.simulation.recorded import recorded_load as load_of

    place = settings.jobs_at
    if not settings.shared and not Path(place).exists():
        fail(f"there is no database {place}; --from made-up works without one")
    with session.stderr.status(f"reading {shown(place)}"), opened_store(place) as store:
        load, hosts, changes, notes = recorded(store)
        weights = {str(addon.addon_id): addon.weight for addon in store.addons()}
        if recorded_load and not load.is_empty:
            scores = load_of(store, load.began, load.last_at, hosts)
            if not scores:
                fail("no host load is recorded yet: it is recorded when an hour is over")
            changes = [*changes, *scores]
    return _Scene(load, hosts, weights, changes, notes, by_trail=True, host_load=recorded_load)


def _with_load(scene: _Scene, file: Path) -> _Scene:
    from penstock.core.jobs.types import SECOND
    from penstock.simulation.recorded import set_load

    began, names = scene.load.began, [host.name for host in scene.hosts]
    changes: list[Change] = []
    try:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            words = line.replace(",", " ").split()
            if not words or line.startswith("#"):
                continue
            try:
                at, score = map(float, words)
            except ValueError:
                fail(f"{file}:{number}: {line.strip()!r} should be one of the {_LOAD_WORDS}")
            if not (at >= 0 and 0 <= score <= 10):
                fail(f"{file}:{number}: {line.strip()!r} is out of range: {_LOAD_WORDS}")
            changes.append((began + round(at * SECOND), partial(set_load, names, score)))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--host-load: {file} cannot be read: {error}")
    return scene._replace(changes=[*scene.changes, *changes], host_load=True)


def _settings_of(flags: Mapping[str, str]) -> dict[str, str]:
    """Without what says how a schedule is tried, which is no setting."""
    return {key: value for key, value in flags.items() if not key.startswith(_SCHEDULES)}


def _with_schedules(load: Load, flags: Mapping[str, str], settings: Settings) -> Load:
    """`schedules.NAME.FIELD`; a name may have dots."""
    from penstock.core.errors import BadIntent
    from penstock.simulation import change_schedules

    fields: dict[str, dict[str, str]] = {}
    for key in flags.keys() - _settings_of(flags).keys():
        name, _, field = key.removeprefix(_SCHEDULES).rpartition(".")
        fields.setdefault(name, {})[field] = flags[key]
    try:
        return change_schedules(load, fields, most_units=settings.rules().capacity.most)
    except (ValueError, BadIntent) as error:
        echo(f"penstock: {error}", err=True)
        raise click.exceptions.Exit(2) from None


def _play(session: CliSession, flags: Mapping[str, str], settings: Settings, scene: _Scene) -> _Play:
    from penstock.simulation import curves, figures, play

    name = " ".join(f"{key}={value}" for key, value in flags.items()) or _AS_IT_IS
    given = {addon: each.weight for addon, each in settings.addons.items() if each.weight is not None}
    hosts = [_with_workers(host, settings, scene) for host in scene.hosts]
    with _progress(session, name, len(scene.load)) as show_value:
        played = play(
            scene.load,
            settings.rules(),
            hosts=hosts,
            weights={**scene.weights, **given},
            changes=scene.changes,
            progress=show_value,
        )
        return _Play(name, flags, figures(played), curves(played))


def _with_workers(host: PlayedHost, settings: Settings, scene: _Scene) -> PlayedHost:
    """The host with these settings: its runner, and its labels if it is the only host."""
    from penstock.simulation.recorded import with_runner, without_runner

    runner = settings.runner
    if not scene.by_trail:
        places = runner.slots if runner.enabled else 0
        return host._replace(
            workers=tuple(worker._replace(places=places) for worker in host.workers),
            labels=settings.host.labels,
        )
    if len(scene.hosts) == 1:
        host = host._replace(labels=settings.host.labels)
    if not runner.enabled or not host.reserves:
        return without_runner(host)
    return with_runner(host, runner.slots, runner.workers or 2 * (os.cpu_count() or 1))


def _unplayed(tried: Sequence[Mapping[str, str]], every: Sequence[Settings], scene: _Scene) -> Iterator[str]:
    from penstock.simulation import unplayed

    named: set[str] = set()
    addons = scene.load.addons()
    for flags, settings in zip(tried, every, strict=True):
        fixed = settings.capacity.units is not None
        for setting, why in unplayed(
            _settings_of(flags), host_load=scene.host_load, fixed=fixed, addons=addons
        ):
            if setting not in named:
                named.add(setting)
                yield f"{setting} is not played: {why}"


@contextmanager
def _progress(session: CliSession, what: str, total: int) -> Iterator[Callable[[int], object]]:
    from rich.progress import Progress

    with Progress(console=session.stderr, transient=True, disable=not session.stderr.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda settled: progress.update(task, completed=settled)


# what is shown


def _answer(plays: Sequence[_Play], notes: Sequence[str], flags: Mapping[str, str]) -> dict[str, Any]:
    return {
        "as_it_is": _plain(plays[0].figures),
        "tried": _plain(plays[1].figures) if len(plays) == 2 else None,
        "set": [f"{key}={value}" for key, value in flags.items()],
        "plays": [
            {
                "name": play.name,
                "settings": dict(play.flags),
                "figures": _plain(play.figures),
                "curves": play.curves._asdict(),
            }
            for play in plays
        ],
        "not_played": list(notes),
    }


def _plain(figures: Figures) -> dict[str, Any]:
    return figures._asdict() | {
        "addons": [addon._asdict() for addon in figures.addons],
        "schedules": [schedule._asdict() for schedule in figures.schedules],
        "everything": figures.everything._asdict(),
    }


def _show(session: CliSession, plays: Sequence[_Play], notes: Sequence[str]) -> None:
    if len(plays) > 2:
        _show_many(session, plays)
    else:
        _show_two(session, plays[0].figures, plays[1].figures if len(plays) == 2 else None)
    for note in notes:
        session.console.print(note, markup=False, highlight=False)


def _show_many(session: CliSession, plays: Sequence[_Play]) -> None:
    columns = [
        Column("settings"), Column("wait p50", True), Column("wait p95", True), Column("longest", True, 80),
        Column("late", True, 60), Column("refused", True, 90), Column("stuck", True, 100),
        Column("units used", True), Column("lasted", True, 70),
    ]  # fmt: skip
    rows = [
        (
            name, span(all_.wait_p50), span(all_.wait_p95), span(all_.wait_max), all_.late, all_.refused,
            all_.stuck, f"{figures.used:.0%}", span(figures.lasted_sec),
        )
        for name, _, figures, _ in plays
        for all_ in [figures.everything]
    ]  # fmt: skip
    table(session.console, columns, rows)


def _both(show_value: Callable[[Any], str], one: Any, other: Any) -> str:
    """The value; with an arrow to the new value if it changes."""
    old, new = show_value(one), None if other is None else show_value(other)
    return old if new is None or new == old else f"{old} \N{RIGHTWARDS ARROW} {new}"


def _show_schedules(session: CliSession, before: Figures, after: Figures | None) -> None:
    columns = [
        Column("schedule"), Column("submitted", True), Column("skipped", True), Column("missed", True),
    ]  # fmt: skip
    new = {} if after is None else {each.name: each for each in after.schedules}
    rows = [
        (
            one.name, _both(lambda f: str(f.submitted), one, new.get(one.name)),
            _both(lambda f: str(f.skipped), one, new.get(one.name)),
            _both(lambda f: str(f.missed), one, new.get(one.name)),
        )
        for one in before.schedules
    ]  # fmt: skip
    if rows:
        table(session.console, columns, rows)


def _show_two(session: CliSession, before: Figures, after: Figures | None) -> None:
    columns = [
        Column("addon"), Column("jobs", True), Column("wait p50", True, 60), Column("wait p95", True),
        Column("longest", True, 90), Column("share", True, 70), Column("late", True),
        Column("refused", True, 80), Column("stuck", True, 110),
    ]  # fmt: skip
    old = [*before.addons, before.everything]
    new = [None] * len(old) if after is None else [*after.addons, after.everything]
    rows = [
        (
            one.addon_id, _both(lambda f: str(f.jobs), one, other), _both(lambda f: span(f.wait_p50), one, other),
            _both(lambda f: span(f.wait_p95), one, other), _both(lambda f: span(f.wait_max), one, other),
            _both(lambda f: f"{f.share:.0%}", one, other), _both(lambda f: str(f.late), one, other),
            _both(lambda f: str(f.refused), one, other), _both(lambda f: str(f.stuck), one, other),
        )
        for one, other in zip(old, new, strict=True)
    ]  # fmt: skip
    table(session.console, columns, rows)
    _show_schedules(session, before, after)
    used = _both(lambda f: f"{f.used:.0%}", before, after)
    lasted = _both(lambda f: span(f.lasted_sec), before, after)
    stuck = before.everything.stuck or (after is not None and after.everything.stuck)
    ended = "The last job that ended did so" if stuck else "All jobs ended"
    session.console.print(f"{ended} after {lasted}; {used} of the units were in use.")


def _plot(session: CliSession, plays: Sequence[_Play]) -> None:
    from penstock.simulation.plots import INSTALL, in_terminal

    try:
        console = session.console
        picture = in_terminal(
            {play.name: play.curves for play in plays}, width=console.width, colors=console.is_terminal
        )
    except ImportError:
        fail(f"--plot needs plotext: {INSTALL}")
    click.echo(picture)


def _draw(file: Path, plays: Sequence[_Play]) -> None:
    from penstock.simulation.plots import INSTALL, as_svg

    try:
        as_svg({play.name: play.curves for play in plays}, file)
    except ImportError:
        fail(f"--svg needs matplotlib: {INSTALL}")
    except OSError as error:
        fail(f"--svg: {file} cannot be written: {error.strerror}")
