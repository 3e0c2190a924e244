"""Bugs that somebody could write into the PostgreSQL store. The first is the claim that everybody writes first."""

from __future__ import annotations

SQL = "penstock/stores/sql/postgres.sql"
LINK = "penstock/stores/postgres_link.py"
WIRE = "penstock/stores/postgres_wire.py"
ADMIT = "penstock/stores/postgres_admit.py"
APPLY = "penstock/stores/postgres_apply.py"
RENEW = "penstock/stores/postgres_renew.py"
COMPLETE = "penstock/stores/postgres_complete.py"
STEP = "penstock/stores/sql/postgres/0004_places.sql"
SUBMIT = "penstock/stores/postgres_submit.py"
PAGES = "penstock/stores/postgres_pages.py"
EVENTS = "penstock/stores/trail.py"
CALLER = "penstock/stores/postgres_caller.py"
FLOOR = "penstock/stores/postgres_floor.py"
SCHEMA = "penstock/stores/postgres_schema.py"
STORE = "penstock/stores/postgres.py"
LANES = "penstock/stores/postgres_lanes.py"
BELL = "penstock/stores/postgres_bell.py"
CONTRACT = ("tests/contract", "-kpostgres")


def found_in(
    test: str, name: str, file: str, old: str, new: str
) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"postgres: {name}", file, old, new, (f"tests/postgres/test_{test}.py",)


def found_by_contract(name: str, file: str, old: str, new: str) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"postgres: {name}", file, old, new, CONTRACT


