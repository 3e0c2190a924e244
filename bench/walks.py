"""
How many functions and files one operation goes through, traced on a warm system.

    python -m bench.walks [--files] [--only NAME] [--repeat N]

A walk is one operation, from the call to its end, with every thread of this process traced: client, server and worker
run in one process here. Only functions of this package count. A change of file is a call that enters another file than
the traced call before it in the same thread. Each walk is repeated on a system that has done it before; the repetition
with the fewest calls is shown, because it has the least housekeeping in it (ticks, heartbeats).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import sleep
from types import CodeType, FrameType

SOURCES = str(Path(__file__).parent.parent / "src" / "penstock")
#: name: most files, most changes of file
TARGETS = {"http": (35, 347), "http-postgres": (40, None)}


@dataclass(frozen=True)
class Walk:
    """The traced calls of one operation: one list of functions for each thread."""

    threads: Mapping[int, list[CodeType]]

    @property
    def calls(self) -> int:
        return sum(map(len, self.threads.values()))

    @property
    def functions(self) -> int:
        return len({code for codes in self.threads.values() for code in codes})

    @property
    def files(self) -> Counter[str]:
        return Counter(_file(code) for codes in self.threads.values() for code in codes)

    @property
    def changes(self) -> int:
        return sum(
            one.co_filename != other.co_filename
            for codes in self.threads.values()
            for one, other in pairwise(codes)
        )


class Tracer:
    """Records the calls of all threads that start after it, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._quiet: set[int] = set()
        self._threads: dict[int, list[CodeType]] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            thread = threading.get_ident()
            if thread not in self._quiet:
                self._threads.setdefault(thread, []).append(frame.f_code)

    def walk(self, operation: Operation) -> Walk:
        self._threads, self._quiet = {}, set()
        self.on = True
        try:
            ended = operation()
            self._quiet = {
                threading.get_ident()
            }  # what this thread reads to see the end is no part of the walk
            while not ended():
                sleep(0.001)
        finally:
            self.on = False
        return Walk(self._threads)


#: Does one operation, and returns a function that says whether it has ended.
Operation = Callable[[], Callable[[], bool]]


@contextmanager
def pool_call() -> Iterator[Operation]:
    import penstock

    with penstock.WorkerPool(workers=2) as pool:
        yield lambda: _done(pool.submit(abs, -1).result())


@contextmanager
def graph_run() -> Iterator[Operation]:
    import penstock

    graph = penstock.Graph()
    graph.node(name="one")(lambda: 1)
    graph.node(name="two")(lambda one: one + 1)
    plan = graph.compile()
    with penstock.GraphExecutor() as executor:
        yield lambda: _done(executor.run(plan))


@contextmanager
def library_job() -> Iterator[Operation]:
    import penstock

    with tempfile.TemporaryDirectory() as where:
        scheduler = penstock.Scheduler(f"{where}/jobs.db", workers=2)
        job = scheduler.job(name="negate", cost=1)(lambda number: -number)
        scheduler.start()
        try:
            yield lambda: _done(job.enqueue(1).result(timeout=10))
        finally:
            scheduler.close()


@contextmanager
def http_job(address: str | None = None) -> Iterator[Operation]:
    """A submit by the client, run by an SDK worker with one thread."""
    from penstock import Client, Worker
    from penstock.server.listener import Config, serve

    with ExitStack() as down:
        where = Path(down.enter_context(tempfile.TemporaryDirectory()))
        service = _service(where, address, down)
        server = serve(service, Config(directory=where, socket=where / "penstock.sock"))
        down.callback(server.stop)
        token = server.token_file.read_text().strip()
        client = down.enter_context(Client(server.url, token=token))
        worker = Worker(server.url, token=token, addon="walks")
        worker.job("noop")(lambda: None)
        thread = threading.Thread(target=worker.run)
        thread.start()
        down.callback(thread.join)
        down.callback(worker.stop)

        def submit() -> Callable[[], bool]:
            job_id = client.submit("walks", "noop", cost_units=1).job_id
            return lambda: _is_done(service.store, job_id)

        yield submit


@contextmanager
def http_job_on_postgres() -> Iterator[Operation]:
    from bench.servers import postgres

    with postgres() as address, http_job(address) as operation:
        yield operation


