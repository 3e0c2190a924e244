-- The statements of the PostgreSQL store, by name. SQLite's work row by row; these take arrays, because a round trip takes longer
-- than a row. `penstock` stands for the chosen schema. Every name is qualified, because some statements run in a transaction of
-- the caller's, with the caller's search_path.

-- name: now
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- name: opening
-- Read after the locks: the moment of the transaction, the batch of its events, and whether a dependency exists. A child that is submitted later
-- finds the locks, and waits for this transaction.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, nextval('penstock.batch'),
       EXISTS (SELECT 1 FROM penstock.dependency WHERE status = 'open');

-- name: mark_commit
-- The proof that this transaction was committed. The proofs of transactions whose answers have arrived are deleted.
WITH answered AS (DELETE FROM penstock.commit_marker WHERE token = ANY(%(answered)s::uuid[]))
INSERT INTO penstock.commit_marker (token) VALUES (%(token)s::uuid);

-- name: settle_commit
-- False: the transaction with this token was committed. True: it was not, and now cannot be. Because the token is unique, this statement waits for the
-- transaction if that still runs, and makes it fail if it comes later. Repeating the statement returns the same answer.
INSERT INTO penstock.commit_marker AS marker (token, void) VALUES (%(token)s::uuid, true)
ON CONFLICT (token) DO UPDATE SET void = marker.void RETURNING void;

-- name: forget_commits
-- Deletes the proofs of processes that ended before their next transaction.
DELETE FROM penstock.commit_marker WHERE at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - 86400000000;

-- name: notify
SELECT pg_notify(%(channel)s, %(by)s);

-- name: notify_unsynced
-- The notice need not be on disk; listeners get it only after the commit.
SELECT pg_notify(%(channel)s, %(by)s), set_config('synchronous_commit', 'off', true);

-- name: committed_events
-- How many events were ever committed, numbered or not.
SELECT (SELECT value FROM penstock.mark WHERE name = 'event')
       + (SELECT coalesce(sum(size), 0) FROM penstock.trail WHERE until IS NULL);

-- name: class_by_key
SELECT no FROM penstock.admission_class WHERE key = %(key)s;

-- name: classes_by_no
SELECT no, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels
FROM penstock.admission_class WHERE no = ANY(%(nos)s::integer[]);

-- name: add_class
INSERT INTO penstock.admission_class (key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (key) DO NOTHING;

-- name: add_ledger
INSERT INTO penstock.ledger (scope, name) SELECT * FROM unnest(%s::text[], %s::text[]) ON CONFLICT DO NOTHING;

-- name: lock_depth
SELECT pg_advisory_xact_lock(hashtextextended('penstock.depth', 0));

-- name: queued
SELECT addon_id, sum(jobs)::bigint FROM penstock.tally WHERE state = 'QUEUED' GROUP BY addon_id;

-- name: jobs_by_key
SELECT addon_id, idempotency_key, job_id, state, body_hash FROM penstock.job_full
WHERE (addon_id, idempotency_key) IN (SELECT * FROM unnest(%s::text[], %s::text[]));

-- name: submit_jobs
-- Jobs that are submitted together usually differ only by their ids and payloads, so the other values come once for each `kind`. Alone, this statement is a
-- transaction by itself, and draws the number of its batch of events. Of several statements with one batch the last one writes the events.
WITH drawn AS MATERIALIZED (SELECT coalesce(%(batch)s::bigint, nextval('penstock.batch')) AS batch),
new AS MATERIALIZED (
    SELECT nextval('penstock.job_no') AS no, * FROM unnest(%(ids)s::text[], %(payloads)s::text[], %(kinds)s::integer[]) AS new (job_id, payload, kind)),
queued AS (
    INSERT INTO penstock.queue (no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec,
                                max_runtime_sec, max_active_sec)
    SELECT no, job_id, (%(class_no)s::integer[])[kind], (%(line)s::smallint[])[kind], (%(turn)s::bigint[])[kind], (%(ready_at)s::bigint[])[kind],
           (%(urgent_at)s::bigint[])[kind], (%(deadline_at)s::bigint[])[kind], (%(priority)s::integer[])[kind], 0, 1,
           (%(expected_sec)s::double precision[])[kind], (%(max_runtime_sec)s::bigint[])[kind], (%(max_active_sec)s::bigint[])[kind] FROM new),
counted AS (
    INSERT INTO penstock.tally (addon_id, state, jobs)
    SELECT addon_id, 'QUEUED', jobs FROM unnest(%(addons)s::text[], %(counts)s::bigint[]) AS more (addon_id, jobs)),
told AS (
    INSERT INTO penstock.trail (batch, size, events)
    SELECT batch, %(size)s::integer, %(events)s::text FROM drawn WHERE %(size)s::integer > 0)
INSERT INTO penstock.job (no, job_id, addon_id, class_no, created_at, ready_at, priority, earliest_start_at, deadline_at, expected_sec, max_runtime_sec,
                          max_active_sec, submitted_in, payload, tags, unit, cost_limit, time_sensitive, retry_delays, preemptible, dependencies, idempotency_key, body_hash)
SELECT no, job_id, (%(addon_id)s::text[])[kind], (%(class_no)s::integer[])[kind], (%(created_at)s::bigint[])[kind], (%(ready_at)s::bigint[])[kind],
       (%(priority)s::integer[])[kind], (%(earliest_start_at)s::bigint[])[kind], (%(deadline_at)s::bigint[])[kind],
       (%(expected_sec)s::double precision[])[kind], (%(max_runtime_sec)s::bigint[])[kind], (%(max_active_sec)s::bigint[])[kind],
       (SELECT batch FROM drawn), payload, (%(tags)s::text[])[kind], (%(unit)s::text[])[kind], (%(cost_limit)s::bigint[])[kind],
       (%(time_sensitive)s::integer[])[kind], (%(retry_delays)s::text[])[kind], (%(preemptible)s::integer[])[kind], (%(dependencies)s::text[])[kind], (%(idempotency_key)s::text[])[kind], (%(body_hash)s::text[])[kind]
FROM new;

-- name: submit_alike
-- As `submit_jobs`, for jobs of one kind, or a single job: the other values are no arrays.
WITH drawn AS MATERIALIZED (SELECT coalesce(%(batch)s::bigint, nextval('penstock.batch')) AS batch),
new AS MATERIALIZED (SELECT nextval('penstock.job_no') AS no, * FROM unnest(%(ids)s::text[], %(payloads)s::text[]) AS new (job_id, payload)),
queued AS (
    INSERT INTO penstock.queue (no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec,
                                max_runtime_sec, max_active_sec)
    SELECT no, job_id, %(class_no)s::integer, %(line)s::smallint, %(turn)s::bigint, %(ready_at)s::bigint, %(urgent_at)s::bigint,
           %(deadline_at)s::bigint, %(priority)s::integer, 0, 1, %(expected_sec)s::double precision, %(max_runtime_sec)s::bigint,
           %(max_active_sec)s::bigint FROM new),
counted AS (INSERT INTO penstock.tally (addon_id, state, jobs) VALUES (%(addon_id)s, 'QUEUED', cardinality(%(ids)s::text[]))),
told AS (
    INSERT INTO penstock.trail (batch, size, events)
    SELECT batch, %(size)s::integer, %(events)s::text FROM drawn WHERE %(size)s::integer > 0)
INSERT INTO penstock.job (no, job_id, addon_id, class_no, created_at, ready_at, priority, earliest_start_at, deadline_at, expected_sec, max_runtime_sec,
                          max_active_sec, submitted_in, payload, tags, unit, cost_limit, time_sensitive, retry_delays, preemptible, dependencies, idempotency_key, body_hash)
SELECT no, job_id, %(addon_id)s, %(class_no)s::integer, %(created_at)s::bigint, %(ready_at)s::bigint, %(priority)s::integer,
       %(earliest_start_at)s::bigint, %(deadline_at)s::bigint, %(expected_sec)s::double precision, %(max_runtime_sec)s::bigint,
       %(max_active_sec)s::bigint, (SELECT batch FROM drawn), payload, %(tags)s, %(unit)s, %(cost_limit)s::bigint, %(time_sensitive)s::integer,
       %(retry_delays)s, %(preemptible)s::integer, %(dependencies)s, %(idempotency_key)s, %(body_hash)s
FROM new;

-- name: step_into_line
-- Jobs that are ready or urgent now enter their queues. Bounded: the next round takes the rest. MATERIALIZED makes each part run once: a plan that
-- ran one per row would move more jobs than the bound. Rows that another transaction is changing are left for the next round.
WITH now AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS at),
ready AS MATERIALIZED (
    SELECT no, urgent_at FROM penstock.queue WHERE line = 0 AND ready_at <= (SELECT at FROM now) ORDER BY ready_at LIMIT %(most)s FOR UPDATE SKIP LOCKED),
