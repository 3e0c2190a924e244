"""
Hosts of one database leave a job to the host where a worker for it is present (SPEC OR-7). Two schedulers, each with
a connection of its own, on one virtual clock.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest
from msgspec.structs import replace
from tests.scheduler.conftest import ManualClock, SchedulerKit
from tests.waiting import LONG, until

from penstock import Scheduler
from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Caps
from penstock.core.jobs.load import Capacity, Host
from penstock.core.jobs.types import SECOND
from penstock.core.jobs.workers import WorkerKinds, hosts_with_worker
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.hosts import HostRegistration, Introduction
from penstock.scheduler.job_service import YieldRequests
from penstock.scheduler.preemption import Preempter
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.postgres.store import PostgresStore

T, ONLY_B = WorkerKinds(job_types=frozenset({"t"})), WorkerKinds("b")


class HostKit(SchedulerKit):
    """A daemon, or with `embeds` a program that runs its own functions and reserves nothing."""

    def __init__(self, store, clock, rules, *, embeds=False):
        super().__init__(store, clock, rules)
        self.embeds = embeds
        if embeds:
            self.pulling_workers.came(WorkerKinds(own=True), FOR_EVER)
        self.registration = HostRegistration(
            store, rules, self.machine, Introduction(rules.host), workers=self.pulling_workers.registered
        )
        self.registration.join()
        self.dispatcher.begin()

    def step(self):
        self.registration.step(self.now)
        self.maintenance.step(self.now)
        if not self.embeds:
            self.dispatcher.step(self.now)

    def claim(self, kinds=T, limit=1, worker="w"):
        return [granted.job.job_id for granted in self.job_service.claim(kinds, limit, worker)]

    def reserved(self):
        return [d.job_id for d in self.job_service.dispatchable() if d.host == self.rules.host]


@pytest.fixture
def hosts(postgres_emptied):
    """A function that starts a host."""
    place, clock, stores = postgres_emptied(), ManualClock(), []

    def start(name, **options):
        stores.append(PostgresStore(place.dsn, clock, schema=place.schema))
        rules = SchedulerRules(
            host=name,
            capacity=Capacity(fixed=90),
            labels=options.pop("labels", ()),
            limits=AdmissionLimits(Caps(concurrent=options.pop("concurrent", None))),
        )
        return HostKit(stores[-1], clock, rules, **options)

    yield start
    problems = stores[-1].audit()
    for store in stores:
        store.close()
    assert problems == []


@pytest.fixture
def program(hosts):
    """A program with the function `t`, which registered it."""
    program = hosts("program", embeds=True)
    assert program.claim() == []
    program.step()
    return program


@pytest.fixture
def daemon(hosts):
    return hosts("daemon")


def test_a_daemon_leaves_the_jobs_of_a_program_to_the_program(program, daemon):
    jobs = program.submit(3)
    daemon.step()

    assert daemon.reserved() == []
    assert program.claim(limit=3) == jobs


def test_a_daemon_that_knew_no_other_worker_looks_again_before_it_reserves(hosts, daemon):
    [before] = daemon.submit()
    daemon.step()
    daemon.job_service.cancel(before)
    program = hosts("program", embeds=True)
    program.claim()
    program.step()
    [job] = program.submit()
    daemon.step()  # within the same tick

    assert daemon.reserved() == []
    assert program.claim() == [job]


def test_a_worker_that_pulls_from_one_daemon_keeps_its_jobs_from_the_other(hosts, daemon):
    other = hosts("other")
    other.claim()
    other.step()
    [job] = daemon.submit()
    daemon.step()
    other.step()

    assert daemon.reserved() == other.reserved() == []
    assert other.claim() == [job]


def test_jobs_wait_for_a_program_whose_workers_are_full(program, daemon):
    running, waiting = program.submit(2)
    assert program.claim() == [running]
    for _ in range(60):
        program.later(2)
        program.job_service.heartbeat(program.store.job(running).dispatch_id)
        program.step()
        daemon.step()
        assert daemon.reserved() == []
    program.job_service.end(program.store.job(running).dispatch_id)

    assert program.claim() == [waiting]
    assert program.kinds(waiting) == ["SUBMITTED", "DISPATCHING", "RUNNING"]


def test_a_reservation_is_given_back_when_a_worker_comes_to_another_host(hosts, daemon):
    [job] = daemon.submit()
    daemon.step()
    assert daemon.reserved() == [job]
    program = hosts("program", embeds=True)
    program.claim()
    program.step()
    daemon.later(2)
    daemon.step()

    assert daemon.reserved() == []
    assert program.claim() == [job]
    assert program.store.job(job).counters.start == 0  # it was no start timeout


def test_a_daemon_keeps_its_reservations_for_the_two_step_workers_that_it_has(program, daemon):
    daemon.job_service.offer_to(T)
    [job] = program.submit()
    daemon.step()

    assert daemon.reserved() == [job]


def test_the_first_poll_of_a_two_step_worker_reserves_what_was_left_to_another_host(program, daemon):
    [job] = program.submit()
    daemon.step()

    assert [dispatch.job_id for dispatch in daemon.job_service.poll(T)] == [job]


def test_a_program_that_is_gone_leaves_its_jobs_to_the_daemon(program, daemon):
    [job] = program.submit()
    daemon.later(31)
    daemon.step()

    assert daemon.reserved() == [job]


def test_a_daemon_keeps_no_units_for_a_job_of_another_host(program, daemon):
    daemon.pulling_workers.polled(ONLY_B, until=FOR_EVER)
    daemon.submit(addon_id="b", cost_units=50)
    daemon.step()
    [large] = program.submit(cost_units=90, priority=95)
    for _ in range(20):
        daemon.later(2)
        program.pulling_workers.came(T, program.now + 30 * SECOND)  # it is there, and takes nothing
        program.step()
        daemon.step()
    [small] = daemon.submit(addon_id="b", cost_units=40)
    daemon.step()

    assert small in daemon.reserved()
    assert program.state(large) == "QUEUED"
    assert daemon.kinds(large) == ["SUBMITTED"]  # the daemon refuses it nothing


def test_a_daemon_asks_no_run_to_yield_to_a_job_of_another_host(program, daemon):
    daemon.pulling_workers.polled(ONLY_B, until=FOR_EVER)
    [low] = daemon.submit(addon_id="b", cost_units=90, priority=10)
    daemon.step()
    daemon.job_service.lease(low)
    program.submit(cost_units=90, priority=95)
    preempter = Preempter(daemon.store, daemon.rules, daemon.dispatcher, daemon.job_service, YieldRequests())
    preempter.step(daemon.now)

    assert preempter.cycle is None


def test_a_job_of_another_host_keeps_no_standalone_lease_waiting(program, daemon):
    program.submit(cost_units=90, priority=95)
    granted, reason = daemon.job_service.ask(AdmissionClass("b", "t", 10), 50)

    assert granted is not None
    assert reason is None


def test_explain_names_the_host_that_has_the_worker(program, daemon):
    [job, other] = program.submit(2)
    assert program.claim() == [job]
    daemon.step()

    explanation = daemon.job_service.explain(other)
    assert explanation.text == (
        "Waiting for 0 s. Its worker is on host program, which runs 1 such job; this host has none for it. "
        "Host program could run it."
    )
    assert explanation.reason == "worker_elsewhere"


def test_a_host_whose_workers_are_known_is_not_read_in_every_round(program, daemon, monkeypatch):
    program.submit(3)
    read, hosts = [], daemon.store.hosts
    monkeypatch.setattr(daemon.store, "hosts", lambda: read.append(1) or hosts())
    for _ in range(10):
        daemon.dispatcher.step(daemon.now)

    assert len(read) <= 1


def test_rounds_over_jobs_of_own_workers_read_no_hosts(program, daemon, monkeypatch):
    monkeypatch.setattr(daemon.store, "hosts", None)
    jobs = daemon.submit(3, addon_id="b")

    assert daemon.claim(ONLY_B, 3) == jobs


def test_a_new_kind_of_worker_is_registered_before_the_registration_is_due(hosts):
    host = hosts("program", embeds=True)
    host.step()
    assert host.store.hosts()[0].workers == ()

    woken = []
    host.pulling_workers.on_new = lambda: woken.append(1)
    host.claim()
    host.claim()
    host.step()

    assert woken == [1]
    assert host.store.hosts()[0].workers == (T,)


# what holds across hosts


def test_shares_hold_across_hosts(hosts):
    """Addon a holds units on one host. Of equal jobs on another host, those of b start until both hold the same."""
    one, two = hosts("one"), hosts("two")
    one.submit(20, cost_units=1)
    assert len(one.claim(limit=20)) == 20
    two.submit(20, cost_units=1)
    of_b = two.submit(20, addon_id="b", cost_units=1)

    assert sorted(two.claim(limit=20)) == sorted(of_b)


# the rule alone

WITH_T = Host(host="b", instance="b", until=100, workers=(T,))
JOB = AdmissionClass("a", "t", 10)


@pytest.mark.parametrize(
    ("host", "job", "now", "there"),
    [
        (WITH_T, JOB, 50, True),
        (WITH_T, JOB, 100, False),  # its registration is over
        (replace(WITH_T, host="a"), JOB, 50, False),  # this host itself
        (replace(WITH_T, workers=(ONLY_B,)), JOB, 50, False),
        (replace(WITH_T, draining=True), JOB, 50, True),  # its workers are there, and wait for it
        (WITH_T, replace(JOB, labels=("gpu",)), 50, False),
        (replace(WITH_T, labels=("gpu",)), replace(JOB, labels=("gpu",)), 50, True),
        (replace(WITH_T, workers=(WorkerKinds(),)), replace(JOB, job_type="penstock.shell"), 50, False),
        (
            replace(WITH_T, workers=(WorkerKinds(own=True),)),
            replace(JOB, job_type="penstock.shell"),
            50,
            True,
        ),
    ],
)
def test_which_hosts_have_a_worker_for_a_job(host, job, now, there):
    assert hosts_with_worker([host], "a", job, now) == ((host.host,) if there else ())


# real schedulers


def test_a_program_runs_its_jobs_beside_a_daemon_that_reserves_none_of_them(postgres_server):
    with closing(PostgresStore(postgres_server.dsn)) as store, Scheduler(postgres_server.dsn) as scheduler:
        add = scheduler.job(lambda a, b: a + b, name="add")
        assert add.enqueue(1, 1).result(LONG) == 2  # its host has registered the function, or does so next
        until(lambda: [host for host in store.hosts() if host.alive(store.now()) and host.workers])
        service = SchedulerService(store, SchedulerRules(host="daemon", capacity=Capacity(fixed=90))).start()
        try:
            before = store.newest()
            jobs = [add.enqueue(n, 1) for n in range(40)]
            assert [job.result(LONG) for job in jobs] == [n + 1 for n in range(40)]
        finally:
            service.stop()

        kinds = Counter(str(event.kind) for event in store.events(before, 10_000) if event.job_id is not None)
        del kinds["DENIED"]
        assert kinds == {"SUBMITTED": 40, "DISPATCHING": 40, "RUNNING": 40, "DONE": 40}


def denials(kit, job_id):
    return [event.reason for event in kit.store.events(0, 1_000, job_id) if event.kind == "DENIED"]


def test_hosts_that_refuse_a_job_for_different_reasons_record_each_reason_once(hosts):
    """Each record wakes the other hosts. They would write some twenty events in a second for each waiting job."""
    full, other = hosts("full"), hosts("other", concurrent=1)
    for kit in (full, other):
        kit.pulling_workers.polled(T, until=FOR_EVER)
        kit.step()
    for kit in (full, other):
        kit.submit(cost_units=90)
        kit.step()
    job, *_ = full.submit(cost_units=90)
    for _ in range(5):
        other.step()
        full.step()
    assert denials(full, job) == ["cap_reached", "no_room"]

    full.job_service.pause()
    for _ in range(5):
        full.step()
        other.step()
    assert denials(full, job) == ["cap_reached", "no_room", "paused"]


def test_a_host_that_drains_replaces_no_reason_of_another_host(hosts):
    full, drained = hosts("full"), hosts("drained")
    for kit in (full, drained):
        kit.pulling_workers.polled(T, until=FOR_EVER)
        kit.step()
    full.submit(cost_units=90)
    full.step()
    [job] = full.submit(cost_units=90)
    drained.machine.draining = True
    full.step()
    drained.step()

    assert denials(full, job) == ["no_room"]
    assert full.store.job(job).denied == "no_room"


def test_every_host_explains_that_an_attempt_is_asked_to_yield(hosts):
    first, other = hosts("first"), hosts("other")
    [low] = first.submit(cost_units=90, priority=10)
    assert first.claim() == [low]
    [high] = first.submit(cost_units=90, priority=95)
    preempter = Preempter(first.store, first.rules, first.dispatcher, first.job_service, YieldRequests())
    preempter.step(first.now)
    first.job_service.explainer.preemption = lambda: preempter.cycle

    explanations = [kit.job_service.explain(low) for kit in (first, other)]
    assert [explanation.reason for explanation in explanations] == ["asked_to_yield"] * 2
    assert explanations[0].preemption == explanations[1].preemption
    assert explanations[1].preemption.wanted_by == high
