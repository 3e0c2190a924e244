"""`penstock service`: the daemon as a service of systemd, for this user or for the machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

import click

from penstock.cli.printing import echo
from penstock.cli.session import UNREACHABLE, CliSession, fail, passes

UNIT: Final = "penstock.service"
#: The Python in the shipped units, replaced by the one that runs `penstock`.
_PYTHON: Final = "/opt/penstock/bin/python"
_ACCOUNT: Final = 'u penstock - "Penstock" /var/lib/penstock -\n'


@dataclass
class ServiceStep:
    """One step of install or remove. `text`: the sentence or command line to print."""

    text: str
    act: Callable[[], None]


@dataclass
class UnitPlace:
    """
    The place of a unit and its systemd. `root`: the top directory of another system, which does not run.
    """

    system: bool
    root: Path | None = None

    @property
    def folder(self) -> Path:
        if self.system:
            return Path(self.root or "/") / "etc/systemd/system"
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"

    @property
    def unit(self) -> Path:
        return self.folder / UNIT

    @property
    def drop_in(self) -> Path:
        return self.folder / f"{UNIT}.d" / "users.conf"

    @property
    def account(self) -> Path:
        return Path(self.root or "/") / "etc/sysusers.d/penstock.conf"

    def systemctl(self, *words: str) -> list[str]:
        if self.root is not None:
            return ["systemctl", f"--root={self.root}", *words]
        return ["systemctl", *(() if self.system else ("--user",)), *words]

    def text(self) -> str:
        shipped = "penstock.service" if self.system else "penstock.user.service"
        return _shipped(shipped).replace(_PYTHON, sys.executable)


def _shipped(name: str) -> str:
    return (files("penstock.cli") / "units" / name).read_text("utf-8")


@click.group()
def service() -> None:
    """Run the scheduler as a service of systemd: install, status, remove."""


_SYSTEM = click.option(
    "--system",
    is_flag=True,
    help="The service of the whole machine, with a user of its own; install and remove need root.",
)
_DRY = click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
_ROOT = click.option(
    "--root", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="With --system: the top directory of another system, such as an image. Nothing is started.",
)  # fmt: skip


@service.command()
@_SYSTEM
@click.option("--users", is_flag=True, help="With --system: let runner.users run jobs as other users.")
@_ROOT
@_DRY
@passes
def install(session: CliSession, system: bool, users: bool, root: Path | None, dry_run: bool) -> None:
    """
    Write the unit for this installation of Penstock, and start it. An existing unit is replaced.
    """
    place = _place(system=system, root=root, dry_run=dry_run)
    if users and not system:
        raise click.UsageError("--users needs --system: a user's own service cannot become another user")
    _check_python(place)
    steps = list(_install_steps(place, users=users))
    if dry_run and not session.as_json:
        echo(f"# {place.unit}\n{place.text()}")
    _carry_out(session, steps, dry_run=dry_run)


def _install_steps(place: UnitPlace, *, users: bool) -> Iterator[ServiceStep]:
    if place.system:
        yield _write(place.account, _ACCOUNT)
        if place.root is None:
            yield _run(["systemd-sysusers", str(place.account)])
    yield _write(place.unit, place.text())
    if users:
        yield _write(place.drop_in, _shipped("users.conf"))
    elif place.drop_in.exists():
        yield _delete(place.drop_in)
    if place.root is None:
        yield _run(place.systemctl("daemon-reload"))
        yield _run(place.systemctl("enable", UNIT))
        yield _run(place.systemctl("restart", UNIT))
    else:
        yield _run(place.systemctl("enable", UNIT))


@service.command()
@_SYSTEM
@passes
def status(session: CliSession, system: bool) -> None:
    """
    Show whether the service is installed, enabled and running. Exits with 3 if it does not run.
    """
    place = UnitPlace(system=system)
    installed = place.unit.exists()
    answer = {
        "unit": str(place.unit),
        "installed": installed,
        "current": installed and place.unit.read_text("utf-8") == place.text(),
        "enabled": installed and _systemctl_confirms(place, "is-enabled"),
        "active": installed and _systemctl_confirms(place, "is-active"),
    }
    if not session.print_json(answer):
        echo("\n".join(_sentences(place, answer)))
    raise click.exceptions.Exit(0 if answer["active"] else UNREACHABLE)


def _sentences(place: UnitPlace, answer: dict[str, object]) -> Iterator[str]:
    option = " --system" if place.system else ""
    if not answer["installed"]:
        yield f"not installed: {place.unit} does not exist. `penstock service install{option}` writes it."
        return
    yield f"installed: {place.unit}"
    if not answer["current"]:
        yield f"  it differs from what `penstock service install{option}` would write now"
    yield "starts by itself" if answer["enabled"] else "does not start by itself"
    yield (
        "runs"
        if answer["active"]
        else f"does not run: {shlex.join(place.systemctl('status', UNIT))} says why"
    )


@service.command()
@_SYSTEM
@_ROOT
@_DRY
@passes
def remove(session: CliSession, system: bool, root: Path | None, dry_run: bool) -> None:
    """Stop the service and delete its unit. Data and settings stay."""
    place = _place(system=system, root=root, dry_run=dry_run)
    if not place.unit.exists():
        fail(f"{place.unit} does not exist, so there is nothing to remove")
    _carry_out(session, list(_remove_steps(place)), dry_run=dry_run)
    if not session.as_json:
        data = "/var/lib/penstock" if place.system else "the data_dir that `penstock settings` names"
        echo(f"kept  jobs and tokens in {data}")


def _remove_steps(place: UnitPlace) -> Iterator[ServiceStep]:
    if place.root is None:
        yield _run(place.systemctl("disable", "--now", UNIT))
    else:
        yield _run(place.systemctl("disable", UNIT))
    yield _delete(place.unit)
    if place.drop_in.exists():
        yield _delete(place.drop_in)
    if place.root is None:
        yield _run(place.systemctl("daemon-reload"))


def _place(*, system: bool, root: Path | None, dry_run: bool) -> UnitPlace:
    if root is not None and not system:
        raise click.UsageError("--root needs --system")
    if system and root is None and not dry_run and os.geteuid() != 0:
        fail("a service of the machine needs root: sudo penstock service ... --system")
    if not dry_run and shutil.which("systemctl") is None:
        fail("this machine has no systemd: start `penstock up` with the service manager that it has")
    return UnitPlace(system, root.absolute() if root else None)


def _check_python(place: UnitPlace) -> None:
    """Refuse an installation in a home directory: the unit hides those from the service."""
    if place.system and Path(sys.executable).is_relative_to(Path.home()) and Path.home() != Path("/"):
        fix = "python3 -m venv /opt/penstock && /opt/penstock/bin/pip install 'penstock[jobs]'"
        fail(
            f"{sys.executable} is in a home directory, which the service cannot read. Install it elsewhere: {fix}"
        )


def _carry_out(session: CliSession, steps: list[ServiceStep], *, dry_run: bool) -> None:
    for step in steps:
        if not session.as_json:
            echo(f"{'would ' if dry_run else ''}{step.text}")
        if not dry_run:
            step.act()
    session.print_json({"dry_run": dry_run, "steps": [step.text for step in steps]})


def _write(path: Path, text: str) -> ServiceStep:
    def act() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    return ServiceStep(f"write {path}", act)


def _delete(path: Path) -> ServiceStep:
    return ServiceStep(f"delete {path}", path.unlink)


def _run(command: list[str]) -> ServiceStep:
    def act() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
        if done.returncode:
            fail(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip() or done.returncode}")

    return ServiceStep(f"run {shlex.join(command)}", act)


def _systemctl_confirms(place: UnitPlace, question: str) -> bool:
    if shutil.which("systemctl") is None:
        return False
    command = place.systemctl("--quiet", question, UNIT)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - our own words
