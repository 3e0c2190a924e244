"""
How many round trips and statements our library costs on PostgreSQL, by what each is for.

    python -m bench.round_trips [--only NAME] [--each]

A server of its own is started, one process submits, and this one runs the jobs and counts what it sends. A round trip
is an exchange whose answer the process waits for. Upkeep follows the clock and is counted apart; the other counts hardly
depend on what else the machine does. The most frequent round trips of each load are listed with their statements,
behind a bar those whose answers are not waited for. `--each`: list the last ones in order, with their threads.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from threading import current_thread
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

from bench.servers import postgres
from penstock import Scheduler
from penstock.stores.common.rows import statements
from penstock.stores.postgres.pipeline import Call, PipelineConnection

DSN: Final = "BENCH_SERVER"
#: How many kinds of round trips are listed.
KINDS: Final = 12
#: A round trip with none of these is upkeep.
FOR_JOBS: Final = frozenset(
    (
        *("complete", "lock_ledger", "heads", "heads_from", "in_line", "lock_heads", "start_jobs"),
        *("write_start", "write_batch", "lock_children", "job_results"),
    )
)


class Exchange(NamedTuple):
    """What one exchange sent. `behind`: statements whose answers are not waited for."""

    thread: str
    calls: tuple[str, ...]
    behind: tuple[str, ...]


class Load(NamedTuple):
    """`submit`: in a process of its own. `per`: so many jobs are one step of the table."""

    submit: Callable[[Scheduler, Any, int], None]
    jobs: int
    per: int


def chain(scheduler: Scheduler, job: Any, count: int) -> None:
    with scheduler.batch("chain") as batch:
        batch.enqueue(job)
        for position in range(count - 1):
            batch.enqueue(job.options(after=[f"#{position}"]))


def fan(scheduler: Scheduler, job: Any, count: int) -> None:
    with scheduler.batch("fan", on_end=job) as batch:
        batch.enqueue_many(job, [()] * (count - 1))


def array(_: Scheduler, job: Any, count: int) -> None:
    job.enqueue_array(range(count))


def idle(_: Scheduler, job: Any, count: int) -> None:
    for _number in range(count):
        job.enqueue().result()
        sleep(0.03)  # until the scheduler is idle again


def drain(_: Scheduler, job: Any, count: int) -> None:
    job.enqueue_many([()] * count)


LOADS: Final = {
    "chain": Load(chain, 200, 1),
    "idle": Load(idle, 100, 1),
    "array": Load(array, 10_000, 100),
    "fan": Load(fan, 1_000, 100),
    "drain": Load(drain, 10_000, 100),
}


class Recorder:
    """Records the exchanges of this process."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self._names = {_key(text): name for name, text in statements("postgres").items()}
        exchange = PipelineConnection.exchange

        def recorded(
            con: PipelineConnection, calls: Sequence[Call], behind: Sequence[Call] = ()
        ) -> list[list[Any]]:
            self.exchanges.append(
                Exchange(current_thread().name, self._of(calls), self._of(behind)),
            )
            return exchange(con, calls, behind)

        PipelineConnection.exchange = recorded  # type: ignore[assignment,method-assign]

    def _of(self, calls: Sequence[Call]) -> tuple[str, ...]:
        return tuple(self._names.get(_key(call[0].text.decode()), call[0].text.decode()) for call in calls)


def _key(text: str) -> str:
    """The words of a statement without its schema and its placeholders."""
    return re.sub(r"%(?:\(\w+\))?s|\$\d+|\"|;|\s", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=LOADS)
    parser.add_argument("--each", type=int, default=0, metavar="N", help="list the last N exchanges in order")
    options = parser.parse_args()
    recorder = Recorder()
    with postgres() as dsn:
        os.environ[DSN] = dsn
        for name in options.only or LOADS:
            measure(name, dsn, recorder, options.each)


def measure(name: str, dsn: str, recorder: Recorder, each: int) -> None:
    scheduler, ended = Scheduler(dsn, workers=2, capacity=100), 0

    @scheduler.job(cost=1, name="count")
    def job() -> None:
        nonlocal ended
        ended += 1

    load = LOADS[name]
    with scheduler:
        _submit("drain", 500)  # connections are open and statements are prepared
        _until(lambda: ended == 500)
        ended = 0
        sleep(0.5)
        recorder.exchanges.clear()
        _submit(name, load.jobs)
        _until(lambda: ended == load.jobs)
        sleep(0.1)
        exchanges = list(recorder.exchanges)
    _show(name, load, exchanges)
    for one in exchanges[-each:] if each else ():
        print(f"    {one.thread:<20} {' '.join(one.calls) or '-'} | {' '.join(one.behind)}")


def _show(name: str, load: Load, exchanges: Sequence[Exchange]) -> None:
    steps = load.jobs / load.per
    trips = [one for one in exchanges if one.calls]
    for_jobs = [one for one in trips if FOR_JOBS & {*one.calls}]
    sent = sum(len(one.calls) for one in for_jobs)
    unit = "a job" if load.per == 1 else f"{load.per} jobs"
    print(
        f"{name}: {len(for_jobs) / steps:.1f} round trips {unit} with {sent / steps:.1f} statements, "
        f"and {(len(trips) - len(for_jobs)) / steps:.1f} for upkeep"
    )
    kinds = Counter((one.calls, one.behind) for one in exchanges)
    for (calls, after), count in kinds.most_common(KINDS):
        print(f"  {count / steps:5.2f}  {' '.join(calls) or '-'} | {' '.join(after)}")
    print(flush=True)


def _submit(name: str, count: int) -> None:
    subprocess.run([sys.executable, "-m", "bench.round_trips", "submit", name, str(count)], check=True)


def submitter(name: str, count: int) -> None:
    scheduler = Scheduler(os.environ[DSN])

    @scheduler.job(cost=1, name="count")
    def job() -> None: ...

    LOADS[name].submit(scheduler, job, count)
    scheduler.close()


def _until(condition: Callable[[], bool]) -> None:
    until = monotonic() + 300
    while not condition():
        if monotonic() > until:
            raise TimeoutError
        sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1:2] == ["submit"]:
        submitter(sys.argv[2], int(sys.argv[3]))
    else:
        main()