@contextmanager
def command() -> Iterator[Operation]:
    """The daemon's side of a command: no HTTP and no command line. Launcher and warden are other processes."""
    from penstock.core.jobs.intent import Intent
    from penstock.core.jobs.types import AddonId
    from penstock.runner.folder import RunnerFolder
    from penstock.runner.payload import RunnerOptions
    from penstock.runner.runner import Runner

    with ExitStack() as down:
        where = Path(down.enter_context(tempfile.TemporaryDirectory()))
        service = _service(where, None, down)
        runner = Runner(service, RunnerFolder(where), RunnerOptions(workers=1)).start()
        down.callback(runner.stop, 5)

        def submit() -> Callable[[], bool]:
            intent = Intent(
                addon_id=AddonId("walks"),
                job_type="penstock.command",
                cost_units=1,
                payload='{"argv": ["true"]}',
            )
            job_id = service.job_service.submit([intent])[0].job_id
            return lambda: _is_done(service.store, job_id)

        yield submit


def _service(where: Path, address: str | None, down: ExitStack):
    from penstock.core.jobs.load import Capacity
    from penstock.scheduler.driver import SteadyClock
    from penstock.scheduler.rules import SchedulerRules
    from penstock.scheduler.service import SchedulerService
    from penstock.stores.opening import open_store

    clock, rules = SteadyClock(), SchedulerRules(capacity=Capacity(fixed=100))
    store = open_store(address or f"{where}/jobs.db", clock, rules.ordering)
    down.callback(store.close)
    service = SchedulerService(store, rules, clock=None if address else clock, preempts=True)
    service.start("the walks")
    down.callback(service.stop)
    return service


WALKS = {
    "pool": ("`pool.submit(f).result()`, parent side", pool_call),
    "graph": ("graph run, two nodes", graph_run),
    "library": ("library `enqueue` to `result` on SQLite", library_job),
    "http": ("HTTP submit to DONE, SDK worker, SQLite", http_job),
    "command": ("a command, daemon side", command),
    "http-postgres": ("HTTP submit to DONE, SDK worker, PostgreSQL", http_job_on_postgres),
}


def main() -> None:
    options = _options()
    tracer = Tracer()
    print("| walk | calls | functions | files | changes of file | threads | wanted |")
    print("|---|---|---|---|---|---|---|")
    walks = {}
    for name in options.only or WALKS:
        title, _ = WALKS[name]
        walks[name] = walk = min(repeated(tracer, name, options.repeat), key=lambda one: one.calls)
        files, changes = TARGETS.get(name, (None, None))
        wanted = ", ".join(
            f"{most} {what}" for most, what in ((files, "files"), (changes, "changes")) if most is not None
        )
        figures = (walk.calls, walk.functions, len(walk.files), walk.changes, len(walk.threads), wanted)
        print(f"| {title} | {' | '.join(map(str, figures))} |", flush=True)
    if options.files:
        for name, walk in walks.items():
            print(f"\n{name}: {len(walk.files)} files, with the calls into each")
            print("\n".join(f"  {calls:5} {file}" for file, calls in sorted(walk.files.items())))


def repeated(tracer: Tracer, name: str, times: int) -> Iterator[Walk]:
    """The repetitions of a walk, on a system that has done it ten times before."""
    _, prepared = WALKS[name]
    with prepared() as operation:
        for _ in range(10):
            tracer.walk(operation)
            sleep(0.02)
        for _ in range(times):
            sleep(0.05)  # what the walk before it left to do comes to its end
            yield tracer.walk(operation)


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{SOURCES}/")


def _done(_: object) -> Callable[[], bool]:
    return lambda: True


def _is_done(store, job_id: str) -> bool:
    state = str(store.job(job_id).state)
    if state in ("FAILED", "BLOCKED", "CANCELED"):
        raise RuntimeError(f"the job is {state}: {store.dispatch(f'{job_id}.1')}")
    return state == "DONE"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Functions and files that one operation goes through.")
    parser.add_argument("--files", action="store_true", help="also list the files of each walk")
    parser.add_argument("--only", action="append", choices=WALKS, help="this walk alone; may be repeated")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="20 unless given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
