"""
Bugs, planted one at a time: the tests must find each. What guards nothing is not a test.

    python tests/sim/mutants.py            all of them
    python tests/sim/mutants.py fence      those whose name contains a word

Each is a copy of the source with one change, and the tests run against that copy until the first failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONTRACT = ("tests/contract", "tests/engine")
SIM = ("tests/sim/test_sim.py",)


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "fence check dropped (memory)",
        "stores/memory.py",
        "job.state is step.source and job.fence == step.fence",
        "job.state is step.source",
        CONTRACT,
    ),
    Mutant("fence check dropped (sqlite)", "stores/sqlite_tx.py", " and row[2] == step.fence", "", CONTRACT),
    Mutant(
        "a stale dispatch may settle",
        "stores/memory.py",
        "dispatch is None or dispatch.phase is not step.source",
        "dispatch is None",
        CONTRACT,
    ),
    Mutant(
        "units credited at cancel",
        "core/changes.py",
        "return stop(dispatch, job, End.CANCELED, now, grace=grace)",
        "return end(job, dispatch, End.CANCELED, now, schedules=schedules, ordering=ordering)",
        SIM,
    ),
    Mutant(
        "given up before its lease is over",
        "core/changes.py",
        "expires_at=max(dispatch.expires_at, now + grace)",
        "expires_at=now + grace",
        SIM,
    ),
    Mutant(
        "units credited twice",
        "stores/sqlite_pages.py",
        "        self.hold(host, demand_no, -n)\n",
        "        self.hold(host, demand_no, -2 * n)\n",
        CONTRACT,
    ),
    Mutant(
        "reservation not returned on start timeout",
        "engine/keeper.py",
        "        if job is None:\n            return changes.release",
        "        if dispatch.phase is Phase.RESERVED:\n            return None\n        if job is None:\n            return changes.release",
        SIM,
    ),
    Mutant(
        "expired lease leaves the job RUNNING",
        "engine/keeper.py",
        "        if job is None:\n            return changes.release",
        "        if True:\n            return changes.release",
        SIM,
    ),
    Mutant(
        "stale heartbeat renews (memory)",
        "stores/memory.py",
        "dispatch.phase is Phase.RESERVED or dispatch.expires_at <= now",
        "dispatch.phase is Phase.RESERVED",
        CONTRACT,
    ),
    Mutant("stale heartbeat renews (sqlite)", "stores/sqlite_tx.py", " or expires_at <= now:", ":", CONTRACT),
    Mutant(
        "commit after the answer",
        "stores/writer.py",
        "                results = [op.run(transaction) for op in batch]\n",
        "                results = [op.run(transaction) for op in batch]\n"
        "                for op, result in zip(batch, results, strict=True):\n"
        "                    op.answer.set_result(result)\n"
        "            return\n",
        CONTRACT,
    ),
    Mutant(
        "event outside the transaction",
        "stores/sqlite_tx.py",
        '                self._pages.flush()\n                self._con.execute("COMMIT")\n',
        '                self._pages.flush_rows()\n                self._con.execute("COMMIT")\n                self._pages.flush()\n',
        CONTRACT,
    ),
    Mutant("deferred BEGIN", "stores/sqlite_tx.py", '"BEGIN IMMEDIATE"', '"BEGIN DEFERRED"', CONTRACT),
    Mutant(
        "not synced", "stores/sqlite_file.py", '"synchronous", "FULL"', '"synchronous", "NORMAL"', CONTRACT
    ),
    Mutant(
        "requeue counted against depth",
        "stores/sqlite_tx.py",
        "        if p is not None:\n",
        '        if p is not None:\n            _refuse_beyond(2, one(self._con, "queued_in_all")[0], 1, "in all")\n',
        CONTRACT,
    ),
    Mutant(
        "aging ignored",
        "core/order.py",
        "return (now - its_turn) // aging.per_point",
        "return 50",
        ("tests/core/test_order.py", *CONTRACT),
    ),
    Mutant(
        "cap checked outside the lock",
        "stores/memory.py",
        "        with self._lock:\n            now = self._clock()\n            self._lines.advance(now)\n            before = self._seq\n            verdict = weigh(self._floor(host, now))\n",
        "        now = self._clock()\n        self._lines.advance(now)\n        before = self._seq\n        verdict = weigh(self._floor(host, now))\n        with self._lock:\n",
        CONTRACT,
    ),
    Mutant(
        "the last reason wins",
        "core/landing.py",
        "if phase is Phase.ENDING and first_reason is not None:",
        "if False:",
        ("tests/core/test_landing.py", *CONTRACT),
    ),
    Mutant(
        "a start timeout is tried again at once",
        "core/landing.py",
        "_LATER: Final = Landing(Move.REQUEUE, retry=Category.START)",
        "_LATER: Final = Landing(Move.REQUEUE)",
        ("tests/core/test_landing.py", *CONTRACT),
    ),
    # start after a crash
    Mutant(
        "an addon's run is put back at the start",
        "engine/recovery.py",
        "for d in batch if d.dispatch_id in gone]",
        "for d in batch]",
        SIM,
    ),
    Mutant(
        "what our runner ran keeps its lease after a start",
        "engine/recovery.py",
        "frozenset(survivors(here)) if",
        "frozenset(d for d in survivors(here) if not d) if",
        ("tests/engine/test_recovery.py",),
    ),
    Mutant(
        "its processes live on after a start",
        "engine/recovery.py",
        "gone = frozenset(survivors(here)) if survivors is not None and here else frozenset[DispatchId]()",
        'gone = frozenset(d.dispatch_id for d in here if d.worker.startswith("runner:"))',
        SIM,
    ),
    Mutant(
        "a lease gets no time for the downtime",
        "engine/recovery.py",
        "    prolonged = store.apply(given_time)\n",
        "    prolonged = [True for _ in given_time]\n",
        ("tests/engine/test_recovery.py",),
    ),
    Mutant(
        "turns of another aging setting stay",
        "engine/house.py",
        "        put_in_order(self.store, self.rules.ordering.aging)\n",
        "",
        ("tests/engine/test_house.py",),
    ),
    # spending
    Mutant(
        "stopped for the crossing and not for being over",
        "engine/purse.py",
        "spent is None and not over(standing.spent, standing.cost_limit)",
        "spent is None and not (standing.spent > standing.spent_before and over(standing.spent, standing.cost_limit))",
        ("tests/engine/test_spending.py",),
    ),
    Mutant(
        "told at every amount beyond the limit",
        "core/spend.py",
        "if before < limit <= after:",
        "if limit <= after:",
        ("tests/core/test_spend.py", "tests/engine/test_spending.py", *SIM),
    ),
    Mutant(
        "told outside of the heartbeat's transaction",
        "engine/desk.py",
        "[standing] = self._store.renew([beat], self._purse.tell)",
        "[standing] = self._store.renew([beat])",
        ("tests/engine/test_spending.py",),
    ),
    Mutant(
        "a spent budget lets the other runs go on",
        "engine/purse.py",
        "        if spent is not None:\n            self._close(standing.addon_id, spent)\n",
        "",
        ("tests/engine/test_spending.py",),
    ),
    Mutant(
        "a spent budget is closed at the crossing alone",
        "engine/purse.py",
        "            if window is not None:\n                self._close(addon_id, window)\n",
        "",
        ("tests/engine/test_spending.py",),
    ),
    # waiting for room
    Mutant(
        "a newcomer goes past who waits",
        "engine/room.py",
        "        if not self._waiting:\n            return None\n",
        "        if True:\n            return None\n",
        ("tests/engine/test_room.py", *SIM),
    ),
    Mutant(
        "who waits is served last come first",
        "engine/room.py",
        "key=lambda w: w.number",
        "key=lambda w: -w.number",
        ("tests/engine/test_room.py",),
    ),
    Mutant(
        "who gave up is let in",
        "engine/room.py",
        "            if waiter.answer.cancelled():\n                self._leave(waiter)\n                continue\n",
        "",
        ("tests/engine/test_room.py",),
    ),
    # signals
    Mutant(
        "our own load counts as somebody's",
        "engine/signals.py",
        "cpu=max(0.0, used - cpu) / total",
        "cpu=used / total",
        ("tests/engine/test_signals.py",),
    ),
    Mutant(
        "a job that ended is taken out twice",
        "engine/signals.py",
        "            cpu, moved = cpu - own.cpu, moved - own.moved\n",
        "            cpu, moved = cpu, moved\n",
        ("tests/engine/test_signals.py",),
    ),
    Mutant(
        "an application stands in for the host's signals",
        "core/quiet.py",
        "known = {r.name for r in fresh if not r.source}",
        "known = {r.name for r in fresh}",
        ("tests/core/test_quiet.py", "tests/engine/test_signals.py"),
    ),
]


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
    survivors = [mutant.name for mutant in chosen if not killed(mutant)]
    say(
        f"{len(chosen) - len(survivors)} of {len(chosen)} found"
        + (f"; not found: {survivors}" if survivors else "")
    )
    return 1 if survivors else 0


def killed(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        victim = copy / "penstock" / mutant.file
        text = victim.read_text("utf-8")
        if text.count(mutant.old) != 1:
            sys.exit(
                f"{mutant.name}: its place in {mutant.file} is there {text.count(mutant.old)} times; write it anew"
            )
        victim.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "60", *mutant.tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    by = next(
        (line for line in run.stdout.splitlines() if line.startswith("FAILED")),
        "by a run that did not end well",
    )
    say(
        f"{'not found' if run.returncode == 0 else 'found':<10}{mutant.name:<45}{'' if run.returncode == 0 else by[:110]}"
    )
    return run.returncode != 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
