"""Many runs that end in one commit: each on its own merits, and none of them read where its end follows from its lease."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from penstock.core.errors import NotFound, Refused, StaleDispatch, StoreFailed
from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.types import EndReason
from penstock.stores.api import Admit


def kinds(addon_id=None):
    from penstock.core.jobs.workers import WorkerKinds

    return WorkerKinds(addon_id)


def report(claimed, *more):
    from penstock.scheduler.job_service import EndReport

    return EndReport(claimed.dispatch.dispatch_id, *more)


def told(answers):
    return [type(answer).__name__ if isinstance(answer, Refused) else answer for answer in answers]


def test_each_of_many_ends_on_its_own_merits(kit):
    kit.submit(n=5, retry_delays_sec=(60,))
    done, failed, stopped, gone, twice = kit.job_service.claim(kinds(), limit=5)
    kit.job_service.stop(stopped.dispatch.dispatch_id, EndReason.CANCELED)
    kit.job_service.release(gone.dispatch.dispatch_id)
    answers = kit.job_service.end_many(
        [
            report(done, EndReason.COMPLETED, '"ok"'),
            report(failed, EndReason.JOB_ERROR, None, "it broke"),
            report(stopped),
            report(gone),
            report(twice),
            report(twice),
        ]
    )

    assert told(answers) == ["DONE", "QUEUED", "CANCELED", "StaleDispatch", "DONE", "StaleDispatch"]
    assert kit.store.dispatch(done.dispatch.dispatch_id).result == '"ok"'
    assert kit.store.dispatch(failed.dispatch.dispatch_id).error == "it broke"
    assert kit.store.ledger("local").units == 0


def test_a_name_that_is_no_lease_is_told_so_and_the_others_end(kit):
    from penstock.scheduler.job_service import EndReport

    kit.submit()
    [claimed] = kit.job_service.claim(kinds())
    names = ["nothing", "", f"{claimed.job.job_id}.01", f"{claimed.job.job_id}.2", f"{claimed.job.job_id}.x"]
    answers = kit.job_service.end_many([*(EndReport(name) for name in names), report(claimed)])

    assert [type(answer) for answer in answers[:-1]] == [NotFound] * len(names)
    assert answers[-1] == "DONE"


def test_a_lease_without_a_job_ends_among_others(kit):
    from penstock.scheduler.job_service import EndReport

    lease, _ = kit.job_service.ask(AdmissionClass("a", "t", 5), 50)

    assert kit.job_service.end_many([EndReport(lease.dispatch_id)]) == [None]
    assert kit.store.ledger("local").units == 0


def test_a_lease_that_ran_out_completes_nothing(kit):
    kit.submit(n=2)
    claimed = kit.job_service.claim(kinds(), limit=2)
    kit.later(31)
    answers = kit.job_service.end_many([report(item) for item in claimed])

    assert [type(answer) for answer in answers] == [StaleDispatch] * 2
    assert {kit.state(item.job.job_id) for item in claimed} == {"RUNNING"}


def test_what_ends_in_an_exchange_makes_room_for_what_is_claimed(kit):
    ids = kit.submit(n=2, cost_units=60)
    first = kit.job_service.claim(kinds(), limit=2)
    answers, second = kit.job_service.exchange([report(item) for item in first], kinds(), limit=2)

    assert [item.job.job_id for item in first] == ids[:1]
    assert answers == ["DONE"]
    assert [item.job.job_id for item in second] == ids[1:]


def test_an_exchange_with_nothing_to_report_is_a_claim(kit):
    [job_id] = kit.submit()
    answers, [claimed] = kit.job_service.exchange([], kinds())

    assert answers == []
    assert claimed.job.job_id == job_id


class Foretold:
    """A store that says what will start before it does: `foretold` for what the exchange then answers. `order`: what was done when."""

    def __init__(self, store, foretold, order):
        self._store, self._foretold, self._order = store, foretold, order

    def __getattr__(self, name):
        return getattr(self._store, name)

    def commit(self, complete, admit, *, wait):
        silent = Admit(admit.host, admit.run_round, admit.terms)
        ended, admitted = self._store.commit(complete, silent, wait=wait)
        grants = admitted.result()
        admit.preview(self._foretold(grants))
        return ended, Mock(result=lambda: self._order.append("on disk") or grants)


def landing(kit, monkeypatch, foretold=lambda granted: granted):
    """What was made ready and when, and what came back."""
    order = []
    monkeypatch.setattr(kit.job_service, "_store", Foretold(kit.store, foretold, order))

    def ready(claimed):
        order.append([c.dispatch.dispatch_id for c in claimed])
        return order[-1]

    pending = kit.job_service.exchange_soon([], kinds(), 5, "w")
    _, back = kit.job_service.finish_exchange(pending, ready)
    return order, back


def test_what_starts_is_made_ready_once_and_while_it_is_being_written(kit, monkeypatch):
    kit.submit(n=2)
    order, back = landing(kit, monkeypatch)

    assert order == [back, "on disk"]
    assert len(back) == 2


def test_what_begins_is_what_was_decided_in_the_end(kit, monkeypatch):
    """A commit may fail, and the round is then weighed again."""
    kit.submit(n=2)
    order, back = landing(kit, monkeypatch, lambda granted: granted[:1])

    assert order == [back[:1], "on disk", back]
    assert len(back) == 2


def test_a_job_that_goes_on_is_made_ready_when_its_checkpoint_is_on_disk(kit, monkeypatch):
    kit.submit()
    [first] = kit.job_service.claim(kinds())
    kit.job_service.release(first.dispatch.dispatch_id)
    kit.later(60)
    order, back = landing(kit, monkeypatch)

    assert order == ["on disk", back]
    assert len(back) == 1


class OneClaim:
    """A worker without work, which claims beside every submit."""

    def __init__(self):
        self.taken = []

    def claim(self):
        return kinds(), 1, "w"

    def take(self, grants, *, comes=False):
        self.taken.append([grant.job.job_id for grant in grants])


def test_an_idle_worker_is_answered_once_for_each_claim_whatever_the_store_does(kit, monkeypatch):
    worker = kit.dispatcher.idle_worker = OneClaim()
    [first] = kit.submit()

    def closed(*_, **__):
        raise StoreFailed("the store is closed", kind="closed")

    with monkeypatch.context() as patch, pytest.raises(StoreFailed):
        patch.setattr(kit.store, "commit", closed)
        kit.submit()
    [last] = kit.submit()

    assert [[first], [], [last]] == worker.taken
