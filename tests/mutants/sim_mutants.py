"""Bugs that somebody could write into the core, the stores and the engine of the scheduler."""

from __future__ import annotations

from tests.mutants.planting import planter

CONTRACT = ("tests/contract", "tests/engine")
SIM = ("tests/sim/test_sim.py",)
APPLY = ("tests/contract/test_apply.py",)


planted = planter("sim", "penstock/{}")

MUTANTS = [
    planted(
        "fence check dropped (memory)",
        "stores/memory.py",
        "job.state is step.source and job.fence == step.fence",
        "job.state is step.source",
        CONTRACT,
    ),
    planted("fence check dropped (sqlite)", "stores/sqlite_tx.py", " and row[2] == step.fence", "", CONTRACT),
    planted(
        "a stale dispatch may settle",
        "stores/memory.py",
        "dispatch is None or dispatch.phase is not step.source",
        "dispatch is None",
        CONTRACT,
    ),
    planted(
        "units credited at cancel",
        "core/changes.py",
        "told = stop(dispatch, job, End.CANCELED, now, grace=grace, because=because)",
        "told = end(job, dispatch, End.CANCELED, now, schedules=schedules, ordering=ordering)",
        SIM,
    ),
    planted(
        "given up before its lease is over",
        "core/changes.py",
        "expires_at=max(dispatch.expires_at, now + grace)",
        "expires_at=now + grace",
        SIM,
    ),
    planted(
        "units credited twice",
        "stores/sqlite_pages.py",
        "        self.hold(host, demand_no, -n)\n",
        "        self.hold(host, demand_no, -2 * n)\n",
        CONTRACT,
    ),
    planted(
        "reservation not returned on start timeout",
        "engine/keeper.py",
        "        if job is None:\n            return changes.release",
        "        if dispatch.phase is Phase.RESERVED:\n            return None\n        if job is None:\n            return changes.release",
        SIM,
    ),
    planted(
        "expired lease leaves the job RUNNING",
        "engine/keeper.py",
        "        if job is None:\n            return changes.release",
        "        if True:\n            return changes.release",
        SIM,
    ),
    planted(
        "stale heartbeat renews (memory)",
        "stores/memory.py",
        "dispatch.phase is Phase.RESERVED or dispatch.expires_at <= now",
        "dispatch.phase is Phase.RESERVED",
        CONTRACT,
    ),
    planted(
        "stale heartbeat renews (sqlite)", "stores/sqlite_renew.py", " or expires_at <= now:", ":", CONTRACT
    ),
    planted(
        "commit after the answer",
        "stores/writer.py",
        "                brought = [passage.run(transaction) for passage in riders]\n",
        "                brought = [passage.run(transaction) for passage in riders]\n"
        "                for op, result in zip(batch, results, strict=True):\n"
        "                    op.told(result, None)\n"
        "                batch, results = [], []\n",
        CONTRACT,
    ),
    planted(
        "event outside the transaction",
        "stores/sqlite_tx.py",
        "                self._pages.flush()\n                self._ties.written(",
        '                self._pages.flush_rows()\n                self._con.execute("COMMIT; BEGIN IMMEDIATE")\n'
        "                self._pages.flush()\n                self._ties.written(",
        CONTRACT,
    ),
    planted("deferred BEGIN", "stores/sqlite_tx.py", '"BEGIN IMMEDIATE"', '"BEGIN DEFERRED"', CONTRACT),
    planted(
        "not synced", "stores/sqlite_file.py", '"synchronous", "FULL"', '"synchronous", "NORMAL"', CONTRACT
    ),
    planted(
        "requeue counted against depth",
        "stores/sqlite_moves.py",
        "    fresh, ran = step.fresh, step.source is State.RUNNING\n",
        "    fresh, ran = step.fresh, step.source is State.RUNNING\n"
        "    from penstock.stores.submitting import refuse_beyond\n"
        '    refuse_beyond(0, pages.queued_in_all(), 1, "in all")\n',
        CONTRACT,
    ),
    planted(
        "aging ignored",
        "core/order.py",
        "return (now - its_turn) // aging.per_point",
        "return 50",
        ("tests/core/test_order.py", *CONTRACT),
    ),
    planted(
        "cap checked outside the lock",
        "stores/memory.py",
        "        with self._lock:\n            now = self._clock()\n            self._lines.advance(now)\n            before = self._seq\n            verdict = weigh(self._floor(host, now))\n",
        "        now = self._clock()\n        self._lines.advance(now)\n        before = self._seq\n        verdict = weigh(self._floor(host, now))\n        with self._lock:\n",
        CONTRACT,
    ),
    planted(
        "the last reason wins",
        "core/landing.py",
        "if phase is Phase.ENDING and first_reason is not None:",
        "if False:",
        ("tests/core/test_landing.py", *CONTRACT),
    ),
    planted(
        "a start timeout is tried again at once",
        "core/landing.py",
        "_LATER: Final = Landing(Move.REQUEUE, retry=Category.START)",
        "_LATER: Final = Landing(Move.REQUEUE)",
        ("tests/core/test_landing.py", *CONTRACT),
    ),
    # start after a crash
    planted(
        "an addon's run is put back at the start",
        "engine/recovery.py",
        "for d in batch if d.dispatch_id in gone]",
        "for d in batch]",
        SIM,
    ),
    planted(
        "what our runner ran keeps its lease after a start",
        "engine/recovery.py",
        "frozenset(survivors(here)) if",
        "frozenset(d for d in survivors(here) if not d) if",
        ("tests/engine/test_recovery.py",),
    ),
    planted(
        "its processes live on after a start",
        "engine/recovery.py",
        "gone = frozenset(survivors(here)) if survivors is not None and here else frozenset[DispatchId]()",
        'gone = frozenset(d.dispatch_id for d in here if d.worker.startswith("runner:"))',
        SIM,
    ),
    planted(
        "a lease gets no time for the downtime",
        "engine/recovery.py",
        "    prolonged = store.apply(given_time)\n",
        "    prolonged = [True for _ in given_time]\n",
        ("tests/engine/test_recovery.py",),
    ),
    planted(
        "turns of another aging setting stay",
        "engine/house.py",
        "put_in_order(self.store, self.rules.ordering.aging)\n",
        "pass\n",
        ("tests/engine/test_house.py",),
    ),
    # spending
    planted(
        "stopped for the crossing and not for being over",
        "engine/purse.py",
        "spent is None and not over(standing.spent, standing.cost_limit)",
        "spent is None and not (standing.spent > standing.spent_before and over(standing.spent, standing.cost_limit))",
        ("tests/engine/test_spending.py",),
    ),
    planted(
        "told at every amount beyond the limit",
        "core/spend.py",
        "if before < limit <= after:",
        "if limit <= after:",
        ("tests/core/test_spend.py", "tests/engine/test_spending.py", *SIM),
    ),
    planted(
        "told outside of the heartbeat's transaction",
        "engine/desk.py",
        "[standing] = self._store.renew([beat], self._purse.tell)",
        "[standing] = self._store.renew([beat])",
        ("tests/engine/test_spending.py",),
    ),
    planted(
        "a spent budget lets the other runs go on",
        "engine/purse.py",
        "        if spent is not None:\n            self._close(standing.addon_id, spent)\n",
        "",
        ("tests/engine/test_spending.py",),
    ),
    planted(
        "a spent budget is closed at the crossing alone",
        "engine/purse.py",
        "            if window is not None:\n                self._close(addon_id, window)\n",
        "",
        ("tests/engine/test_spending.py",),
    ),
    # waiting for room
    planted(
        "a newcomer goes past who waits",
        "engine/room.py",
        "        if not self._waiting:\n            return None\n",
        "        if True:\n            return None\n",
        ("tests/engine/test_room.py", *SIM),
    ),
    planted(
        "who waits is served last come first",
        "engine/room.py",
        "key=lambda w: w.number",
        "key=lambda w: -w.number",
        ("tests/engine/test_room.py",),
    ),
    planted(
        "who gave up is let in",
        "engine/room.py",
        "            if waiter.answer.cancelled():\n                self._leave(waiter)\n                continue\n",
        "",
        ("tests/engine/test_room.py",),
    ),
    # signals
    planted(
        "our own load counts as somebody's",
        "engine/signals.py",
        "cpu=max(0.0, used - cpu) / total",
        "cpu=used / total",
        ("tests/engine/test_signals.py",),
    ),
    planted(
        "a job that ended is taken out twice",
        "engine/signals.py",
        "            cpu, moved = cpu - own.cpu, moved - own.moved\n",
        "            cpu, moved = cpu, moved\n",
        ("tests/engine/test_signals.py",),
    ),
    planted(
        "an application stands in for the host's signals",
        "core/quiet.py",
        "known = {r.name for r in fresh if bool(r.source) is (r.name in TOLD)}",
        "known = {r.name for r in fresh}",
        ("tests/core/test_quiet.py", "tests/engine/test_signals.py"),
    ),
    planted(
        "no application can report a needed signal",
        "core/quiet.py",
        "known = {r.name for r in fresh if bool(r.source) is (r.name in TOLD)}",
        "known = {r.name for r in fresh if not r.source}",
        ("tests/core/test_quiet.py",),
    ),
    # many at once
    planted(
        "a line is started beyond a cap",
        "core/admission.py",
        "        free += [limit - books.counts.get(key, 0) for key, limit in self._caps]\n",
        "",
        ("tests/core/test_admission.py",),
    ),
    planted(
        "many complete under a lease that has run out",
        "stores/sql/sqlite.sql",
        "WHERE l.phase = 'leased' AND l.expires_at > :now;",
        "WHERE l.phase = 'leased' AND :now > 0;",
        ("tests/contract/test_sqlite.py",),
    ),
    planted(
        "many complete that were told to stop",
        "stores/sql/sqlite.sql",
        "WHERE l.phase = 'leased' AND l.expires_at > :now;",
        "WHERE l.expires_at > :now;",
        APPLY,
    ),
    planted(
        "of two words on one lease both count",
        "stores/sql/sqlite.sql",
        "FROM (SELECT min(key) AS key, value FROM json_each(:ids) GROUP BY value) AS asked\n",
        "FROM json_each(:ids) AS asked\n",
        APPLY,
    ),
    planted(
        "a result is lost among many",
        "stores/sqlite_many.py",
        "        if result is None:\n",
        "        if True:\n",
        APPLY,
    ),
    planted(
        "a job that starts stays in the queue",
        "stores/sqlite_pages.py",
        "        self._leaving += nos\n",
        "        pass\n",
        CONTRACT,
    ),
    planted(
        "what is done is found by nobody who forgets",
        "stores/sqlite_pages.py",
        "        self._done += nos\n",
        "        pass\n",
        CONTRACT,
    ),
    planted(
        "who waited when the clock was set back waits as long as that",
        "engine/clock.py",
        "    return now < moment <= now + pause\n",
        "    return now < moment\n",
        ("tests/engine/test_set_back.py",),
    ),
    planted(
        "what never came to be is handed out under the same name",
        "stores/sqlite_many.py",
        "        drafts[dispatch_id, now] = (started, queued, dispatch_id)\n",
        "        drafts[dispatch_id, 0] = (started, queued, dispatch_id)\n",
        ("tests/contract/test_sqlite.py",),
    ),
    planted(
        "a page of what is done reads all before it",
        "stores/sqlite_find.py",
        "    values.append(0 if query.newest_first else query.after)\n",
        "    values.append(0)\n"
        '    if query.after and not query.newest_first:\n        where += f" AND {number} > ?"\n        values.append(query.after)\n',
        ("tests/contract/test_sqlite.py",),
    ),
    planted(
        "a canceled job forgets what it waited for",
        "stores/sql/sqlite.sql",
        "(SELECT ?, ?, ?, q.denied, q.denied_data,",
        "(SELECT ?, ?, ?, '', q.denied_data,",
        CONTRACT,
    ),
    planted(
        "forgetting some that were done together forgets all of them",
        "stores/sqlite_upkeep.py",
        "            if not left:\n",
        "            if True:\n",
        ("tests/contract/test_sqlite.py",),
    ),
    planted(
        "jobs that come together share what is not the same",
        "stores/sqlite_tx.py",
        "        if like != self._like:\n",
        "        if self._like is None:\n",
        ("tests/contract/test_submit.py", "tests/contract/test_differential.py"),
    ),
    planted(
        "only the first of many is checked",
        "core/intent.py",
        "        if rest != seen or len(intent.payload) > MAX_PAYLOAD:\n",
        "        if seen is None:\n",
        ("tests/core/test_intent.py",),
    ),
]
