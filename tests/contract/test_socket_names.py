"""Another user of the machine can bind any abstract name that it can guess, or has seen: it must gain nothing by that."""

from __future__ import annotations

import socket
import stat

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND, AddonId
from penstock.stores.api import Depth, Submit, committed
from penstock.stores.sqlite.store import SqliteStore
from penstock.stores.sqlite.wakeups import SocketNames, present

JOB = Intent(addon_id=AddonId("a"), job_type="t")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


@pytest.fixture
def opened(path):
    stores = []

    def open_one():
        stores.append(SqliteStore(path, lambda: 1_900_000_000 * SECOND))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def squat():
    sockets = []

    def take(name, kind=socket.SOCK_DGRAM):
        sockets.append(socket.socket(socket.AF_UNIX, kind))
        sockets[-1].bind(name)

    yield take
    for each in sockets:
        each.close()


def test_the_names_of_two_files_in_the_same_place_differ(opened, path):
    opened().acquire_dispatch("one")
    names = SocketNames(path)

    path.with_name(path.name + "-sockets").unlink()
    others = SocketNames(path)
    others.make()

    assert {names.wakeups, names.relay} & {others.wakeups, others.relay} == set()


def test_only_the_owner_can_read_the_secret(opened, path):
    opened().acquire_dispatch("one")

    assert stat.S_IMODE(path.with_name(path.name + "-sockets").stat().st_mode) == 0o600


def test_a_dispatcher_starts_though_its_name_was_taken(opened, path, squat):
    first = opened()
    first.acquire_dispatch("one")
    taken = SocketNames(path).wakeups
    first.release_dispatch()
    squat(taken)

    first.acquire_dispatch("two")

    assert SocketNames(path).wakeups != taken
    assert present(path)


def test_a_program_finds_the_dispatcher_under_its_new_name(opened, path, squat):
    first, second = opened(), opened()
    first.acquire_dispatch("one")
    squat_at = SocketNames(path).wakeups
    first.release_dispatch()
    squat(squat_at)
    first.acquire_dispatch("two")
    second._names._look_at = 0.0  # a second later

    assert second._names.wakeups == SocketNames(path).wakeups
    assert committed(second, Submit([JOB], Depth()))[0].created


def test_a_program_that_came_first_finds_the_dispatcher_at_once(opened, path):
    program, dispatcher = opened(), opened()
    committed(program, Submit([JOB], Depth()))
    assert not program._names.in_use

    dispatcher.acquire_dispatch("one")

    assert program._names.in_use
    assert program._names.wakeups == SocketNames(path).wakeups


def test_the_first_secret_counts_for_all_that_make_one_at_once(path):
    path.touch()
    one, two = SocketNames(path), SocketNames(path)
    one.make()
    two.make()

    assert one.relay == two.relay


def test_a_file_that_was_replaced_has_another_relay(path):
    path.touch()
    one = SocketNames(path)
    one.make()
    before = one.relay
    path.rename(path.with_name("old.db"))
    path.touch()

    assert SocketNames(path).relay != before
