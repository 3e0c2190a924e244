"""
The memory store beside a file, and beside a server, driven through the same random life: they must agree on everything, always.

What either computes from rows the other keeps as a sum, so a sum that drifts, a move one of them forgets or an order that differs shows at once.
"""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from penstock.core.errors import PenstockError
from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionLimits, Caps, Conditions
from penstock.core.jobs.dependencies import Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, run_round
from penstock.core.jobs.states import DispatchPhase, JobState, Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import (
    Admit,
    Apply,
    Complete,
    CompletedDispatch,
    Depth,
    Due,
    Prune,
    Query,
    Renew,
    SetAddon,
    Submit,
    Terms,
    committed,
)
from penstock.stores.memory.store import MemoryStore
from penstock.stores.sqlite.store import SqliteStore

ORDERING, SCHEDULES = Ordering(), Schedules()
RULES = {"schedules": SCHEDULES, "ordering": ORDERING}
ENDS = [
    EndReason.COMPLETED,
    EndReason.JOB_ERROR,
    EndReason.WORKER_CRASHED,
    EndReason.UNAVAILABLE,
    EndReason.GRACEFUL_SHUTDOWN,
    EndReason.COST_LIMIT_REACHED,
]
FIELDS = st.fixed_dictionaries(
    {
        "addon_id": st.sampled_from("ab"),
        "job_type": st.sampled_from("xy"),
        "cost_units": st.sampled_from([5, 20, 60]),
        "priority": st.sampled_from([1, 50, 80]),
    },
    optional={
        "expected_duration_sec": st.sampled_from([1, 100]),
        "idempotency_key": st.sampled_from(["k", "l"]),
        "retry_delays_sec": st.just((1, 60)),
        "max_runtime_sec": st.just(40),
        "max_active_sec": st.just(70),
        "cost_limit": st.just(500),
    },
)


#: A parent in the same submit.
FIRST = {"addon_id": "a", "job_type": "t", "cost_units": 5}