MUTANTS = [
    found_by_contract("a job that ended again is as old as its first end", SQL, "WHERE whole.ended_at <= listed.at AND", "WHERE"),
    found_by_contract("a job that was revived holds up those behind it", "penstock/stores/postgres.py", "            if len(old) == limit:\n                break\n", "            break\n"),
    found_in("turns", "what is due is let into line by nobody", ADMIT, "            if not stepping:\n", "            if False:\n"),
    found_in("turns", "a start that comes with a refusal is written the short way", PAGES, "self.landed or self._settled or self._mentioned", "self.landed or self._settled"),
    found_in("hosts", "the claim without a lock on the ledger", SQL, "ORDER BY scope <> 'host', scope, name FOR UPDATE;", "ORDER BY scope <> 'host', scope, name;"),
    found_in("daemons", "four daemons and no lock on the ledger", SQL, "ORDER BY scope <> 'host', scope, name FOR UPDATE;", "ORDER BY scope <> 'host', scope, name;"),
    found_in("hosts", "only the host's row is locked", ADMIT, "            lock_ledger(keys),\n", '            lock_ledger(key for key in keys if key[0] == "host"),\n'),
    found_in("many", "a kind's first job has no row to count in", PAGES, '        ("add_ledger", columns(sorted(keys_of(demand)))),\n', '        ("now", None),\n'),
    found_in("many", "units come back to what was read before", SQL, "SET units = ledger.units + new.units, running = ledger.running + new.running", "SET units = greatest(0, new.units), running = greatest(0, new.running)"),
    found_in("many", "a loan is decided on rows that were not locked", ADMIT, "                self._need(set(keys_of(verdict.loan)), verdict.loan)\n", "                of.demands.make([verdict.loan])\n"),
    found_in("many", "a changed head is started all the same", SQL, "WHERE q.line > 0 AND q.events = seen.events FOR UPDATE OF q SKIP LOCKED),", "FOR UPDATE OF q SKIP LOCKED),"),
    found_in("many", "a round waits for whoever is at a job", SQL, "AND q.events = seen.events FOR UPDATE OF q SKIP LOCKED;", "AND q.events = seen.events FOR UPDATE OF q;"),
    found_in("many", "what was guessed to be there is written though it is not", SQL, "1 / (count(*) = cardinality(%(heads)s::bigint[]))::integer AS there", "least(1, 1 + count(*)) AS there"),
    found_in("many", "the depth limit is checked and then written", SUBMIT, "            and exact\n", "            and not exact\n"),
    found_in("many", "a deadlock is the caller's problem", LINK, "errors.DeadlockDetected, ", ""),
    found_in("many", "two who use a key at once see a broken index", LINK, ", errors.UniqueViolation):", "):"),
    found_in("many", "numbers are given before the commit", SQL, "FROM new),\ncounted AS (INSERT INTO penstock.tally (addon_id, state, jobs) VALUES (%(addon_id)s, 'QUEUED', cardinality(%(ids)s::text[]))),\ntold AS (\n    INSERT INTO penstock.trail (batch, size, events)\n    SELECT batch, %(size)s::integer, %(events)s::text FROM", "FROM new),\ncounted AS (INSERT INTO penstock.tally (addon_id, state, jobs) VALUES (%(addon_id)s, 'QUEUED', cardinality(%(ids)s::text[]))),\ntold AS (\n    INSERT INTO penstock.trail (batch, size, events, until)\n    SELECT batch, %(size)s::integer, %(events)s::text, %(size)s::integer + coalesce((SELECT max(until) FROM penstock.trail), 0) FROM"),
    found_in("many", "backslashes are JSON's", WIRE, '    if b"\\\\" in listed:\n', '    if b"\\0" in listed:\n'),
    found_in("caller", "numbers follow the drawing, not the commit", SQL, "    UPDATE penstock.trail SET until = (SELECT value FROM penstock.mark WHERE name = 'event') + new.upto\n", "    UPDATE penstock.trail SET until = new.batch * 100\n"),
    found_in("caller", "ours is committed for the caller", CALLER, "    if not con.autocommit and con.info.transaction_status == TransactionStatus.IDLE:\n", "    if con.closed:\n"),
    found_in("caller", "a refusal leaves half of ours", CALLER, "    with con.transaction():\n", "    if True:\n"),
    found_in("caller", "a depth limit locks everybody out until the caller commits", STORE, "exact=False)", "exact=True)"),
    found_in("caller", "nobody is told after the caller's commit", STORE, '            session.leave("ring", {"channel": self._bell.channel, "by": ""})\n', ""),
    found_in("outages", "a dead connection is the caller's problem", LINK, "                if error.sqlstate not in _GONE or dead:\n", "                if dead >= 0:\n"),
    found_in("outages", "an unanswered commit is written again", LINK, "return not void", "return False"),
    found_in("crashes", "what a crash took back counts as committed", LINK, "return not void", "return True"),
    found_in("crashes", "a transaction proves its commit by nothing", LINK, "            if token is None or not self._was_committed(token):\n                raise\n", "            pass\n"),
    found_in("outages", "a commit that may still come is looked for once", SQL, "INSERT INTO penstock.commit_marker AS marker (token, void) VALUES (%(token)s::uuid, true)\nON CONFLICT (token) DO UPDATE SET void = marker.void RETURNING void;", "SELECT NOT EXISTS (SELECT FROM penstock.commit_marker WHERE token = %(token)s::uuid);"),
    found_in("outages", "the proofs of commits pile up", LINK, "            self._answered.append(token)\n", "            pass\n"),
    found_in("outages", "what a dead process proved stays for ever", STORE, '        session.leave("forget_commits", None)\n', ""),
    found_in("outages", "an outcome that cannot be found out is a failure", LINK, "            else:\n                return not void\n        raise _unknown()\n", "            else:\n                return not void\n        return False\n"),
    found_in("outages", "an unanswered submit is not made again", LINK, "                self._make_sure(lambda: self._send_once(name, values))\n", "                pass\n"),
    found_in("outages", "what meets itself is refused", LINK, "            except errors.UniqueViolation:\n                return None\n", ""),
    found_in("outages", "a dead connection is one that may have committed", LINK, "            con.look()\n", ""),
    found_in("outages", "what may have been written is written again", "penstock/stores/writer.py", " or _perhaps_written(error):", ":"),
    found_in("submits", "a statement's answer is taken for its commit's", WIRE, "        for result in left:  # of a transaction whose statements were all well, and its commit was not\n            _check(result)\n", ""),
    found_in("submits", "a submit overtakes what was handed in before", LANES, "if self._closed or not self._writer.idle:", "if self._closed:"),
    found_in("submits", "a job is as old as the first of its kind", "penstock/stores/postgres_forms.py", '            "ready_at": b"%d" % its.ready_at,\n', ""),
    found_in("submits", "one alone ends at the character NUL", WIRE, '.replace("\\0", _NUL).encode()\n\n\n_encode', ".encode()\n\n\n_encode"),
    found_in("submits", "every piece tells of all", SUBMIT, "(self._told() if last else _NOTHING_TOLD)", "self._told()"),
    found_in("notices", "a notice is waited for", WIRE, "        if behind and _failure(results) is not None:\n", "        if behind:\n"),
    found_in("notices", "what was not told is told alone", BELL, "        self._due = False  # it tells of all that was committed before\n", ""),
    found_in("outages", "the time stops with the server", LINK, "            if not known:\n                raise\n", "            raise\n"),
    found_in("schema", "two make the schema at once", SCHEMA, '            con.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])\n', ""),
    found_in("schema", "a newer schema is used", SCHEMA, 'marks["needs"] > known', 'marks["needs"] < 0'),
    found_in("schema", "whatever has been added to is refused", SCHEMA, 'marks["needs"] > known', 'marks["schema"] > known'),
    found_in("schema", "statements are prepared behind a pooler", LINK, "con.prepares = not self._manners.pooler", "con.prepares = True"),
    found_in("notices", "nobody listens", BELL, "                    con.exchange([(self._listening, None)])\n", ""),
    found_in("notices", "a notice that fails is the commit's failure", WIRE, "        with suppress(psycopg.Error):\n", "        if True:\n"),
    found_in("notices", "every commit has a notice of its own", BELL, "monotonic() >= self._told_at + GAP_SEC", "self._by_notice"),
    found_in("notices", "nobody looks", BELL, "return before != self._seen", "return False"),
    found_by_contract("an older fence may settle", APPLY, " and job.fence == step.fence)", ")"),
    found_by_contract("a stale phase may settle", APPLY, "dispatch is None or dispatch.phase != step.source", "dispatch is None"),
    found_by_contract("a report counts after the lease", APPLY, "return not (step.while_valid and dispatch.expires_at <= now)", "return True"),
    found_by_contract("a heartbeat revives an expired lease", RENEW, " or run.expires_at <= self._now:", ":"),
    found_by_contract("a job's own trail misses a batch", PAGES, "            self._mentioned.add(no)\n", "            pass\n"),
    found_by_contract("what is forgotten is still told", EVENTS, " or told[_JOB_ID] in gone else", " else"),
    found_by_contract("units are not given back", APPLY, "            self.pages.hold(host, demand, -n)\n", "            pass\n"),
    found_by_contract("labels are no part of what a job asks for", "penstock/core/demand.py", "        labels=tuple(sorted(intent.labels)) if intent.labels else (),\n", ""),
    found_by_contract("one label of several will do", "penstock/core/admission.py", "return tuple(label for label in demand.labels if label not in self.labels)", "return () if set(demand.labels) & self.labels else demand.labels"),
    found_by_contract("a job is completed after its lease", SQL, " AND d.expires_at > t.now AND", " AND"),
    found_by_contract("a job that was told to stop is completed by the quick way", SQL, " AND d.phase = 'leased' AND d.expires_at > t.now", " AND d.phase <> 'ended' AND d.expires_at > t.now"),
    found_in("outages", "what is in flight is found by what its lease was at first", RENEW, "            run.hastened |= beat.expires_at < run.expires_at\n", ""),
    found_by_contract("a flight stays when all of it has ended", SQL, "AND flight.live <= landed.runs),", "AND flight.live < landed.runs),"),
    found_by_contract("what is done is in no sheet, and never forgotten", COMPLETE, "            judged.pages.settled([one.no for one in found], found[0].at)\n", ""),
    found_by_contract("an event counts in a row where nobody looks", APPLY, "            self.run.moved, self.run.events = True, self.events\n", "            self.run.moved = True\n"),
    found_in("schema", "a plan is kept for as long as its connection", WIRE, "ANEW: Final = frozenset({16, 128, 1_024})", "ANEW: Final = frozenset({0})"),
    found_in("places", "what ran when the schema came is in no flight", STEP, "LEFT JOIN penstock.flight f ON d.phase <> 'ended'", "LEFT JOIN penstock.flight f ON d.phase = 'ended'"),
    found_in("many", "sums that have not changed are written anew", PAGES, "            if units or running\n", ""),
    found_in("many", "jobs that hold the same units as others before them are not counted", PAGES, "            if units or running\n", "            if units\n"),
    found_in("many", "rounds behind each other pass over what was put first", STORE, "        self._turns.admitting.appetite.disturbed()\n        self._committed(any(", "        self._committed(any("),
    found_in("many", "a line that nobody knew waits for a look at everything", FLOOR, "if b > a + 1]", "if b < a]"),
    found_in("turns", "jobs are made ready only when their start is committed", WIRE, "            self.pgconn.send_flush_request()\n            return _Sent(asked, known, first, values.then)\n", "            return _Sent(asked, known, first, values.then)\n"),
    found_in("turns", "what is made ready counts before it is committed", LINK, "lambda rows: self._after.append(prepare(rows)))))", "lambda rows: prepare(rows)())))"),
    found_in("turns", "all that a turn read knows of itself", PAGES, "        left, self._events = self._events, []\n", "        left = self._events\n"),
]  # fmt: skip
