"""Who dispatches: names that only one bears, silence that is noticed, and a drain that lasts."""

from __future__ import annotations

import pytest

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Host, QuietState
from penstock.core.jobs.types import SECOND
from penstock.stores.api import LOST_FOR, DrainHost, RegisterHost, RemoveHost, committed


def host(yard, name="here", instance="first", lasts=30, **more):
    return Host(
        host=name,
        instance=instance,
        started_at=yard.now,
        seen_at=yard.now,
        until=yard.now + lasts * SECOND,
        **more,
    )


def names(yard):
    return [known.host for known in yard.store.hosts()]


def test_a_host_is_listed_with_what_it_said_and_what_it_holds(yard):
    told = host(
        yard, capacity=40, quiet=QuietState.BUSY, labels=("gpu", "zone=a"), version="1.2", url="http://h"
    )
    committed(yard.store, RegisterHost(told))
    yard.start(cost_units=7)

    [known] = yard.store.hosts()
    assert (told.labels, 40, QuietState.BUSY, "1.2", "http://h", 7) == (
        known.labels, known.capacity, known.quiet, known.version, known.url, known.units,
    )  # fmt: skip
    assert known.alive(yard.now)


def test_a_host_that_is_silent_is_lost_and_later_forgotten(yard):
    committed(yard.store, RegisterHost(host(yard)))
    yard.later(30)
    lost = [known.alive(yard.now) for known in yard.store.hosts()]
    yard.later(LOST_FOR / SECOND + 1)
    committed(yard.store, RegisterHost(host(yard, "there")))

    assert [False] == lost
    assert ["there"] == names(yard)


def test_a_name_is_refused_while_another_that_bears_it_lives(yard):
    committed(yard.store, RegisterHost(host(yard)))

    with pytest.raises(DispatcherHeld, match="called here too"):
        committed(yard.store, RegisterHost(host(yard, instance="second")))
    committed(yard.store, RegisterHost(host(yard)))
    yard.later(30)
    committed(yard.store, RegisterHost(host(yard, instance="second")))

    assert ["second"] == [known.instance for known in yard.store.hosts()]


def test_who_leaves_is_gone_and_only_its_bearer_can_give_a_name_back(yard):
    committed(yard.store, RegisterHost(host(yard)))

    committed(yard.store, RemoveHost("here", "second"))
    before = names(yard)
    committed(yard.store, RemoveHost("here", "first"))

    assert (["here"], []) == (before, names(yard))


def test_a_drain_outlives_beats_ends_and_silence(yard):
    committed(yard.store, RegisterHost(host(yard)))

    drained = committed(yard.store, DrainHost("here", True))
    beat = committed(yard.store, RegisterHost(host(yard)))
    committed(yard.store, RemoveHost("here", "first"))
    left = yard.store.hosts()
    yard.later(2 * LOST_FOR / SECOND)
    back = committed(yard.store, RegisterHost(host(yard, instance="second")))

    assert drained
    assert beat.draining
    assert [(True, False)] == [(known.draining, known.alive(yard.now)) for known in left]
    assert back.draining


def test_an_undrained_host_may_start_jobs_again_and_both_are_in_the_trail(yard):
    committed(yard.store, RegisterHost(host(yard)))
    committed(yard.store, DrainHost("here", True))
    committed(yard.store, DrainHost("here", False))

    told = [event.data for event in yard.store.events(0, 10) if event.kind is EventKind.HOST_SET]
    assert [{"host": "here", "draining": True}, {"host": "here", "draining": False}] == told
    assert not committed(yard.store, RegisterHost(host(yard))).draining


def test_a_host_that_nobody_knows_cannot_be_drained(yard):
    assert not committed(yard.store, DrainHost("nowhere", True))
    assert [] == yard.store.events(0, 10)