urgent AS MATERIALIZED (
    SELECT no FROM penstock.queue WHERE line = 1 AND urgent_at IS NOT NULL AND urgent_at <= (SELECT at FROM now)
    ORDER BY urgent_at LIMIT %(most)s FOR UPDATE SKIP LOCKED),
due AS (SELECT no, CASE WHEN urgent_at <= (SELECT at FROM now) THEN 2 ELSE 1 END AS line FROM ready UNION ALL SELECT no, 2 FROM urgent)
UPDATE penstock.queue SET line = due.line FROM due WHERE queue.no = due.no;

-- name: heads
-- The first jobs of every line, without a lock: a round that starts nothing must not write. The recursion goes from class to class through the
-- index: one step per line, however long the lines are. The last row says how long it took.
WITH RECURSIVE active (class_no) AS (
    (SELECT class_no FROM penstock.queue WHERE line > 0 ORDER BY class_no LIMIT 1)
    UNION ALL
    SELECT (SELECT queue.class_no FROM penstock.queue WHERE line > 0 AND queue.class_no > active.class_no ORDER BY queue.class_no LIMIT 1)
    FROM active WHERE active.class_no IS NOT NULL
)
SELECT active.class_no, standing, j.*
FROM active CROSS JOIN (VALUES (1), (2)) AS two (standing) CROSS JOIN LATERAL (
    SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
    FROM penstock.queue WHERE queue.class_no = active.class_no AND queue.line = standing AND queue.line > 0 ORDER BY turn, no LIMIT %(most)s) AS j
WHERE active.class_no IS NOT NULL
UNION ALL SELECT NULL, NULL, (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint,
                 NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL;

-- name: heads_from
-- As `heads`: known lines from the position of their first job, and lines of other classes from the beginning.
WITH RECURSIVE known AS MATERIALIZED (
    SELECT * FROM unnest(%s::integer[], %s::integer[], %s::bigint[], %s::bigint[]) AS known (class_no, line, turn, no)),
new (class_no, upto) AS (
    SELECT (SELECT class_no FROM penstock.queue WHERE line > 0 AND class_no > gap.behind AND class_no < gap.upto ORDER BY class_no LIMIT 1), gap.upto
    FROM unnest(%s::integer[], %s::integer[]) AS gap (behind, upto)
    UNION ALL
    SELECT (SELECT queue.class_no FROM penstock.queue WHERE line > 0 AND queue.class_no > new.class_no AND queue.class_no < new.upto
            ORDER BY queue.class_no LIMIT 1), new.upto
    FROM new WHERE new.class_no IS NOT NULL
),
lines AS (
    SELECT * FROM known UNION ALL SELECT class_no, standing, -9223372036854775808, 0 FROM new CROSS JOIN (VALUES (1), (2)) AS two (standing)
    WHERE class_no IS NOT NULL)
SELECT lines.class_no, lines.line, j.*
FROM lines CROSS JOIN LATERAL (
    SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
    FROM penstock.queue WHERE queue.class_no = lines.class_no AND queue.line = lines.line AND queue.line > 0 AND (queue.turn, queue.no) >= (lines.turn, lines.no)
    ORDER BY turn, no LIMIT %s) AS j
UNION ALL SELECT NULL, NULL, (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint,
                 NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL;

-- name: in_line
SELECT class_no, line, no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
FROM penstock.queue
WHERE class_no = %(class_no)s AND line = %(line)s AND line > 0 AND (turn, no) > (%(turn)s, %(no)s) ORDER BY turn, no LIMIT %(most)s;

-- name: running
SELECT m.cost_units, l.admitted_at, l.ends_at FROM penstock.dispatch_in_flight l JOIN penstock.admission_class m ON m.no = l.class_no WHERE l.host = %(host)s;

-- name: start_timeouts
SELECT start FROM penstock.job WHERE no = %(no)s;

-- name: lock_ledger
-- Every transaction locks in this order, so that there are no deadlocks.
SELECT scope, name, units, running FROM penstock.ledger WHERE (scope, name) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
ORDER BY scope <> 'host', scope, name FOR UPDATE;

-- name: lock_heads
-- Returns only jobs that are as the round saw them, and does not wait for a transaction that has locked one.
SELECT q.no FROM unnest(%s::bigint[], %s::integer[]) AS seen (no, events) JOIN penstock.queue q ON q.no = seen.no
WHERE q.line > 0 AND q.events = seen.events FOR UPDATE OF q SKIP LOCKED;

-- name: start_jobs
-- Starts the picks of a round, if all heads that it saw (the picks, then the denied and passed over ones) can be locked and are as they were. If one is not,
-- `refuse_round` ends the statement, and nothing is written. Returns the leased jobs, with the columns of `job_columns`.
WITH mine AS MATERIALIZED (
    SELECT q.ctid AS place, q.job_id, q.class_no, q.fence + 1 AS fence, seen.*
    FROM unnest(%(heads)s::bigint[], %(seen)s::integer[], %(leased)s::boolean[], %(ends_at)s::bigint[], %(stop_at)s::bigint[], %(stop_for)s::text[])
        AS seen (no, events, leased, ends_at, stop_at, stop_for) JOIN penstock.queue q ON q.no = seen.no
    WHERE q.line > 0 AND q.events = seen.events FOR UPDATE OF q SKIP LOCKED),
all_of_them AS MATERIALIZED (
    SELECT CASE WHEN count(*) = cardinality(%(heads)s::bigint[]) THEN 1 ELSE penstock.refuse_round() END AS there FROM mine),
taken AS (
    DELETE FROM penstock.queue USING mine WHERE queue.ctid = mine.place AND mine.leased IS NOT NULL AND (SELECT there FROM all_of_them) = 1),
made AS (
    INSERT INTO penstock.dispatch (dispatch_id, job_no, class_no, host, fence, phase, events, started_in, admitted_at, expires_at, started_at,
                                   ends_at, stop_at, stop_for, worker)
    SELECT job_id || '.' || fence, no, class_no, %(host)s::text, fence, CASE WHEN leased THEN 'leased' ELSE 'reserved' END, events + 1 + leased::integer,
           %(batch)s::bigint, %(now)s::bigint, CASE WHEN leased THEN %(lease_until)s::bigint ELSE %(reserved_until)s::bigint END,
           CASE WHEN leased THEN %(now)s::bigint END, ends_at, stop_at, stop_for, CASE WHEN leased THEN %(worker)s::text ELSE '' END
    FROM mine WHERE leased IS NOT NULL)
SELECT j.no, j.job_id, 'RUNNING', j.created_at, j.ready_at, j.not_before, mine.fence, j.crash, j.unavailable, j.error, 0, j.active, j.spent,
       j.spent_before, j.progress, '', NULL, NULL, NULL, NULL, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.class_no,
       j.payload, j.tags, j.unit, j.cost_limit, j.time_sensitive, j.retry_delays, j.preemptible, j.dependencies, NULL::integer, 0
FROM mine JOIN penstock.job j ON j.no = mine.no WHERE mine.leased;

-- name: insert_flight
INSERT INTO penstock.flight (batch, host, jobs, standalone_lease, live, expires_at, stop_at)
VALUES (%(batch)s, %(host)s, %(jobs)s::bigint[], %(standalone_lease)s, %(live)s, %(expires_at)s, %(stop_at)s);

-- name: insert_standalone_lease
INSERT INTO penstock.dispatch (dispatch_id, class_no, host, fence, phase, events, started_in, admitted_at, expires_at, started_at, worker)
VALUES (%(dispatch_id)s, %(class_no)s, %(host)s, 0, 'leased', 0, %(batch)s, %(now)s, %(lease_until)s, %(now)s, %(worker)s);

-- name: deny_jobs
UPDATE penstock.queue SET denied = new.denied, denied_data = new.data, denied_at = new.at, events = new.events
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::integer[], %s::bigint[]) AS new (denied, data, at, events, no) WHERE queue.no = new.no;

-- name: pass_jobs
UPDATE penstock.queue SET passed_at = %s WHERE no = ANY(%s::bigint[]);

-- name: write_batch
-- Writes ledger rows, accounts, job counts, events, ended dispatches by flight, and ended jobs. The locks of the ledger rows also
-- guard accounts and flights.
WITH held AS (
    UPDATE penstock.ledger SET units = ledger.units + new.units, running = ledger.running + new.running
    FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[]) AS new (scope, name, units, running)
    WHERE ledger.scope = new.scope AND ledger.name = new.name),
