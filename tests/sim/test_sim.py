"""
Seeds, each a whole life of a scheduler. A seed that fails is printed with what to call to see it again:

    PENSTOCK_SEED=1234 PENSTOCK_STORE=sqlite pytest tests/sim
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.stores.memory.store import MemoryStore
from penstock.stores.sqlite.store import SqliteStore

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
#: 500 in all, and 100,000 in `make soak`.
SEEDS = {"memory": 470, "sqlite": 30} if SOAK == 1 else {"memory": 9_400 * SOAK, "sqlite": 600 * SOAK}
CHUNK = {"memory": 50, "sqlite": 10}  # seeds in one test: none may take long


def load_world():
    """By path: tests are no package, and this module is too large to be written into one file with its test."""
    spec = importlib.util.spec_from_file_location("penstock_sim_world", Path(__file__).with_name("world.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


world = load_world()


def play(store_kind, seed, folder, *, sources=False):
    def make(clock, new_id):
        if store_kind == "memory":
            return MemoryStore(clock, new_id=new_id)
        return SqliteStore(folder / f"{seed}.db", clock, new_id=new_id)

    life = world.World(seed, make, sources=sources)
    try:
        life.play()
    except BaseException as error:
        error.add_note(f"PENSTOCK_SEED={seed} PENSTOCK_STORE={store_kind} pytest tests/sim")
        error.add_note(f"last acts: {' '.join(life.history[-30:])}")
        raise
    finally:
        life.store.close()
    return life


def chunks():
    if "PENSTOCK_SEED" in os.environ:
        seed = int(os.environ["PENSTOCK_SEED"])
        return [(os.environ.get("PENSTOCK_STORE", "memory"), range(seed, seed + 1))]
    return [
        (kind, range(start, min(start + CHUNK[kind], total)))
        for kind, total in SEEDS.items()
        for start in range(0, total, CHUNK[kind])
    ]


def play_all(kind, seeds, *, sources=False):
    # In memory where there is such a folder: a simulated crash loses no page, so the disk has nothing to prove here.
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-sim-", dir=shm) as folder:
        for seed in seeds:
            play(kind, seed, Path(folder), sources=sources)


@pytest.mark.parametrize(("kind", "seeds"), chunks(), ids=lambda part: str(part).replace("range", ""))
def test_every_promise_holds_whatever_goes_wrong(kind, seeds):
    play_all(kind, seeds)


#: Some hundred seeds with arrays, batches, schedules and jobs that wait for them, beside those above.
SOURCE_SEEDS = [("memory", n) for n in range(0, 100 * SOAK, 20)] + [
    ("sqlite", n) for n in range(0, 20 * SOAK, 10)
]


@pytest.mark.parametrize(("kind", "first"), SOURCE_SEEDS)
def test_every_promise_holds_with_arrays_batches_and_schedules(kind, first):
    play_all(kind, range(first, first + {"memory": 20, "sqlite": 5}[kind]), sources=True)


def test_the_simulation_visits_arrays_batches_and_schedules():
    kinds = set()
    for seed in range(20):
        kinds |= {str(e.kind) for e in play("memory", seed, Path(), sources=True).store.events(0, 100_000)}

    assert {
        "ARRAY_SUBMITTED",
        "ARRAY_CANCELED",
        "ARRAY_ENDED",
        "BATCH_SUBMITTED",
        "BATCH_CLOSED",
        "BATCH_CANCELED",
        "BATCH_ENDED",
        "SCHEDULE_FIRED",
        "SCHEDULE_SKIPPED",
        "SCHEDULE_MISSED",
        "READY",
    } <= kinds


def test_a_seed_replays_to_the_last_event():
    one, two = (play("memory", 7, Path()) for _ in range(2))

    assert one.history == two.history
    assert one.store.events(0, 100_000) == two.store.events(0, 100_000)


def test_the_simulation_visits_what_it_is_for():
    """A simulation that never crashes, fences or blocks anything proves nothing."""
    kinds, reasons, acts = set(), set(), set()
    for seed in range(40):
        life = play("memory", seed, Path())
        for event in life.store.events(0, 100_000):
            kinds.add(str(event.kind))
            reasons.add(event.reason)
        acts |= set(life.history)

    assert {
        "DENIED",
        "REQUEUED",
        "TIMEOUT",
        "CANCELED",
        "BLOCKED",
        "RETRIED",
        "EDITED",
        "CHECKPOINT",
        "ALERT",
    } <= kinds
    assert {
        "lease_expired",
        "start_timeout",
        "cost_limit_reached",
        "cost_warning",
        "budget_warning",
        "budget_spent",
        "scheduler_restarted",
        "max_runtime_exceeded",
        "no_room",
        "cap_reached",
    } <= reasons
    assert {"crash", "StaleDispatch", "QueueFull", "let in"} <= acts


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", [68_183])
def test_what_a_seed_once_showed_stays_mended(kind, seed, tmp_path):
    """68183: two runs of a job that was retried by hand reached its limit at one moment, and their alerts had one name."""
    play(kind, seed, tmp_path)
