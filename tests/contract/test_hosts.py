"""Who dispatches: names that only one bears, silence that is noticed, and a drain that lasts."""

from __future__ import annotations

import pytest

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Host, QuietState
from penstock.core.jobs.types import SECOND
from penstock.stores.api import LOST_FOR, DrainHost, RegisterHost, RemoveHost, committed


def host(kit, name="here", instance="first", lasts=30, **more):
    return Host(
        host=name,
        instance=instance,
        started_at=kit.now,
        seen_at=kit.now,
        until=kit.now + lasts * SECOND,
        **more,
    )


def names(kit):
    return [known.host for known in kit.store.hosts()]


def test_a_host_is_listed_with_what_it_said_and_what_it_holds(kit):
    told = host(
        kit, capacity=40, quiet=QuietState.BUSY, labels=("gpu", "zone=a"), version="1.2", url="http://h"
    )
    committed(kit.store, RegisterHost(told))
    kit.start(cost_units=7)

    [known] = kit.store.hosts()
    assert (told.labels, 40, QuietState.BUSY, "1.2", "http://h", 7) == (
        known.labels, known.capacity, known.quiet, known.version, known.url, known.units,
    )  # fmt: skip
    assert known.alive(kit.now)


def test_a_host_that_is_silent_is_lost_and_later_forgotten(kit):
    committed(kit.store, RegisterHost(host(kit)))
    kit.later(30)
    lost = [known.alive(kit.now) for known in kit.store.hosts()]
    kit.later(LOST_FOR / SECOND + 1)
    committed(kit.store, RegisterHost(host(kit, "there")))

    assert [False] == lost
    assert ["there"] == names(kit)


def test_a_name_is_refused_while_another_that_bears_it_lives(kit):
    committed(kit.store, RegisterHost(host(kit)))

    with pytest.raises(DispatcherHeld, match="has the name here"):
        committed(kit.store, RegisterHost(host(kit, instance="second")))
    committed(kit.store, RegisterHost(host(kit)))
    kit.later(30)
    committed(kit.store, RegisterHost(host(kit, instance="second")))

    assert ["second"] == [known.instance for known in kit.store.hosts()]


def test_who_leaves_is_gone_and_only_its_bearer_can_give_a_name_back(kit):
    committed(kit.store, RegisterHost(host(kit)))

    committed(kit.store, RemoveHost("here", "second"))
    before = names(kit)
    committed(kit.store, RemoveHost("here", "first"))

    assert (["here"], []) == (before, names(kit))


def test_a_drain_outlives_beats_ends_and_silence(kit):
    committed(kit.store, RegisterHost(host(kit)))

    drained = committed(kit.store, DrainHost("here", True))
    beat = committed(kit.store, RegisterHost(host(kit)))
    committed(kit.store, RemoveHost("here", "first"))
    left = kit.store.hosts()
    kit.later(2 * LOST_FOR / SECOND)
    back = committed(kit.store, RegisterHost(host(kit, instance="second")))

    assert drained
    assert beat.draining
    assert [(True, False)] == [(known.draining, known.alive(kit.now)) for known in left]
    assert back.draining


def test_an_undrained_host_may_start_jobs_again_and_both_are_in_the_trail(kit):
    committed(kit.store, RegisterHost(host(kit)))
    committed(kit.store, DrainHost("here", True))
    committed(kit.store, DrainHost("here", False))

    told = [event.data for event in kit.store.events(0, 10) if event.kind is EventKind.HOST_SET]
    assert [{"host": "here", "draining": True}, {"host": "here", "draining": False}] == told
    assert not committed(kit.store, RegisterHost(host(kit))).draining


def test_a_host_that_nobody_knows_cannot_be_drained(kit):
    assert not committed(kit.store, DrainHost("nowhere", True))
    assert [] == kit.store.events(0, 10)
