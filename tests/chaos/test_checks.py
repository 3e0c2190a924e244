"""
A check that cannot fail checks nothing: each promise is broken once in marks or trail, and its check says so. `test_kills.py` has the
killing itself; `tests/mutants/chaos_mutants.py` breaks the promises for real.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from penstock.chaos import Aftermath, check_promises
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import JobState
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.memory.store import MemoryStore

RULES = SchedulerRules(capacity=Capacity(fixed=40))


class ForgedTrail(MemoryStore):
    """A store whose trail has further events at its end."""

    def __init__(self, clock):
        super().__init__(clock)
        self.forged = []

    def events(self, after, limit, *filters):
        return super().events(after, limit, *filters) + [e for e in self.forged if e.seq > after]


class Scene:
    """Four jobs that ran at once and are DONE, and the marks that they left."""

    def __init__(self, folder):
        self.folder, self.now = folder, 1_900_000_000_000_000
        self.store = ForgedTrail(lambda: self.now)
        machine = HostLoad(RULES)
        dispatcher = Dispatcher(self.store, RULES, machine, PullingWorkers())
        job_service = JobService(self.store, RULES, dispatcher)
        self.jobs = [
            receipt.job_id for receipt in job_service.submit([Intent(addon_id="chaos", job_type="x")] * 4)
        ]
        for _, dispatch, *_ in job_service.claim(WorkerKinds(), 4, "w"):
            job_service.end(dispatch.dispatch_id)
        for job_id in self.jobs:
            self.mark("began", job_id)
            self.mark("ended", job_id)

    def mark(self, what, job_id, fence=1, kind="command"):
        with (self.folder / "journal").open("a") as journal:
            journal.write(f"{what} {kind} {job_id}.{fence} 1\n")

    def unmark(self, what, job_id):
        text = (self.folder / "journal").read_text()
        (self.folder / "journal").write_text(text.replace(f"{what} command {job_id}.1 1\n", ""))

    def happened(self, kind, **fields):
        """One more event, as if it had been written."""
        events = self.store.events(0, 1_000)
        last = [event for event in events if event.kind is kind][-1]
        self.store.forged.append(replace(last, seq=events[-1].seq + 1, **fields))

    def broken(self, acknowledged=None):
        aftermath = Aftermath(self.folder, acknowledged or self.jobs, Counter(), settled=True)
        return {promise.promise for promise in check_promises(aftermath, self.store) if promise.broken}


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_what_went_well_is_proved(scene):
    assert scene.broken() == set()


def test_a_job_that_is_gone_is_found(scene):
    assert "a job accepted is never lost" in scene.broken([*scene.jobs, "another"])


def test_a_job_that_never_ran_to_its_end_is_found(scene):
    scene.unmark("ended", scene.jobs[2])

    assert scene.broken() == {"a DONE job ran to its end"}


def test_the_end_of_another_attempt_does_not_make_a_job_done(scene):
    scene.unmark("ended", scene.jobs[2])
    scene.mark("ended", scene.jobs[2], fence=2)

    assert scene.broken() == {"a DONE job ran to its end"}


def test_an_attempt_that_finds_another_one_alive_is_found(scene):
    scene.mark("beside", scene.jobs[0], fence=2)

    assert scene.broken() == {"never two live attempts of one job"}


def test_a_command_that_works_after_a_later_attempt_began_is_found(scene):
    scene.mark("began", scene.jobs[0], fence=2)
    scene.mark("beat", scene.jobs[0])

    assert scene.broken() == {"never two live attempts of one job"}


@pytest.mark.parametrize(("late_marks", "found"), [(1, False), (2, True)])
def test_a_function_may_write_only_the_mark_that_a_freeze_held_up(scene, late_marks, found):
    scene.mark("began", scene.jobs[0], fence=2, kind="function")
    for _ in range(late_marks):
        scene.mark("beat", scene.jobs[0], kind="function")

    assert scene.broken() == ({"never two live attempts of one job"} if found else set())


def test_a_fence_that_does_not_grow_is_found(scene):
    scene.happened(EventKind.RUNNING)

    assert "every attempt has a higher fence than the one before" in scene.broken()


def test_a_job_that_moves_after_its_end_is_found(scene):
    scene.happened(EventKind.DONE, state=JobState.QUEUED)

    assert "every job ends in one state, and stays there" in scene.broken()


def test_more_units_than_there_are_are_found(scene):
    for number in range(5):
        scene.happened(EventKind.RUNNING, dispatch_id=f"{scene.jobs[0]}.{number + 2}")

    assert "never more units in use than there are" in scene.broken()