class Twins(RuleBasedStateMachine):
    @initialize()
    def open(self):
        self.now = 1_900_000_000 * SECOND
        self.stores = [MemoryStore(lambda: self.now, new_id=self.ids()), self.other()]

    def other(self):
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-twins-"))
        return SqliteStore(self.folder / "jobs.db", lambda: self.now, new_id=self.ids())

    def ids(self):
        numbers = count(1)
        return lambda: f"id-{next(numbers):06}"

    def both(self, act):
        answers = []
        for store in self.stores:
            try:
                answers.append(act(store))
            except PenstockError as refusal:
                answers.append((type(refusal), str(refusal)))
        assert answers[0] == answers[1]
        return answers[0]

    @property
    def model(self):
        return self.stores[0]

    def some(self, data, items):
        return data.draw(st.sampled_from(items)) if items else None

    @rule(
        fields=FIELDS,
        start=st.sampled_from([None, 0, 50]),
        deadline=st.sampled_from([None, 30, 700]),
        n=st.integers(1, 3),
    )
    def submit(self, fields, start, deadline, n):
        times = {
            "earliest_start_at": None if start is None else self.now + start * SECOND,
            "deadline_at": None if deadline is None else self.now + deadline * SECOND,
            "time_sensitive": deadline == 700,
        }
        self.both(
            lambda store: committed(
                store, Submit([Intent(**fields, **times)] * n, Depth(total=12, per_addon=9))
            )
        )

    @rule(
        data=st.data(),
        fields=FIELDS,
        conditions=st.lists(st.sampled_from(ParentCondition), min_size=1, max_size=3),
        if_unmet=st.sampled_from(IfUnmet),
        n=st.integers(1, 3),
    )
    def submit_children(self, data, fields, conditions, if_unmet, n):
        """Of jobs that are there, of one that is not, and of each other."""
        known = [*[job.job_id for job in self.model.find(Query())][:8], "#0", "#1", "nothing"]
        names = data.draw(st.permutations(known))
        after = tuple(Dependency(*each) for each in zip(names, conditions, strict=False))
        intents = [Intent(**FIRST), *[Intent(**fields, after=after, if_unmet=if_unmet)] * n]
        self.both(lambda store: committed(store, Submit(intents, Depth(total=12, per_addon=9))))

    @rule(fields=FIELDS, n=st.integers(1, 3), capacity=st.sampled_from([0, 30, 90]), lease=st.booleans())
    def submit_to_somebody_idle(self, fields, n, capacity, lease):
        """A round in the commit of a submit decides as one behind it does."""
        intents, depth = [Intent(**fields)] * n, Depth(total=12, per_addon=9)
        offer = Placement.LEASE if lease else Placement.RESERVE

        def decide(admission_view):
            return run_round(
                RoundInputs(
                    admission_view, Conditions(capacity), AdmissionLimits(), ORDERING, lambda _: offer
                )
            )

        def act(store):
            submitted, admitted = store.commit(Submit(intents, depth), Admit("h", decide))
            grants = admitted.result()  # first: a refused submit raises, and the round may not be written yet
            return submitted.result(), grants

        self.both(act)

    @rule(
        capacity=st.sampled_from([0, 30, 90]),
        lease=st.booleans(),
        cap=st.sampled_from([None, 1, 3]),
        host=st.sampled_from(["h", "i"]),
    )
    def tick(self, capacity, lease, cap, host):
        offer = Placement.LEASE if lease else Placement.RESERVE

        def decide(admission_view):
            limits = AdmissionLimits(Caps(per_addon=cap))
            return run_round(
                RoundInputs(admission_view, Conditions(capacity), limits, ORDERING, lambda _: offer)
            )

        granted = self.both(
            lambda store: [
                grant.dispatch for grant in committed(store, Admit(host, decide, Terms(worker="w")))
            ]
        )
        assert not granted or self.model.ledger(host).units <= capacity

    @rule(seconds=st.sampled_from([0, 1, 29, 31, 400]))
    def wait(self, seconds):
        self.now += seconds * SECOND

    @rule(data=st.data(), how=st.sampled_from(ENDS), reported=st.booleans())
    def end(self, data, how, reported):
        dispatch = self.some(data, [d for d in self.model.live() if d.job_id])
        if dispatch is None:
            return
        job = self.model.job(dispatch.job_id)
        try:
            change = changes.end(job, dispatch, how, self.now, reported=reported, **RULES)
        except PenstockError:
            return
        self.both(lambda store: committed(store, Apply([change, change])))

    @rule(results=st.lists(st.sampled_from([None, "1", "[]"]), min_size=1, max_size=6))
    def complete_many(self, results):
        live = [d.dispatch_id for d in self.model.live()]
        done = [CompletedDispatch(name, result) for name, result in zip(live, results, strict=False)]
        self.both(lambda store: committed(store, Complete([*done, *done[:1]])))

    @rule(data=st.data())
    def start(self, data):
        dispatch = self.some(data, self.model.live(phases=[DispatchPhase.RESERVED]))
        if dispatch is not None:
            change = changes.start(self.model.job(dispatch.job_id), dispatch, self.now, ttl=30 * SECOND)
            self.both(lambda store: committed(store, Apply([change])))

    @rule(data=st.data())
    def cancel(self, data):
        job = self.some(data, self.model.find(Query()))
        if job is None:
            return
        dispatch = None if job.dispatch_id is None else self.model.dispatch(job.dispatch_id)
        try:
            change = changes.cancel(job, dispatch, self.now, grace=10 * SECOND, **RULES)
        except PenstockError:
            return
        if change is not None:
            self.both(lambda store: committed(store, Apply([change])))

    @rule(data=st.data(), priority=st.sampled_from([10, 99]))
    def retry_or_edit(self, data, priority):
        job = self.some(data, self.model.find(Query()))
        if job is None:
            return
        try:
            change = (
                changes.edit(job, replace(job.intent, priority=priority), self.now, ORDERING)
                if job.state is JobState.QUEUED
                else changes.retry(job, self.now, ORDERING)
            )
        except PenstockError:
            return
        self.both(lambda store: committed(store, Apply([change])))

    @rule(data=st.data(), spent=st.sampled_from([None, 100, 400]), checkpoint=st.sampled_from([None, "[1]"]))
    def beat(self, data, spent, checkpoint):
        dispatch = self.some(data, self.model.live())
        if dispatch is not None:
            until = self.now + 30 * SECOND
            beat = changes.Renewal(
                dispatch_id=dispatch.dispatch_id, expires_at=until, spent=spent, checkpoint=checkpoint
            )
            self.both(lambda store: committed(store, Renew([beat])))

    @rule()
    def keep(self):
        for due, job, dispatch in self.model.overdue(100):
            if due is Due.DEADLINE:
                change = changes.miss_deadline(job, self.now)
            elif due is Due.STOP:
                change = changes.stop(dispatch, job, dispatch.stop_for, self.now, grace=5 * SECOND)
            else:
                how = (
                    EndReason.START_TIMEOUT
                    if dispatch.phase is DispatchPhase.RESERVED
                    else EndReason.LEASE_EXPIRED
                )
                change = changes.end(job, dispatch, how, self.now, **RULES)
            self.both(lambda store: committed(store, Apply([change])))  # noqa: B023 - called at once

    @rule(seconds=st.sampled_from([5, 100]))
    def prune(self, seconds):
        self.both(lambda store: committed(store, Prune(self.now - seconds * SECOND, 2)))

    @rule(addon=st.sampled_from(["a", "b", "*"]), paused=st.booleans(), weight=st.sampled_from([None, 300]))
    def set_addon(self, addon, paused, weight):
        self.both(lambda store: committed(store, SetAddon(addon, paused=paused, weight=weight)))

    @invariant()
    def they_agree(self):
        if not hasattr(self, "stores"):
            return
        jobs = self.both(lambda store: store.find(Query(limit=1_000)))
        self.both(lambda store: store.live())
        self.both(lambda store: store.events(0, 10_000))
        self.both(lambda store: store.addons())
        self.alarms_agree()
        self.both(
            lambda store: sorted((str(o.due), str(o.job and o.job.job_id)) for o in store.overdue(1_000))
        )
        self.both(lambda store: (store.ledger("h").units, store.ledger("h").running, store.ledger("h").spent))
        for job in jobs:
            self.both(lambda store: (store.attempts(job.job_id), store.checkpoint(job.job_id)))  # noqa: B023
        assert self.both(lambda store: store.audit()) == []

    def alarms_agree(self):
        self.both(lambda store: store.alarm())

    def teardown(self):
        for store in getattr(self, "stores", []):
            store.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


class ServerTwins(Twins):
    place = None

    def alarms_agree(self):
        """A renewal does not move what a flight says of its leases: the server may ask to be looked at too soon, and never too late."""
        expected, found = (store.alarm() for store in self.stores)
        assert found == expected or self.now < found < expected

    def other(self):
        from penstock.stores.postgres.store import PostgresStore

        dsn, schema = self.place()
        return PostgresStore(dsn, lambda: self.now, schema=schema, new_id=self.ids())


@pytest.fixture
def twins_place(postgres_emptied):
    ServerTwins.place = staticmethod(postgres_emptied)


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.usefixtures("twins_place")
class TestServerTwins(ServerTwins.TestCase):
    settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