accounted AS (
    INSERT INTO penstock.addon (addon_id, weight, paused, average, units, at)
    SELECT * FROM unnest(%s::text[], %s::integer[], %s::integer[], %s::double precision[], %s::bigint[], %s::bigint[])
    ON CONFLICT (addon_id) DO UPDATE SET weight = excluded.weight, paused = excluded.paused, average = excluded.average,
                                         units = excluded.units, at = excluded.at),
counted AS (INSERT INTO penstock.tally (addon_id, state, jobs) SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])),
ended AS MATERIALIZED (SELECT * FROM unnest(%s::bigint[], %s::integer[]) AS ended (batch, dispatches)),
empty AS (DELETE FROM penstock.flight USING ended WHERE flight.batch = ended.batch AND flight.live <= ended.dispatches),
fewer AS (UPDATE penstock.flight SET live = live - ended.dispatches FROM ended WHERE flight.batch = ended.batch AND flight.live > ended.dispatches),
told AS (INSERT INTO penstock.trail (batch, size, events)
         SELECT * FROM (SELECT %s::bigint AS batch, %s::integer AS size, %s::text AS events) AS new WHERE size > 0),
over AS (INSERT INTO penstock.ended_jobs (batch, at, jobs)
         SELECT * FROM (SELECT %s::bigint AS batch, %s::bigint AS at, %s::bigint[] AS jobs) AS new WHERE cardinality(jobs) > 0)
INSERT INTO penstock.mention (job_no, batch) SELECT no, %s::bigint FROM unnest(%s::bigint[]) AS new (no);

-- name: write_start
-- As `write_batch`, if nothing has ended and no event needs a mention: each part takes time, even without rows.
WITH held AS (
    UPDATE penstock.ledger SET units = ledger.units + more.units, running = ledger.running + more.running
    FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[]) AS more (scope, name, units, running)
    WHERE ledger.scope = more.scope AND ledger.name = more.name),
accounted AS (
    INSERT INTO penstock.addon (addon_id, weight, paused, average, units, at)
    SELECT * FROM unnest(%s::text[], %s::integer[], %s::integer[], %s::double precision[], %s::bigint[], %s::bigint[])
    ON CONFLICT (addon_id) DO UPDATE SET weight = excluded.weight, paused = excluded.paused, average = excluded.average,
                                         units = excluded.units, at = excluded.at),
counted AS (INSERT INTO penstock.tally (addon_id, state, jobs) SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[]))
INSERT INTO penstock.trail (batch, size, events)
SELECT * FROM (SELECT %s::bigint AS batch, %s::integer AS size, %s::text AS events) AS new WHERE size > 0;

-- name: accounts
SELECT addon_id, weight, paused, average, units, at FROM penstock.addon WHERE addon_id = ANY(%(addons)s::text[]);

-- name: complete
-- Completes the jobs of these leases, if the lease is still valid. All of them end at one moment.
WITH t AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)
UPDATE penstock.dispatch d SET phase = 'ended', events = d.events + 1, ended_at = t.now, how = 'completed', result = done.result
FROM unnest(%(ids)s::text[], %(results)s::text[]) AS done (dispatch_id, result) CROSS JOIN t
WHERE d.dispatch_id = done.dispatch_id AND d.phase = 'leased' AND d.expires_at > t.now AND d.job_no IS NOT NULL
RETURNING d.dispatch_id, d.job_no, d.events, d.host, d.class_no, d.started_in, t.now;

-- name: lock_jobs
-- A transaction that starts or completes a job locks its row in `queue` or `dispatch`, and not this one.
SELECT no FROM penstock.job WHERE job_id = ANY(%(ids)s::text[]) ORDER BY no FOR UPDATE;

-- name: lock_queued
SELECT no FROM penstock.queue WHERE no = ANY(ARRAY(SELECT no FROM penstock.job WHERE job_id = ANY(%(ids)s::text[]))) ORDER BY no FOR UPDATE;

-- name: lock_dispatches
-- The named dispatches, and those in flight of the jobs.
SELECT dispatch_id FROM penstock.dispatch WHERE dispatch_id = ANY(%(ids)s::text[] || ARRAY(
    SELECT job_id || '.' || (tried + 1) FROM penstock.job WHERE job_id = ANY(%(jobs)s::text[])))
ORDER BY dispatch_id FOR UPDATE;

-- name: move_jobs
-- `waits`: the job is queued after this. `dispatch_id`: the dispatch that it had before, whose row counts its events.
WITH new AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::text[], %s::integer[], %s::integer[], %s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::integer[],
                         %s::integer[], %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::boolean[], %s::text[])
        AS new (no, state, tried, events, ended_at, active, crash, unavailable, error, start, spent_before, denied, denied_data, denied_at, passed_at, waits,
                dispatch_id)),
gone AS (DELETE FROM penstock.queue USING new WHERE queue.no = new.no AND NOT new.waits),
queued AS (UPDATE penstock.queue SET events = new.events FROM new WHERE queue.no = new.no AND new.waits),
dispatched AS (UPDATE penstock.dispatch SET events = new.events FROM new WHERE dispatch.dispatch_id = new.dispatch_id)
UPDATE penstock.job SET state = new.state, tried = new.tried, events = new.events, ended_at = new.ended_at, active = new.active, crash = new.crash,
       unavailable = new.unavailable, error = new.error, start = new.start, spent_before = new.spent_before,
       denied = new.denied, denied_data = new.denied_data, denied_at = new.denied_at, passed_at = new.passed_at
FROM new WHERE job.no = new.no;

-- name: place_jobs
-- Runs after `move_jobs`, and reads the columns that it wrote.
WITH new AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::bigint[], %s::bigint[],
                         %s::bigint[])
        AS new (no, line, turn, ready_at, urgent_at, priority, class_no, earliest_start_at, not_before, deadline_at)),
placed AS (
    INSERT INTO penstock.queue AS queue (no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec,
                                max_runtime_sec, max_active_sec, active, denied, denied_data, denied_at, passed_at)
    SELECT new.no, j.job_id, new.class_no, new.line, new.turn, new.ready_at, new.urgent_at, new.deadline_at, new.priority, j.tried, j.events, j.expected_sec,
           j.max_runtime_sec, j.max_active_sec, j.active, j.denied, j.denied_data, j.denied_at, j.passed_at FROM new JOIN penstock.job j ON j.no = new.no
    ON CONFLICT (no) DO UPDATE SET class_no = excluded.class_no, line = CASE WHEN queue.unmet > 0 THEN -1 ELSE excluded.line END, turn = excluded.turn, ready_at = excluded.ready_at,
           urgent_at = excluded.urgent_at, deadline_at = excluded.deadline_at, priority = excluded.priority, active = excluded.active)
UPDATE penstock.job SET ready_at = new.ready_at, priority = new.priority, class_no = new.class_no, earliest_start_at = new.earliest_start_at,
       not_before = new.not_before, deadline_at = new.deadline_at
FROM new WHERE job.no = new.no;

