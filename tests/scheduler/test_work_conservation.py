"""Capacity that no rule keeps free is used: random worlds of workers, addons and caps on a clock that jumps."""

from __future__ import annotations

import os
from contextlib import ExitStack
from random import Random

import pytest
from msgspec.structs import replace
from tests.scheduler.conftest import make
from tests.scheduler.test_one_round import PullingWorker

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.forecast import try_round
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import SECOND, AddonId
from penstock.core.jobs.workers import WorkerKinds

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
WORLDS = 60 if SOAK == 1 else 1_000 * SOAK
ADDONS, TYPES = ("a", "b", "c"), ("t", "u")
STEPS = 40


class World:
    """Workers come and go, full or free, waiting or asking now and then; jobs come in bursts."""

    def __init__(self, kit, seed):
        self.random = random = Random(seed)
        caps = Caps(
            concurrent=random.choice([None, None, 6]),
            per_addon=random.choice([None, None, 4]),
            per_type=random.choice([None, None, 3]),
        )
        self.kit = kit.under(
            capacity=Capacity(fixed=random.randint(12, 40)),
            limits=AdmissionLimits(caps),
            ordering=replace(kit.rules.ordering, patience=random.choice([4, 30]) * SECOND),
            lease_for=3_600 * SECOND,
        )
        self.workers = [self._worker(number) for number in range(random.randint(1, 5))]
        self.waits = {}

    def _worker(self, number):
        random = self.random
        addon = random.choice([None, *ADDONS])
        types = frozenset(random.sample(TYPES, random.randint(0, len(TYPES))))
        kinds = WorkerKinds(None if addon is None else AddonId(addon), types)
        return PullingWorker(self.kit, f"w{number}", kinds, random.randint(1, 6), random.randint(1, 9))

    def step(self):
        """One tick: jobs are submitted, workers leave or come, and those that are present ask in any order."""
        random = self.random
        for _ in range(random.randint(0, 3)):
            self.kit.submit(
                n=random.randint(1, 5),
                addon_id=random.choice(ADDONS),
                job_type=random.choice(TYPES),
                priority=random.randint(1, 100),
                cost_units=random.randint(1, 12),
                expected_duration_sec=random.choice([None, 3, 20]),
            )
        for worker in self.workers:
            if random.random() < 0.1:
                self._come_or_go(worker)
        present = [worker for worker in self.workers if worker in self.waits]
        for worker in random.sample(present, len(present)):
            worker.turn()
        self.kit.step()
        self.kit.later(2)

    def _come_or_go(self, worker):
        if worker in self.waits:
            self.waits.pop(worker).close()
        else:
            self.waits[worker] = stack = ExitStack()
            stack.enter_context(self.kit.pulling_workers.waiting(worker.name, worker.kinds, worker.room))

    def idle(self):
        """The heads that a present worker with room could start now, if no rule keeps units free."""
        return self.kit.store.read_view(self.kit.rules.host, self._startable)

    def _startable(self, view):
        inputs = self.kit.dispatcher.inputs(view)
        if try_round(inputs)[0].kept is not None:
            return set()
        free = [worker for worker in self.waits if len(worker.ends) < worker.room]
        return {
            head.job_id
            for line in view.ready_queues()
            if (head := next(line.jobs, None)) is not None
            and any(worker.kinds.fits(line.admission_class) for worker in free)
            and inputs.gates(line.admission_class, urgent=line.urgent).refusal() is None
        }


@pytest.mark.parametrize("first", range(0, WORLDS, 20))
def test_units_that_a_present_worker_could_use_are_idle_for_two_ticks_at_most(first, tmp_path):
    for seed in range(first, first + 20):
        world = World(make("memory", tmp_path), seed)
        before, last = set(), set()
        for step in range(STEPS):
            world.step()
            idle = world.idle()
            assert not (idle & last & before), f"world {seed}, step {step}"
            before, last = last, idle
        assert world.kit.store.audit() == []
