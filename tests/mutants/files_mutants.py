"""Bugs that could be written into how the store notices that its files were removed, replaced or cut, and that a commit failed."""

from __future__ import annotations

from tests.mutants.planting import planter

LOST = ("tests/contract/test_sqlite_lost_files.py", "-k", "not first_start")
FIRST = ("tests/contract/test_sqlite_lost_files.py", "-k", "first_start")
DAEMON = ("tests/crash/test_lost_files.py", "-k", "health")

planted = planter("files", "penstock/{}.py")

MUTANTS = [
    planted(
        "the file is not looked at before a write",
        "stores/sqlite_tx",
        "            self._guard.look()\n",
        "",
        LOST,
    ),
    planted(
        "another file under the same name is taken for ours",
        "stores/sqlite_guard",
        "if (main.st_dev, main.st_ino) != self._main:",
        "if main.st_dev != self._main[0]:",
        LOST,
    ),
    planted(
        "a file that was overwritten in place is not examined",
        "stores/sqlite_guard",
        "        if main != self._content:\n            self._examine(main)\n",
        "",
        LOST,
    ),
    planted(
        "checkpoints of other processes are taken for damage",
        "stores/sqlite_guard",
        "if mark is None or mark.main_file != content:",
        "if mark is not None:",
        LOST,
    ),
    planted(
        "a copy that could not be made is called saved",
        "stores/sqlite_guard",
        '            return _lost(lost, f"{why}, and {keep}")\n',
        "            copy = self._path\n",
        LOST,
    ),
    planted(
        "the mark is forgotten when all files are deleted",
        "stores/sqlite_guard",
        "        self._mark.secure(HighWater(event))",
        "        event = event",
        LOST,
    ),
    planted(
        "the mark is not raised by a commit",
        "stores/sqlite_tx",
        "                self._guard.committed(self._sums.event)\n",
        "",
        LOST,
    ),
    planted(
        "a missing file is made anew beside a full log",
        "stores/sqlite_guard",
        "    if not log_bytes and not event:\n",
        "    if not event:\n",
        LOST,
    ),
    planted(
        "a refused file loses its log",
        "stores/sqlite",
        "self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)",
        "self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)",
        LOST,
    ),
    planted(
        "numbers of lost events are given out again",
        "stores/sqlite_upkeep",
        "        self._pages.batch = max(self._pages.batch, loss.known + 1)\n",
        "",
        LOST,
    ),
    planted(
        "tables that a killed first start has not made are examined",
        "stores/sqlite_care",
        "for table in (table for table in TABLES if table in there):",
        "for table in TABLES:",
        FIRST,
    ),
    planted(
        "what a failed commit wrote stays in the log",
        "stores/sqlite_tx",
        "            self._erase()\n",
        "",
        LOST,
    ),
    planted(
        "a failed sync is told as not written",
        "stores/sqlite_tx",
        "            raise OutcomeUnknown(",
        "            raise ValueError(",
        LOST,
    ),
    planted(
        "all who shared a failed commit are told the same jobs",
        "stores/writer",
        "op.told(None, _with_jobs(error, result))",
        "op.told(None, _with_jobs(error, (results or [None])[0]))",
        LOST,
    ),
    planted(
        "health only reads",
        "http/sight",
        "        office.house.roll.prove()\n",
        "",
        DAEMON,
    ),
]