-- name: move_dispatches
UPDATE penstock.dispatch SET phase = new.phase, started_at = new.started_at, expires_at = new.expires_at, stop_at = new.stop_at,
       stop_for = new.stop_for, reason = new.reason, worker = new.worker, ended_at = new.ended_at, how = new.how, result = new.result,
       failure = new.failure
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[],
            %s::text[], %s::text[])
     AS new (dispatch_id, phase, started_at, expires_at, stop_at, stop_for, reason, worker, ended_at, how, result, failure)
WHERE dispatch.dispatch_id = new.dispatch_id;

-- name: due_sooner
UPDATE penstock.flight SET expires_at = least(flight.expires_at, new.expires_at), stop_at = least(flight.stop_at, new.stop_at)
FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS new (batch, expires_at, stop_at) WHERE flight.batch = new.batch;

-- name: lock_jobs_of
SELECT no FROM penstock.job WHERE no = ANY(ARRAY(SELECT job_no FROM penstock.dispatch WHERE dispatch_id = ANY(%(ids)s::text[])))
ORDER BY no FOR UPDATE;

-- name: dispatches_for_beats
SELECT d.dispatch_id, d.phase, d.expires_at, d.reason, m.addon_id, d.spent, d.progress, d.fence, d.job_no, j.job_id, j.spent, j.spent_before,
       d.events, d.started_in, j.progress, j.cost_limit, j.unit, d.pid
FROM penstock.dispatch d JOIN penstock.admission_class m ON m.no = d.class_no LEFT JOIN penstock.job j ON j.no = d.job_no
WHERE d.dispatch_id = ANY(%(ids)s::text[]) ORDER BY d.dispatch_id FOR UPDATE OF d;

-- name: renew
UPDATE penstock.dispatch SET expires_at = new.expires_at, progress = new.progress, spent = new.spent, events = new.events, pid = new.pid
FROM unnest(%s::text[], %s::bigint[], %s::double precision[], %s::bigint[], %s::integer[], %s::integer[])
     AS new (dispatch_id, expires_at, progress, spent, events, pid)
WHERE dispatch.dispatch_id = new.dispatch_id;

-- name: beat_jobs
UPDATE penstock.job SET progress = new.progress, spent = new.spent
FROM unnest(%s::bigint[], %s::double precision[], %s::bigint[]) AS new (no, progress, spent) WHERE job.no = new.no;

-- name: set_checkpoints
INSERT INTO penstock.checkpoint (job_no, at, fence, data) SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::text[])
ON CONFLICT (job_no) DO UPDATE SET at = excluded.at, fence = excluded.fence, data = excluded.data;

-- name: spend
INSERT INTO penstock.budget (addon_id, period, spent) SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])
ON CONFLICT (addon_id, period) DO UPDATE SET spent = budget.spent + excluded.spent RETURNING addon_id, period, spent;

-- name: reorder
-- Locks and writes only rows whose key is wrong: every start of a process reads the whole queue here, and usually changes nothing. A row that
-- another transaction is moving is skipped, because that transaction writes the right key.
WITH looked_at AS (SELECT no, turn <> ready_at - priority * %(per_point)s::bigint AS wrong
                   FROM penstock.queue WHERE no > %(after)s ORDER BY no LIMIT %(most)s),
     locked AS (SELECT no FROM penstock.queue WHERE no IN (SELECT no FROM looked_at WHERE wrong) ORDER BY no FOR UPDATE SKIP LOCKED),
     changed AS (UPDATE penstock.queue SET turn = ready_at - priority * %(per_point)s::bigint WHERE no IN (SELECT no FROM locked))
SELECT coalesce(max(no), 0) FROM looked_at;

-- name: old_ended_jobs
SELECT batch, at, jobs FROM penstock.ended_jobs WHERE at < %(before)s ORDER BY at, batch LIMIT %(most)s OFFSET %(seen)s FOR UPDATE SKIP LOCKED;

-- name: lock_ended
SELECT no FROM penstock.job WHERE no = ANY(%(nos)s::bigint[]) ORDER BY no FOR UPDATE;

-- name: old_jobs
-- Without jobs that were retried since they were listed: if they have ended again, a later list has them.
SELECT job_full.no, job_id, addon_id, state FROM unnest(%(nos)s::bigint[], %(moments)s::bigint[]) AS listed (no, at)
JOIN penstock.job_full ON job_full.no = listed.no WHERE job_full.ended_at <= listed.at AND state <> 'BLOCKED' AND listed.no <> ALL(ARRAY(@awaited));

-- name: awaited
-- Jobs for which a child waits or may wait again, and members of batches that have not ended.
SELECT DISTINCT d.parent FROM penstock.dependency d LEFT JOIN penstock.job_group g ON g.no = d.child
WHERE d.parent = ANY(%(nos)s::bigint[]) AND (d.status = 'open' OR g.no IS NOT NULL AND g.state IS NULL)

-- name: batches_of
-- Locks the batches: another transaction may prune other jobs of the same batch. ARRAY, and not IN: after a wait for a locked row the server runs the
-- query again with that row alone; IN would then join the row only to the first batch of the view, and leave it out.
SELECT batch, until IS NOT NULL, events FROM penstock.trail
WHERE batch = ANY(ARRAY(SELECT batch FROM penstock.event_batch WHERE job_no = ANY(%(nos)s::bigint[]))) ORDER BY batch FOR UPDATE;

-- name: forget
WITH mentions AS (DELETE FROM penstock.mention WHERE job_no = ANY(%(nos)s::bigint[])),
     dependencies AS (DELETE FROM penstock.dependency WHERE parent = ANY(%(nos)s::bigint[]) OR child = ANY(%(nos)s::bigint[])),
     checkpoints AS (DELETE FROM penstock.checkpoint WHERE job_no = ANY(%(nos)s::bigint[])),
     dispatches AS (DELETE FROM penstock.dispatch d USING unnest(%(ids)s::text[]) AS gone (job_id)
                    WHERE d.dispatch_id > gone.job_id || '.' AND d.dispatch_id < gone.job_id || '/')
DELETE FROM penstock.job WHERE no = ANY(%(nos)s::bigint[]);

-- name: shorten_ended_jobs
UPDATE penstock.ended_jobs SET jobs = kept.jobs
FROM (SELECT batch, array_agg(no) AS jobs FROM unnest(%s::bigint[], %s::bigint[]) AS kept (batch, no) GROUP BY batch) AS kept
WHERE ended_jobs.batch = kept.batch;

-- name: forget_ended_jobs
DELETE FROM penstock.ended_jobs WHERE batch = ANY(%(batches)s::bigint[]);

-- name: forget_batches
DELETE FROM penstock.trail WHERE batch = ANY(%(batches)s::bigint[]);

-- name: rewrite_batches
UPDATE penstock.trail SET events = new.events FROM unnest(%s::bigint[], %s::text[]) AS new (batch, events) WHERE trail.batch = new.batch;

-- name: unnumbered
SELECT EXISTS (SELECT 1 FROM penstock.trail WHERE until IS NULL);

-- name: lock_numbers
SELECT value FROM penstock.mark WHERE name = 'event' FOR UPDATE;

-- name: number_events
-- Numbers the events that are committed by now; another transaction that does this waits. So new events come after all numbered ones.
-- Transactions draw their batches after their locks, so in the order of batches an effect never comes before its cause.
WITH new AS (
    SELECT batch, size, sum(size) OVER (ORDER BY batch) AS upto
    FROM (SELECT batch, size FROM penstock.trail WHERE until IS NULL ORDER BY batch LIMIT 10000) AS waiting),
numbered AS (
    UPDATE penstock.trail SET until = (SELECT value FROM penstock.mark WHERE name = 'event') + new.upto
    FROM new WHERE trail.batch = new.batch RETURNING trail.size)
UPDATE penstock.mark SET value = value + (SELECT coalesce(sum(size), 0) FROM numbered) WHERE name = 'event';

-- name: add_up_tally
WITH parts AS (DELETE FROM penstock.tally WHERE (SELECT count(*) FROM penstock.tally) > 200 RETURNING addon_id, state, jobs)
INSERT INTO penstock.tally (addon_id, state, jobs) SELECT addon_id, state, sum(jobs) FROM parts GROUP BY addon_id, state HAVING sum(jobs) <> 0;

