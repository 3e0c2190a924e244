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
        "stores/sqlite_tx.py",
        "        self._pages.hold(host, demand_no, -1)\n",
        "        self._pages.hold(host, demand_no, -2)\n",
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