-- name: events
-- Whole batches of events, until there are `most` events. The reader may have read a part of the first one.
SELECT until - size, events, until FROM (
    SELECT until, size, events, sum(size) OVER (ORDER BY until) - size AS before
    FROM (SELECT until, size, events FROM penstock.trail WHERE until > %(after)s ORDER BY until LIMIT %(most)s) AS next) AS counted
WHERE before < %(most)s ORDER BY until;

-- name: events_of
-- As `events`, but only batches that may have an event of one of these kinds.
SELECT until - size, events, until FROM penstock.trail
WHERE until > %(after)s AND EXISTS (SELECT 1 FROM unnest(%(kinds)s::text[]) AS kind WHERE position(kind IN events) > 0)
ORDER BY until LIMIT %(most)s;

-- name: newest
SELECT coalesce(max(until), 0) FROM penstock.trail;

-- name: events_of_job
SELECT t.until - t.size, t.events FROM penstock.trail t WHERE t.until IS NOT NULL AND t.batch = ANY(ARRAY(
    SELECT batch FROM penstock.event_batch WHERE job_no = (SELECT no FROM penstock.job WHERE job_id = %(job_id)s))) ORDER BY t.batch;

-- name: job_columns
-- A condition follows this and `dispatch_columns`.
SELECT j.no, j.job_id, j.state, j.created_at, j.ready_at, j.not_before, j.fence, j.crash, j.unavailable, j.error, j.start, j.active, j.spent,
       j.spent_before, j.progress, j.denied, j.denied_data, j.denied_at, j.passed_at, j.ended_at, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.class_no,
       j.payload, j.tags, j.unit, j.cost_limit, j.time_sensitive, j.retry_delays, j.preemptible, j.dependencies, j.pid, j.unmet, j.events
FROM penstock.job_full j

-- name: dispatch_columns
SELECT d.dispatch_id, d.job_id, d.addon_id, d.host, d.fence, d.phase, d.admitted_at, d.expires_at, d.started_at, d.ends_at, d.stop_at, d.stop_for,
       d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure, d.pid, d.class_no,
       d.started_in
FROM penstock.dispatch_full d

-- name: jobs_before
SELECT q.no, (SELECT count(*) FROM (
    SELECT 1 FROM penstock.queue b WHERE b.class_no = q.class_no AND b.line = q.line AND b.line > 0 AND (b.turn, b.no) < (q.turn, q.no) LIMIT %(most)s) AS b)
FROM penstock.queue q WHERE q.line > 0 AND q.no = ANY(%(nos)s::bigint[]);

-- name: jobs_by_id
@job_columns WHERE j.job_id = ANY(%(ids)s::text[]);

-- name: dispatches_by_id
@dispatch_columns WHERE d.dispatch_id = ANY(%(ids)s::text[]);

-- name: job_results
SELECT j.job_id, j.state, d.result FROM penstock.job_full j
LEFT JOIN penstock.dispatch d ON d.dispatch_id = j.job_id || '.' || j.fence AND j.state = 'DONE' WHERE j.job_id = ANY(%(ids)s::text[]);

-- name: results_of_parents
-- As `job_results`, for the parents of these jobs.
SELECT d.child, j.job_id, j.state, a.result FROM penstock.dependency d
CROSS JOIN LATERAL (SELECT * FROM penstock.job_full WHERE no = d.parent OFFSET 0) AS j
LEFT JOIN penstock.dispatch a ON a.dispatch_id = j.job_id || '.' || j.fence AND j.state = 'DONE' WHERE d.child = ANY(%(nos)s::bigint[]);

-- name: attempts
@dispatch_columns WHERE d.dispatch_id > %(job_id)s || '.' AND d.dispatch_id < %(job_id)s || '/' ORDER BY d.fence;

-- name: live
@dispatch_columns WHERE d.dispatch_id = ANY(ARRAY(SELECT dispatch_id FROM penstock.dispatch_in_flight)) AND d.phase = ANY(%(phases)s::text[])
AND (%(addon_id)s::text IS NULL OR d.addon_id = %(addon_id)s) ORDER BY d.admitted_at, d.dispatch_id LIMIT %(most)s;

-- name: checkpoint
SELECT c.data FROM penstock.checkpoint c JOIN penstock.job j ON j.no = c.job_no WHERE j.job_id = %(job_id)s;

-- name: ledger
SELECT scope, name, units, running FROM penstock.ledger WHERE running > 0;

-- name: spent
SELECT addon_id, period, spent FROM penstock.budget WHERE period IN (%(day)s, %(month)s);

-- name: addons
SELECT addon_id, weight, paused, average, units, at FROM penstock.addon ORDER BY addon_id;

-- name: tally
SELECT addon_id, state, sum(jobs)::bigint FROM penstock.tally GROUP BY addon_id, state HAVING sum(jobs) > 0;

-- name: expired
WITH t AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)
SELECT dispatch_id FROM penstock.dispatch_in_flight WHERE lease_from <= (SELECT now FROM t) AND expires_at <= (SELECT now FROM t)
ORDER BY expires_at, dispatch_id LIMIT %(most)s;

-- name: to_stop
WITH t AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)
SELECT dispatch_id FROM penstock.dispatch_in_flight WHERE limit_from <= (SELECT now FROM t) AND stop_at <= (SELECT now FROM t) AND phase = 'leased'
ORDER BY stop_at LIMIT %(most)s;

-- name: past_deadline
SELECT job_id FROM penstock.queue
WHERE deadline_at IS NOT NULL AND deadline_at <= coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
ORDER BY deadline_at LIMIT %(most)s;

-- name: alarm
-- The leases of a flight are read only if its earliest moment has passed, because they may have been renewed since.
WITH t AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)
SELECT least(
    (SELECT 0 FROM penstock.pending_end LIMIT 1),
    (SELECT ready_at FROM penstock.queue WHERE line = 0 ORDER BY ready_at LIMIT 1),
    (SELECT urgent_at FROM penstock.queue WHERE line = 1 AND urgent_at IS NOT NULL ORDER BY urgent_at LIMIT 1),
    (SELECT deadline_at FROM penstock.queue WHERE deadline_at IS NOT NULL ORDER BY deadline_at LIMIT 1),
    (SELECT min(expires_at) FROM penstock.flight WHERE expires_at > t.now), (SELECT min(stop_at) FROM penstock.flight WHERE stop_at > t.now),
    (SELECT min(expires_at) FROM penstock.dispatch_in_flight WHERE lease_from <= t.now),
    (SELECT min(stop_at) FROM penstock.dispatch_in_flight WHERE limit_from <= t.now AND phase = 'leased')) FROM t;

-- name: learned
SELECT name, seq, data FROM penstock.learned ORDER BY name;

-- name: learned_cursor
SELECT seq FROM penstock.learned WHERE name = '';

-- name: move_learned_cursor
-- Returns no row if another host has read further in the meantime.
INSERT INTO penstock.learned (name, seq, data) VALUES ('', %(upto)s, '')
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq WHERE learned.seq = %(after)s RETURNING seq;

-- name: set_learned
INSERT INTO penstock.learned (name, seq, data) SELECT row ->> 0, %(upto)s, row ->> 1 FROM jsonb_array_elements(%(rows)s::jsonb) AS row
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq, data = excluded.data;

-- name: forget_learned
DELETE FROM penstock.learned WHERE name = ANY(%(names)s::text[]);

-- name: observed_jobs
-- The columns that learning reads, without payload and result.
SELECT j.job_id, j.class_no, j.priority, j.tags, j.expected_sec, j.created_at, j.fence, d.started_at, d.ended_at, d.how, coalesce(d.spent, 0),
       j.ended_at IS NOT NULL
FROM penstock.job_full j LEFT JOIN penstock.dispatch d ON d.dispatch_id = j.job_id || '.' || j.fence WHERE j.job_id = ANY(%(ids)s::text[]);

-- name: register_host
-- The row of another living scheduler is not changed: then no row is returned.
INSERT INTO penstock.host (host, instance, capacity, quiet, labels, version, url, started_at, seen_at, until, workers)
VALUES (%(host)s, %(instance)s, %(capacity)s, %(quiet)s, %(labels)s, %(version)s, %(url)s, %(started_at)s, %(seen_at)s, %(until)s, %(workers)s)
ON CONFLICT (host) DO UPDATE SET instance = excluded.instance, capacity = excluded.capacity, quiet = excluded.quiet, labels = excluded.labels,
    version = excluded.version, url = excluded.url, started_at = excluded.started_at, seen_at = excluded.seen_at, until = excluded.until,
    workers = excluded.workers
WHERE host.instance = excluded.instance OR host.until <= excluded.seen_at
RETURNING draining;

-- name: leave_host
DELETE FROM penstock.host WHERE host = %(host)s AND instance = %(instance)s AND draining = 0;

-- name: lose_host
UPDATE penstock.host SET until = seen_at WHERE host = %(host)s AND instance = %(instance)s;

-- name: drain_host
UPDATE penstock.host SET draining = %(draining)s WHERE host = %(host)s RETURNING host;

-- name: forget_hosts
DELETE FROM penstock.host WHERE until < %(before)s AND draining = 0;

-- name: hosts
SELECT h.host, h.instance, h.capacity, h.quiet, h.labels, h.version, h.url, h.started_at, h.seen_at, h.until, h.draining, coalesce(l.units, 0), h.workers
FROM penstock.host h LEFT JOIN penstock.ledger l ON l.scope = 'host' AND l.name = h.host ORDER BY h.host;

-- name: schedule_columns
SELECT s.body, s.state, s.version FROM penstock.schedule s

-- name: schedules
@schedule_columns ORDER BY s.name;

-- name: due_schedules
@schedule_columns WHERE s.due_at <= %(due_by)s ORDER BY s.name;

-- name: schedule_by_name
@schedule_columns WHERE s.name = %(name)s;

-- name: lock_schedule
SELECT version FROM penstock.schedule WHERE name = %(name)s FOR UPDATE;

-- name: schedule_alarm
SELECT min(due_at) FROM penstock.schedule WHERE due_at IS NOT NULL;

-- name: record_load
INSERT INTO penstock.load_hour (host, hour, busy, at) VALUES (%(host)s, %(hour)s, %(busy)s, %(at)s)
ON CONFLICT (host, hour) DO UPDATE SET busy = load_hour.busy + %(newest)s * (excluded.busy - load_hour.busy), at = excluded.at;

-- name: waiting_by_labels
SELECT labels, count(*), sum(cost_units) FROM penstock.queue JOIN penstock.admission_class ON admission_class.no = queue.class_no
WHERE line > 0 GROUP BY labels;

-- name: load_hours
SELECT hour, avg(busy) FROM penstock.load_hour GROUP BY hour;

-- name: add_schedule
INSERT INTO penstock.schedule (name, addon_id, version, due_at, body, state)
VALUES (%(name)s, %(addon_id)s, %(version)s, %(due_at)s, %(body)s, %(state)s);

-- name: set_schedule
UPDATE penstock.schedule SET addon_id = %(addon_id)s, version = %(version)s, due_at = %(due_at)s, body = %(body)s, state = %(state)s
WHERE name = %(name)s;

-- name: remove_schedule
DELETE FROM penstock.schedule WHERE name = %(name)s;

-- name: jobs_with_dependencies
-- The jobs for which others wait, those that may wait for others, and members of batches.
SELECT no FROM penstock.job WHERE EXISTS (SELECT 1 FROM penstock.dependency WHERE status = 'open' UNION ALL SELECT 1 FROM penstock.dependency WHERE child > 4611686018427387904)
AND job_id = ANY(%(ids)s::text[])
AND (EXISTS (SELECT 1 FROM penstock.dependency d WHERE d.parent = job.no AND (d.status = 'open' OR d.child > 4611686018427387904))
     OR EXISTS (SELECT 1 FROM penstock.dependency d WHERE d.child = job.no AND d.status = 'open'));

-- name: insert_dependencies
-- The arrays have the ids of parents and children, which may be groups.
INSERT INTO penstock.dependency (parent, child, condition, if_unmet)
SELECT coalesce((SELECT no FROM penstock.job WHERE job_id = asked.parent), (SELECT no FROM penstock.job_group WHERE group_id = asked.parent)),
       coalesce((SELECT no FROM penstock.job WHERE job_id = asked.child), (SELECT no FROM penstock.job_group WHERE group_id = asked.child)),
       asked.condition, asked.if_unmet
FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[]) AS asked (parent, child, condition, if_unmet);

-- name: known_jobs
SELECT no, job_id FROM penstock.job WHERE job_id = ANY(%(ids)s::text[]);

-- name: waiting_for_groups
-- Which of these parents wait for which of these batches, directly or through others.
WITH RECURSIVE waiting (group_id, no) AS (
    SELECT g.group_id, g.no FROM penstock.job_group g WHERE g.group_id = ANY(%(batches)s::text[])
    UNION
    SELECT w.group_id, d.child FROM waiting w JOIN penstock.dependency d ON d.parent = w.no AND d.status = 'open'),
parent (job_id, no) AS (
    SELECT job_id, no FROM penstock.job WHERE job_id = ANY(%(parents)s::text[])
    UNION ALL
    SELECT group_id, no FROM penstock.job_group WHERE group_id = ANY(%(parents)s::text[]))
SELECT w.group_id, p.job_id FROM waiting w JOIN parent p ON p.no = w.no WHERE p.job_id <> w.group_id;

-- name: parents_that_end
-- Jobs and groups by number, each with the last child that was resolved; and the jobs of dispatches, which are locked: a child that is submitted later
-- finds the locks, and waits for this transaction.
(SELECT no, after FROM unnest(%(nos)s::bigint[], %(after)s::bigint[]) AS given (no, after)
 UNION ALL SELECT job_no, 0 FROM penstock.dispatch WHERE dispatch_id = ANY(%(ids)s::text[]) AND job_no IS NOT NULL)

-- name: lock_children
-- Locks the rows that `children` returns: the jobs, then their rows in the queue. No transaction adds a child to a locked parent.
WITH locked AS MATERIALIZED (
    SELECT no FROM penstock.job WHERE no = ANY(ARRAY(
        SELECT d.child FROM @parents_that_end AS ended CROSS JOIN LATERAL (
            SELECT d.child FROM penstock.dependency d CROSS JOIN LATERAL (SELECT FROM penstock.queue WHERE no = d.child OFFSET 0) AS q
            WHERE d.parent = ended.no AND d.status = 'open' AND d.child > ended.after ORDER BY d.child LIMIT %(most)s) AS d))
    ORDER BY no FOR UPDATE)
SELECT no FROM penstock.queue WHERE no = ANY(ARRAY(SELECT no FROM locked)) ORDER BY no FOR UPDATE;

-- name: lock_groups_of
-- Locks the groups of which these jobs and groups are members.
@group_columns WHERE g.no = ANY(ARRAY(
    SELECT child FROM penstock.dependency WHERE parent = ANY(ARRAY(SELECT no FROM @parents_that_end AS ended))
    AND status = 'open' AND child > 4611686018427387904))
ORDER BY g.no FOR UPDATE;

-- name: children
-- The queued children of parents that ended, and the batches of which these are members. A failed child is judged again when it is retried.
SELECT d.parent, '', '', d.child, d.job_id, d.condition, d.if_unmet, d.unmet, d.events,
       d.class_no, d.ready_at, d.urgent_at, d.priority, d.fence, d.expected_sec, d.passed_at, d.denied, d.max_runtime_sec, d.max_active_sec, d.active
FROM @parents_that_end AS ended CROSS JOIN LATERAL (
    SELECT d.parent, d.child, coalesce(q.job_id, g.group_id) AS job_id, d.condition, d.if_unmet, coalesce(q.unmet, 0) AS unmet, coalesce(q.events, 0) AS events,
           q.class_no, q.ready_at, q.urgent_at, q.priority, q.fence, q.expected_sec, q.passed_at, q.denied, q.max_runtime_sec, q.max_active_sec, q.active
    FROM penstock.dependency d LEFT JOIN LATERAL (SELECT * FROM penstock.queue WHERE no = d.child OFFSET 0) AS q ON true
    LEFT JOIN LATERAL (SELECT * FROM penstock.job_group WHERE no = d.child OFFSET 0) AS g ON true
    WHERE d.parent = ended.no AND d.status = 'open' AND d.child > ended.after AND coalesce(q.no, g.no) IS NOT NULL ORDER BY d.child LIMIT %(most)s) AS d
ORDER BY d.parent, d.child;

-- name: memberships
SELECT d.parent, '', '', d.child, g.group_id, d.condition, d.if_unmet, 0, 0
FROM penstock.dependency d JOIN penstock.job_group g ON g.no = d.child
WHERE d.parent = ANY(%(members)s::bigint[]) AND d.status = 'met' ORDER BY d.parent, d.child;

-- name: parents
-- The parents of children that begin to wait.
SELECT d.parent, coalesce(p.job_id, g.group_id), coalesce(p.state, @group_state), d.child, (SELECT job_id FROM penstock.job WHERE no = d.child),
       d.condition, d.if_unmet, 0, 0
FROM penstock.dependency d LEFT JOIN LATERAL (SELECT * FROM penstock.job_full WHERE no = d.parent OFFSET 0) AS p ON true
LEFT JOIN LATERAL (SELECT * FROM penstock.job_group WHERE no = d.parent OFFSET 0) AS g ON true
WHERE d.child = ANY(%(children)s::bigint[]) AND d.status = 'open' ORDER BY d.child, d.parent;

-- name: group_state
-- The state of a group as the parent of `d`. For `failed` with `any` the first failure is enough.
coalesce(g.state, CASE WHEN g.failed > 0 AND d.condition = 'failed' AND d.if_unmet = 'any' THEN 'FAILED' ELSE 'RUNNING' END)

-- name: settle_dependencies
UPDATE penstock.dependency SET status = %s FROM unnest(%s::bigint[], %s::bigint[]) AS asked (parent, child)
WHERE dependency.child = asked.child AND dependency.parent = asked.parent;

-- name: void_dependencies
UPDATE penstock.dependency SET status = 'void' WHERE status = 'open' AND child = ANY(%s::bigint[]);

-- name: wait_for_parents
UPDATE penstock.queue SET unmet = asked.unmet, line = -1 FROM unnest(%s::bigint[], %s::integer[]) AS asked (no, unmet) WHERE queue.no = asked.no;

-- name: release_children
-- As `ordering.released_place`.
WITH released AS (
    UPDATE penstock.queue SET unmet = 0, events = events + 1, ready_at = greatest(ready_at, %(now)s::bigint),
           turn = greatest(ready_at, %(now)s::bigint) - priority * %(per_point)s::bigint,
           line = CASE WHEN ready_at > %(now)s::bigint THEN 0 WHEN urgent_at <= %(now)s::bigint THEN 2 ELSE 1 END
    WHERE no = ANY(%(nos)s::bigint[]) RETURNING no, ready_at)
UPDATE penstock.job SET ready_at = released.ready_at FROM released WHERE job.no = released.no;

-- name: postpone_ends
INSERT INTO penstock.pending_end (no, state, after) SELECT * FROM unnest(%s::bigint[], %s::text[], %s::bigint[])
ON CONFLICT (no) DO UPDATE SET state = excluded.state, after = excluded.after;

-- name: take_pending_ends
WITH taken AS MATERIALIZED (SELECT no FROM penstock.pending_end ORDER BY no LIMIT %(most)s FOR UPDATE SKIP LOCKED)
DELETE FROM penstock.pending_end e USING taken WHERE e.no = taken.no
RETURNING e.no, coalesce((SELECT job_id FROM penstock.job WHERE no = e.no), (SELECT group_id FROM penstock.job_group WHERE no = e.no)), e.state, e.after;

-- name: pending_ends
SELECT count(*) FROM penstock.pending_end;

-- name: dependencies
-- The dependencies of a job or a group, then those on it.
SELECT coalesce((SELECT job_id FROM penstock.job WHERE no = d.parent), (SELECT group_id FROM penstock.job_group WHERE no = d.parent)),
       coalesce((SELECT job_id FROM penstock.job WHERE no = d.child), (SELECT group_id FROM penstock.job_group WHERE no = d.child)), d.condition, d.status FROM (
    (SELECT 0 AS side, parent, child, condition, status FROM penstock.dependency
     WHERE child = (@number_of) ORDER BY parent LIMIT %(most)s)
    UNION ALL
    (SELECT 1, parent, child, condition, status FROM penstock.dependency
     WHERE parent = (@number_of) ORDER BY child LIMIT %(most)s)) AS d
ORDER BY d.side, d.parent, d.child;

-- name: number_of
SELECT coalesce((SELECT no FROM penstock.job WHERE job_id = %(job_id)s), (SELECT no FROM penstock.job_group WHERE group_id = %(job_id)s))

-- name: audit_dependencies
-- Children whose number of open dependencies is wrong, or that are in a ready queue while they wait; and parents that ended and whose children were
-- not resolved.
SELECT q.job_id FROM penstock.queue q WHERE q.unmet <> (SELECT count(*) FROM penstock.dependency d WHERE d.child = q.no AND d.status = 'open')
UNION ALL SELECT job_id FROM penstock.queue WHERE (unmet > 0) <> (line < 0)
UNION ALL SELECT p.job_id FROM penstock.dependency d JOIN penstock.queue q ON q.no = d.child JOIN penstock.job_full p ON p.no = d.parent
WHERE d.status = 'open' AND d.parent NOT IN (SELECT no FROM penstock.pending_end)
AND (p.state IN ('DONE', 'CANCELED') OR p.state = 'FAILED' AND NOT (d.condition = 'ok' AND d.if_unmet = 'wait'))
UNION ALL SELECT q.job_id FROM penstock.dependency d JOIN penstock.queue q ON q.no = d.child JOIN penstock.job_group g ON g.no = d.parent
WHERE d.status = 'open' AND d.parent NOT IN (SELECT no FROM penstock.pending_end) AND g.state IS NOT NULL
AND NOT (g.state = 'FAILED' AND d.condition = 'ok' AND d.if_unmet = 'wait')
UNION ALL SELECT 'number ' || parent FROM penstock.dependency
WHERE parent NOT IN (SELECT no FROM penstock.job UNION ALL SELECT no FROM penstock.job_group)
OR child NOT IN (SELECT no FROM penstock.job UNION ALL SELECT no FROM penstock.job_group);

-- name: audit_groups
SELECT group_id FROM penstock.job_group g WHERE group_id >= 'batch:' AND group_id < 'batch;'
AND (total - done - failed - canceled <> (SELECT count(*) FROM penstock.dependency d WHERE d.child = g.no AND d.status = 'open')
     OR (state IS NULL) <> (is_open > 0 OR total > done + failed + canceled) OR (state IS NULL) <> (ended_at IS NULL));

-- name: audit_dispatches
SELECT d.dispatch_id, d.host, d.cost_units, d.addon_id, d.class_no, d.phase, d.fence, j.job_id, j.state, j.fence
FROM penstock.dispatch_full d LEFT JOIN penstock.job_full j ON j.no = d.job_no WHERE d.phase <> 'ended';

-- name: audit_tally
SELECT addon_id, state, count(*) FROM penstock.job_full GROUP BY addon_id, state;

-- name: audit_in_flight
WITH live AS MATERIALIZED (SELECT dispatch_id, job_no, started_in FROM penstock.dispatch WHERE phase <> 'ended'),
found AS MATERIALIZED (SELECT dispatch_id, job_no FROM penstock.dispatch_in_flight)
SELECT job_id FROM penstock.job_full WHERE state IN ('DISPATCHING', 'RUNNING') AND no NOT IN (SELECT job_no FROM found WHERE job_no IS NOT NULL)
UNION ALL SELECT dispatch_id FROM live WHERE dispatch_id NOT IN (SELECT dispatch_id FROM found)
UNION ALL SELECT 'in flight ' || batch FROM penstock.flight f WHERE live <> (SELECT count(*) FROM live WHERE live.started_in = f.batch);

-- name: audit_trail
-- OFFSET 0, here and below, makes the plan go from events to jobs: the other way it would read the trail for every job.
WITH told AS MATERIALIZED (
    SELECT job_id, count(*) AS events, min(n) AS first, max(n) AS last FROM penstock.event WHERE job_id IS NOT NULL GROUP BY job_id)
SELECT told.job_id FROM told LEFT JOIN LATERAL (SELECT events FROM penstock.job_full WHERE job_full.job_id = told.job_id OFFSET 0) AS j ON true
WHERE (told.events, told.first, told.last) IS DISTINCT FROM (j.events, 1, j.events)
UNION ALL SELECT min(job_id) FROM penstock.job HAVING count(*) <> (SELECT count(*) FROM told)
UNION ALL SELECT e.job_id FROM (SELECT DISTINCT job_id, batch FROM penstock.event WHERE job_id IS NOT NULL OFFSET 0) AS e
CROSS JOIN LATERAL (SELECT no FROM penstock.job WHERE job.job_id = e.job_id OFFSET 0) AS j
WHERE (SELECT count(*) FROM penstock.event_batch t WHERE t.job_no = j.no AND t.batch = e.batch) = 0;

-- name: audit_fold
SELECT e.job_id FROM (SELECT job_id, n, state FROM penstock.event WHERE job_id IS NOT NULL OFFSET 0) AS e
CROSS JOIN LATERAL (SELECT state FROM penstock.job_full WHERE job_full.job_id = e.job_id AND job_full.events = e.n OFFSET 0) AS j WHERE e.state <> j.state;

-- name: gather_flights
-- This statement and the next three convert rows of a file to this schema (`copying.py`).
INSERT INTO penstock.flight (batch, host, jobs, live, expires_at, stop_at)
SELECT nextval('penstock.batch'), host, jobs, cardinality(jobs), expires_at, stop_at
FROM (SELECT host, array_agg(job_no) AS jobs, min(expires_at) AS expires_at, min(stop_at) AS stop_at
      FROM penstock.dispatch WHERE phase <> 'ended' AND job_no IS NOT NULL GROUP BY host) AS live;

-- name: gather_standalone_leases
INSERT INTO penstock.flight (batch, host, jobs, standalone_lease, live, expires_at, stop_at)
SELECT nextval('penstock.batch'), host, '{}', dispatch_id, 1, expires_at, stop_at FROM penstock.dispatch WHERE phase <> 'ended' AND job_no IS NULL;

-- name: join_flights
UPDATE penstock.dispatch d SET started_in = f.batch FROM penstock.flight f
WHERE d.phase <> 'ended' AND f.host = d.host AND f.standalone_lease IS NOT DISTINCT FROM CASE WHEN d.job_no IS NULL THEN d.dispatch_id END;

-- name: gather_ended_jobs
INSERT INTO penstock.ended_jobs (batch, at, jobs)
SELECT nextval('penstock.batch'), at, jobs
FROM (SELECT max(ended_at) AS at, array_agg(no ORDER BY ended_at, no) AS jobs
      FROM (SELECT no, ended_at, row_number() OVER (ORDER BY ended_at, no) / 1000 AS part, ended_at / 3600000000 AS hour FROM penstock.job
            WHERE ended_at IS NOT NULL AND state <> 'BLOCKED') AS old GROUP BY hour, part ORDER BY hour, part) AS parts;

-- name: array_columns
SELECT a.body, a.state FROM penstock.job_array a

-- name: array_by_id
@array_columns WHERE a.array_id = %(array_id)s;

-- name: lock_arrays
@array_columns WHERE a.array_id = ANY(%(ids)s::text[]) ORDER BY a.array_id FOR UPDATE;

-- name: newest_arrays
@array_columns ORDER BY a.created_at DESC, a.array_id DESC LIMIT %(most)s;

-- name: open_arrays
@array_columns WHERE a.ended_at IS NULL ORDER BY a.created_at DESC, a.array_id DESC LIMIT %(most)s;

-- name: add_array
INSERT INTO penstock.job_array (array_id, addon_id, created_at, ended_at, body, state)
VALUES (%(array_id)s, %(addon_id)s, %(created_at)s, %(ended_at)s, %(body)s, %(state)s);

-- name: set_array
UPDATE penstock.job_array SET ended_at = %(ended_at)s, state = %(state)s WHERE array_id = %(array_id)s;

-- name: failed_indices
SELECT chunk, failed FROM penstock.array_chunk WHERE array_id = %(array_id)s AND failed <> 0 ORDER BY chunk;

-- name: indices_again
SELECT chunk, again FROM penstock.array_chunk WHERE array_id = %(array_id)s AND chunk >= %(chunk)s AND again <> 0 ORDER BY chunk LIMIT %(most)s;

-- name: fail_indices
INSERT INTO penstock.array_chunk (array_id, chunk, failed)
SELECT %(array_id)s::text, chunk, bits FROM unnest(%(chunks)s::integer[], %(bits)s::bigint[]) AS new (chunk, bits)
ON CONFLICT (array_id, chunk) DO UPDATE SET failed = array_chunk.failed | excluded.failed;

-- name: repeat_indices
-- These indices have jobs again.
UPDATE penstock.array_chunk c SET again = c.again & ~new.bits FROM unnest(%(chunks)s::integer[], %(bits)s::bigint[]) AS new (chunk, bits)
WHERE c.array_id = %(array_id)s AND c.chunk = new.chunk;

-- name: retry_indices
UPDATE penstock.array_chunk SET again = again | failed, failed = 0 WHERE array_id = %(array_id)s AND failed <> 0;

-- name: forget_array_chunks
DELETE FROM penstock.array_chunk WHERE array_id IN (SELECT array_id FROM penstock.job_array WHERE ended_at < %(before)s AND NOT EXISTS (
    SELECT 1 FROM penstock.job_group g JOIN penstock.dependency d ON d.parent = g.no AND d.status = 'open' WHERE g.group_id = job_array.array_id));

-- name: forget_arrays
DELETE FROM penstock.job_array WHERE ended_at < %(before)s AND NOT EXISTS (
    SELECT 1 FROM penstock.job_group g JOIN penstock.dependency d ON d.parent = g.no AND d.status = 'open' WHERE g.group_id = job_array.array_id);

-- name: group_columns
SELECT g.no, g.group_id, g.addon_id, g.created_at, g.is_open, g.total, g.done, g.failed, g.canceled, g.state, g.ended_at, g.digest FROM penstock.job_group g

-- name: group_by_id
@group_columns WHERE g.group_id = %(group_id)s;

-- name: lock_groups
-- In the order of their numbers, which is the order of locks.
@group_columns WHERE g.group_id = ANY(%(ids)s::text[]) ORDER BY g.no FOR UPDATE;

-- name: groups_by_no
@group_columns WHERE g.no = ANY(%(nos)s::bigint[]) ORDER BY g.no FOR UPDATE;

-- name: newest_batches
@group_columns WHERE g.group_id >= 'batch:' AND g.group_id < 'batch;' AND (%(addon_id)s::text IS NULL OR g.addon_id = %(addon_id)s::text)
ORDER BY g.created_at DESC, g.no DESC LIMIT %(most)s;

-- name: add_group
INSERT INTO penstock.job_group (group_id, addon_id, created_at, is_open, total, done, failed, canceled, state, ended_at, digest)
VALUES (%(group_id)s, %(addon_id)s, %(created_at)s, %(is_open)s, %(total)s, %(done)s, %(failed)s, %(canceled)s, %(state)s, %(ended_at)s, %(digest)s);

-- name: set_group
UPDATE penstock.job_group SET is_open = %(is_open)s, total = %(total)s, done = %(done)s, failed = %(failed)s, canceled = %(canceled)s, state = %(state)s,
       ended_at = %(ended_at)s
WHERE group_id = %(group_id)s;

-- name: forget_groups
WITH gone AS (DELETE FROM penstock.job_group g
              WHERE g.ended_at < %(before)s AND NOT EXISTS (SELECT 1 FROM penstock.dependency d WHERE d.parent = g.no AND d.status = 'open') RETURNING no)
DELETE FROM penstock.dependency WHERE parent = ANY(ARRAY(SELECT no FROM gone)) OR child = ANY(ARRAY(SELECT no FROM gone));

-- name: states_of
SELECT j.job_id, j.state FROM penstock.job_full j WHERE j.job_id = ANY(%(ids)s::text[]);
