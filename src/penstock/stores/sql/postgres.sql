-- Every statement of the PostgreSQL store, by name. Where SQLite works row by row, here a statement takes arrays: a round trip
-- costs more than a row. `penstock` stands for the schema that was chosen; every name is qualified, because some of these run
-- in a transaction of the caller's, whose search_path is the caller's.

-- name: now
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- name: opening
-- Asked for after the locks: the moment that the transaction judges by, its id, by which a lost answer to COMMIT can be found out, and the
-- batch that it tells its events in.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, pg_current_xact_id()::text, nextval('penstock.batch');

-- name: fate
SELECT pg_xact_status(%(xid)s::xid8);

-- name: ring
SELECT pg_notify(%(channel)s, %(by)s);

-- name: ring_alone
-- Nobody need find it on the disk, and whoever listens hears it only after the commit.
SELECT pg_notify(%(channel)s, %(by)s), set_config('synchronous_commit', 'off', true);

-- name: told
-- How many events have ever been committed, numbered or not.
SELECT (SELECT value FROM penstock.mark WHERE name = 'event')
       + (SELECT coalesce(sum(size), 0) FROM penstock.trail WHERE until IS NULL);

-- name: demand_by_key
SELECT no FROM penstock.demand WHERE key = %(key)s;

-- name: demands_by_no
SELECT no, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels
FROM penstock.demand WHERE no = ANY(%(nos)s::integer[]);

-- name: add_demand
INSERT INTO penstock.demand (key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (key) DO NOTHING;

-- name: add_ledger
INSERT INTO penstock.ledger (scope, name) SELECT * FROM unnest(%s::text[], %s::text[]) ON CONFLICT DO NOTHING;

-- name: lock_depth
SELECT pg_advisory_xact_lock(hashtextextended('penstock.depth', 0));

-- name: queued
SELECT addon_id, sum(jobs)::bigint FROM penstock.tally WHERE state = 'QUEUED' GROUP BY addon_id;

-- name: jobs_by_key
SELECT j.addon_id, j.idempotency_key, j.job_id, j.state, i.body_hash FROM penstock.job j JOIN penstock.intent i USING (no)
WHERE (j.addon_id, j.idempotency_key) IN (SELECT * FROM unnest(%s::text[], %s::text[]));

-- name: add_jobs
WITH new AS MATERIALIZED (
    SELECT nextval('penstock.job_no') AS no, %s::bigint AS batch, *
    FROM unnest(%s::text[], %s::text[], %s::text[], %s::integer[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::integer[],
                %s::bigint[], %s::bigint[], %s::bigint[], %s::double precision[], %s::bigint[], %s::bigint[], %s::text[],
                %s::text[], %s::text[], %s::bigint[], %s::integer[], %s::text[], %s::text[])
         AS new (job_id, payload, addon_id, demand, line, turn, ready_at, urgent_at, priority,
                 created_at, earliest_start_at, deadline_at, expected_sec, max_runtime_sec, max_active_sec, idempotency_key,
                 tags, unit, cost_limit, time_sensitive, retry_delays, body_hash)),
jobs AS (
    INSERT INTO penstock.job (no, job_id, addon_id, state, demand, line, turn, ready_at, urgent_at, priority, events, created_at,
                              earliest_start_at, deadline_at, expected_sec, max_runtime_sec, max_active_sec, idempotency_key, submitted_in)
    SELECT no, job_id, addon_id, 'QUEUED', demand, line, turn, ready_at, urgent_at, priority, 1, created_at,
           earliest_start_at, deadline_at, expected_sec, max_runtime_sec, max_active_sec, idempotency_key, batch FROM new)
INSERT INTO penstock.intent (no, payload, tags, unit, cost_limit, time_sensitive, retry_delays, body_hash)
SELECT no, payload, tags, unit, cost_limit, time_sensitive, retry_delays, body_hash FROM new;

-- name: step_into_line
-- Jobs whose time has come, and those that have become urgent. Bounded: the next round takes the rest. The materialised parts run once: a
-- plan that ran one per row would move more than it says. Rows that somebody is changing are left for the next round.
WITH now AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS at),
ready AS MATERIALIZED (
    SELECT no, urgent_at FROM penstock.job WHERE line = 0 AND ready_at <= (SELECT at FROM now) ORDER BY ready_at LIMIT %(most)s FOR UPDATE SKIP LOCKED),
urgent AS MATERIALIZED (
    SELECT no FROM penstock.job WHERE line = 1 AND urgent_at IS NOT NULL AND urgent_at <= (SELECT at FROM now)
    ORDER BY urgent_at LIMIT %(most)s FOR UPDATE SKIP LOCKED),
due AS (SELECT no, CASE WHEN urgent_at <= (SELECT at FROM now) THEN 2 ELSE 1 END AS line FROM ready UNION ALL SELECT no, 2 FROM urgent)
UPDATE penstock.job SET line = due.line FROM due WHERE job.no = due.no;

-- name: heads
-- The first of every line, without a lock: a round that starts nothing must not write. Skips from demand to demand through the index:
-- as many steps as there are lines, however long they are.
WITH RECURSIVE active (demand) AS (
    (SELECT demand FROM penstock.job WHERE line > 0 ORDER BY demand LIMIT 1)
    UNION ALL
    SELECT (SELECT job.demand FROM penstock.job WHERE line > 0 AND job.demand > active.demand ORDER BY job.demand LIMIT 1)
    FROM active WHERE active.demand IS NOT NULL
)
SELECT active.demand, standing, j.*, extract(epoch FROM clock_timestamp() - statement_timestamp())
FROM active CROSS JOIN (VALUES (1), (2)) AS two (standing) CROSS JOIN LATERAL (
    SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
    FROM penstock.job WHERE job.demand = active.demand AND job.line = standing AND job.line > 0 ORDER BY turn, no LIMIT %(most)s) AS j
WHERE active.demand IS NOT NULL;

-- name: heads_from
-- The same of lines that are known, from where their first one was.
SELECT known.demand, known.line, j.*, extract(epoch FROM clock_timestamp() - statement_timestamp())
FROM unnest(%s::integer[], %s::integer[], %s::bigint[], %s::bigint[]) AS known (demand, line, turn, no) CROSS JOIN LATERAL (
    SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
    FROM penstock.job WHERE job.demand = known.demand AND job.line = known.line AND job.line > 0 AND (job.turn, job.no) >= (known.turn, known.no)
    ORDER BY turn, no LIMIT %s) AS j;

-- name: in_line
SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
FROM penstock.job
WHERE demand = %(demand)s AND line = %(line)s AND line > 0 AND (turn, no) > (%(turn)s, %(no)s) ORDER BY turn, no LIMIT %(most)s;

-- name: running
SELECT cost_units, admitted_at, ends_at FROM penstock.dispatch WHERE phase <> 'ended' AND host = %(host)s;

-- name: lock_ledger
-- Everybody locks in this order, so nobody waits in a circle.
SELECT scope, name, units, running FROM penstock.ledger WHERE (scope, name) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
ORDER BY scope <> 'host', scope, name FOR UPDATE;

-- name: lock_heads
-- Only those that are as the round saw them; whoever holds one now is not waited for.
SELECT j.no FROM unnest(%s::bigint[], %s::integer[]) AS seen (no, events) JOIN penstock.job j ON j.no = seen.no
WHERE j.line > 0 AND j.events = seen.events FOR UPDATE OF j SKIP LOCKED;

-- name: start_jobs
-- All that a round picked, if all heads that it saw (the picked, and without a state the denied and the passed over) are ours and still as they
-- were. If one is missing the division fails, and everything with it. What it answers with is put together in `Link`: the jobs, as their workers will ask for them.
WITH mine AS MATERIALIZED (
    SELECT j.ctid AS place, seen.* FROM unnest(%(heads)s::bigint[], %(seen)s::integer[], %(states)s::text[], %(fences)s::integer[], %(events)s::integer[])
        AS seen (no, events, state, fence, events_after) JOIN penstock.job j ON j.no = seen.no
    WHERE j.line > 0 AND j.events = seen.events FOR UPDATE OF j SKIP LOCKED),
all_of_them AS MATERIALIZED (SELECT 1 / (count(*) = cardinality(%(heads)s::bigint[]))::integer AS there FROM mine),
taken AS (
    UPDATE penstock.job SET state = mine.state, line = NULL, fence = mine.fence, events = mine.events_after,
           start = CASE mine.state WHEN 'RUNNING' THEN 0 ELSE job.start END, denied = '', denied_data = NULL, denied_at = NULL, passed_at = NULL
    FROM mine WHERE job.ctid = mine.place AND mine.state IS NOT NULL AND (SELECT there FROM all_of_them) = 1 RETURNING job.*),
made AS (
    INSERT INTO penstock.dispatch (dispatch_id, job_no, demand, addon_id, host, fence, cost_units, phase, admitted_at, started_at,
                                   expires_at, ends_at, stop_at, stop_for, worker)
    SELECT * FROM unnest(%(d0)s::text[], %(d1)s::bigint[], %(d2)s::integer[], %(d3)s::text[], %(d4)s::text[], %(d5)s::integer[],
                         %(d6)s::integer[], %(d7)s::text[], %(d8)s::bigint[], %(d9)s::bigint[], %(d10)s::bigint[], %(d11)s::bigint[],
                         %(d12)s::bigint[], %(d13)s::text[], %(d14)s::text[]))

-- name: deny_jobs
UPDATE penstock.job SET denied = new.denied, denied_data = new.data, denied_at = new.at, events = new.events
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::integer[], %s::bigint[]) AS new (denied, data, at, events, no) WHERE job.no = new.no;

-- name: pass_jobs
UPDATE penstock.job SET passed_at = %s WHERE no = ANY(%s::bigint[]);

-- name: write_pages
-- Units that are held or given back, the accounts, how many jobs are in which state, and what is told of it. Account rows are guarded by
-- the ledger's.
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
told AS (INSERT INTO penstock.trail (batch, size, events)
         SELECT * FROM (SELECT %s::bigint AS batch, %s::integer AS size, %s::text AS events) AS new WHERE size > 0)
INSERT INTO penstock.mention (job_no, batch) SELECT no, %s::bigint FROM unnest(%s::bigint[]) AS new (no);

-- name: accounts
SELECT addon_id, weight, paused, average, units, at FROM penstock.addon WHERE addon_id = ANY(%(addons)s::text[]);

-- name: complete
-- Of those that run under the lease that is named, and it counts. If somebody changes a dispatch meanwhile there are fewer rows than
-- were moved, which each of them says. OFFSET 0: by the name, and not through all that is leased.
WITH moved AS (
    UPDATE penstock.job SET state = 'DONE', events = job.events + 1, ended_at = t.now, crash = 0, unavailable = 0, error = 0, start = 0,
           active = job.active + greatest(0, t.now - d.started_at)
    FROM unnest(%s::text[], %s::text[], %s::integer[], %s::text[]) AS done (dispatch_id, job_id, fence, result)
    CROSS JOIN (SELECT coalesce(%s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now OFFSET 0) AS t
    CROSS JOIN LATERAL (SELECT ctid AS place, phase, expires_at, started_at, host, demand
                        FROM penstock.dispatch WHERE dispatch.dispatch_id = done.dispatch_id OFFSET 0) AS d
    WHERE job.job_id = done.job_id AND job.state = 'RUNNING' AND job.fence = done.fence AND d.phase = 'leased' AND d.expires_at > t.now
    RETURNING done.dispatch_id, done.result, t.now, job.no, job.events, job.addon_id, d.host, d.demand, d.place),
ended AS (
    UPDATE penstock.dispatch SET phase = 'ended', ended_at = moved.now, how = 'completed', result = moved.result
    FROM moved WHERE dispatch.ctid = moved.place AND dispatch.phase = 'leased' AND dispatch.dispatch_id = moved.dispatch_id
    RETURNING moved.dispatch_id, moved.no, moved.events, moved.addon_id, moved.host, moved.demand)
SELECT everything.n, ended.* FROM (SELECT count(*) AS n FROM moved) AS everything LEFT JOIN ended ON true;

-- name: lock_jobs
SELECT no, job_id, state, fence, events, addon_id, active, crash, unavailable, error, start, spent, spent_before, ended_at
FROM penstock.job WHERE job_id = ANY(%(ids)s::text[]) ORDER BY no FOR UPDATE;

-- name: lock_dispatches
SELECT dispatch_id, phase, expires_at, demand, host, started_at, stop_at, stop_for, reason, worker
FROM penstock.dispatch WHERE dispatch_id = ANY(%(ids)s::text[]) ORDER BY dispatch_id FOR UPDATE;

-- name: move_jobs
UPDATE penstock.job SET state = new.state, events = new.events, line = CASE new.state WHEN 'QUEUED' THEN job.line END, ended_at = new.ended_at,
       active = new.active, crash = new.crash, unavailable = new.unavailable, error = new.error, start = new.start, spent_before = new.spent_before
FROM unnest(%s::bigint[], %s::text[], %s::integer[], %s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::integer[], %s::integer[],
            %s::bigint[])
     AS new (no, state, events, ended_at, active, crash, unavailable, error, start, spent_before)
WHERE job.no = new.no;

-- name: place_jobs
UPDATE penstock.job SET line = new.line, turn = new.turn, ready_at = new.ready_at, urgent_at = new.urgent_at, priority = new.priority,
       demand = new.demand, earliest_start_at = new.earliest_start_at, not_before = new.not_before, deadline_at = new.deadline_at,
       state = 'QUEUED', ended_at = NULL
FROM unnest(%s::bigint[], %s::smallint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::bigint[], %s::bigint[],
            %s::bigint[])
     AS new (no, line, turn, ready_at, urgent_at, priority, demand, earliest_start_at, not_before, deadline_at)
WHERE job.no = new.no;

-- name: move_dispatches
UPDATE penstock.dispatch SET phase = new.phase, started_at = new.started_at, expires_at = new.expires_at, stop_at = new.stop_at,
       stop_for = new.stop_for, reason = new.reason, worker = new.worker, ended_at = new.ended_at, how = new.how, result = new.result,
       failure = new.failure
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[],
            %s::text[], %s::text[])
     AS new (dispatch_id, phase, started_at, expires_at, stop_at, stop_for, reason, worker, ended_at, how, result, failure)
WHERE dispatch.dispatch_id = new.dispatch_id;

-- name: lock_jobs_of
SELECT no FROM penstock.job WHERE no IN (SELECT job_no FROM penstock.dispatch WHERE dispatch_id = ANY(%(ids)s::text[]))
ORDER BY no FOR UPDATE;

-- name: dispatches_for_beats
SELECT d.dispatch_id, d.phase, d.expires_at, d.reason, d.addon_id, d.spent, d.progress, d.fence, d.job_no, j.job_id, j.spent, j.spent_before,
       j.events, j.state, j.progress, i.cost_limit
FROM penstock.dispatch d LEFT JOIN penstock.job j ON j.no = d.job_no LEFT JOIN penstock.intent i ON i.no = d.job_no
WHERE d.dispatch_id = ANY(%(ids)s::text[]) ORDER BY d.dispatch_id FOR UPDATE OF d;

-- name: renew
UPDATE penstock.dispatch SET expires_at = new.expires_at, progress = new.progress, spent = new.spent
FROM unnest(%s::text[], %s::bigint[], %s::double precision[], %s::bigint[]) AS new (dispatch_id, expires_at, progress, spent)
WHERE dispatch.dispatch_id = new.dispatch_id;

-- name: beat_jobs
UPDATE penstock.job SET progress = new.progress, spent = new.spent, events = new.events
FROM unnest(%s::bigint[], %s::double precision[], %s::bigint[], %s::integer[]) AS new (no, progress, spent, events) WHERE job.no = new.no;

-- name: set_checkpoints
INSERT INTO penstock.checkpoint (job_no, at, fence, data) SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::text[])
ON CONFLICT (job_no) DO UPDATE SET at = excluded.at, fence = excluded.fence, data = excluded.data;

-- name: spend
INSERT INTO penstock.budget (addon_id, period, spent) SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])
ON CONFLICT (addon_id, period) DO UPDATE SET spent = budget.spent + excluded.spent RETURNING addon_id, period, spent;

-- name: reorder
-- In the order of their numbers, as everybody locks jobs. One that is being moved right now is placed by whoever moves it.
WITH looked_at AS (SELECT no FROM penstock.job WHERE line IS NOT NULL AND no > %(after)s ORDER BY no LIMIT %(most)s FOR UPDATE SKIP LOCKED),
     changed AS (UPDATE penstock.job SET turn = ready_at - priority * %(per_point)s::bigint
                 WHERE no IN (SELECT no FROM looked_at) AND turn <> ready_at - priority * %(per_point)s::bigint)
SELECT coalesce(max(no), 0) FROM looked_at;

-- name: old_jobs
SELECT no, job_id, addon_id, state FROM penstock.job
WHERE ended_at IS NOT NULL AND state <> 'BLOCKED' AND ended_at < %(before)s ORDER BY ended_at, no LIMIT %(most)s FOR UPDATE SKIP LOCKED;

-- name: batches_of
-- With the lock: others may be forgetting other jobs of the same batch.
SELECT batch, until IS NOT NULL, events FROM penstock.trail WHERE batch IN (
    SELECT submitted_in FROM penstock.job WHERE no = ANY(%(nos)s::bigint[])
    UNION SELECT batch FROM penstock.mention WHERE job_no = ANY(%(nos)s::bigint[])) ORDER BY batch FOR UPDATE;

-- name: forget
WITH mentions AS (DELETE FROM penstock.mention WHERE job_no = ANY(%(nos)s::bigint[])),
     checkpoints AS (DELETE FROM penstock.checkpoint WHERE job_no = ANY(%(nos)s::bigint[])),
     intents AS (DELETE FROM penstock.intent WHERE no = ANY(%(nos)s::bigint[])),
     dispatches AS (DELETE FROM penstock.dispatch d USING unnest(%(ids)s::text[]) AS gone (job_id)
                    WHERE d.dispatch_id > gone.job_id || '.' AND d.dispatch_id < gone.job_id || '/')
DELETE FROM penstock.job WHERE no = ANY(%(nos)s::bigint[]);

-- name: forget_batches
DELETE FROM penstock.trail WHERE batch = ANY(%(batches)s::bigint[]);

-- name: rewrite_batches
UPDATE penstock.trail SET events = new.events FROM unnest(%s::bigint[], %s::text[]) AS new (batch, events) WHERE trail.batch = new.batch;

-- name: register
INSERT INTO penstock.dispatcher (holder, started_at, seen_at) VALUES (%(holder)s, %(now)s, %(now)s)
ON CONFLICT (holder) DO UPDATE SET started_at = excluded.started_at, seen_at = excluded.seen_at;

-- name: unregister
DELETE FROM penstock.dispatcher WHERE holder = %(holder)s;

-- name: unnumbered
SELECT EXISTS (SELECT 1 FROM penstock.trail WHERE until IS NULL);

-- name: lock_numbers
SELECT value FROM penstock.mark WHERE name = 'event' FOR UPDATE;

-- name: number_events
-- Numbers go to what has been committed by now, and the next one to do this waits for us: what a reader has seen stays behind it.
-- Batches were taken after the locks, so in this order an effect never comes before its cause.
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
-- Whole batches, until there are enough. The first one may have been read in part.
SELECT until - size, events, until FROM (
    SELECT until, size, events, sum(size) OVER (ORDER BY until) - size AS before
    FROM (SELECT until, size, events FROM penstock.trail WHERE until > %(after)s ORDER BY until LIMIT %(most)s) AS next) AS counted
WHERE before < %(most)s ORDER BY until;

-- name: events_of
-- The same, of batches that may tell of one of these kinds.
SELECT until - size, events, until FROM penstock.trail
WHERE until > %(after)s AND EXISTS (SELECT 1 FROM unnest(%(kinds)s::text[]) AS kind WHERE position(kind IN events) > 0)
ORDER BY until LIMIT %(most)s;

-- name: newest
SELECT coalesce(max(until), 0) FROM penstock.trail;

-- name: events_of_job
SELECT t.until - t.size, t.events FROM penstock.job j
CROSS JOIN LATERAL (SELECT j.submitted_in AS batch UNION SELECT m.batch FROM penstock.mention m WHERE m.job_no = j.no) AS its
JOIN penstock.trail t ON t.batch = its.batch
WHERE j.job_id = %(job_id)s AND t.until IS NOT NULL ORDER BY t.batch;

-- name: job_columns
SELECT j.no, j.job_id, j.state, j.created_at, j.ready_at, j.not_before, j.fence, j.crash, j.unavailable, j.error, j.start, j.active, j.spent,
       j.spent_before, j.progress, j.denied, j.denied_data, j.denied_at, j.passed_at, j.ended_at, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.demand,
       i.payload, i.tags, i.unit, i.cost_limit, i.time_sensitive, i.retry_delays
FROM penstock.job j JOIN penstock.intent i ON i.no = j.no

-- name: dispatch_columns
SELECT d.dispatch_id, j.job_id, d.addon_id, d.host, d.fence, d.phase, d.admitted_at, d.expires_at, d.started_at, d.ends_at, d.stop_at, d.stop_for,
       d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure, d.demand
FROM penstock.dispatch d LEFT JOIN penstock.job j ON j.no = d.job_no

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
SELECT dispatch_id FROM penstock.dispatch
WHERE phase <> 'ended' AND expires_at <= coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
ORDER BY expires_at, dispatch_id LIMIT %(most)s;

-- name: to_stop
SELECT dispatch_id FROM penstock.dispatch
WHERE phase = 'leased' AND stop_at IS NOT NULL
  AND stop_at <= coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
ORDER BY stop_at LIMIT %(most)s;

-- name: past_deadline
SELECT job_id FROM penstock.job
WHERE line IS NOT NULL AND deadline_at IS NOT NULL
  AND deadline_at <= coalesce(%(now)s::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
ORDER BY deadline_at LIMIT %(most)s;

-- name: alarm
SELECT least(
    (SELECT ready_at FROM penstock.job WHERE line = 0 ORDER BY ready_at LIMIT 1),
    (SELECT urgent_at FROM penstock.job WHERE line = 1 AND urgent_at IS NOT NULL ORDER BY urgent_at LIMIT 1),
    (SELECT deadline_at FROM penstock.job WHERE line IS NOT NULL AND deadline_at IS NOT NULL ORDER BY deadline_at LIMIT 1),
    (SELECT expires_at FROM penstock.dispatch WHERE phase <> 'ended' ORDER BY expires_at LIMIT 1),
    (SELECT stop_at FROM penstock.dispatch WHERE phase = 'leased' AND stop_at IS NOT NULL ORDER BY stop_at LIMIT 1));

-- name: greet
-- A name that somebody else bears, and is alive, stays as it is: then nothing comes back.
INSERT INTO penstock.host (host, instance, capacity, quiet, labels, version, url, started_at, seen_at, until)
VALUES (%(host)s, %(instance)s, %(capacity)s, %(quiet)s, %(labels)s, %(version)s, %(url)s, %(started_at)s, %(seen_at)s, %(until)s)
ON CONFLICT (host) DO UPDATE SET instance = excluded.instance, capacity = excluded.capacity, quiet = excluded.quiet, labels = excluded.labels,
    version = excluded.version, url = excluded.url, started_at = excluded.started_at, seen_at = excluded.seen_at, until = excluded.until
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
SELECT h.host, h.instance, h.capacity, h.quiet, h.labels, h.version, h.url, h.started_at, h.seen_at, h.until, h.draining, coalesce(l.units, 0)
FROM penstock.host h LEFT JOIN penstock.ledger l ON l.scope = 'host' AND l.name = h.host ORDER BY h.host;

-- name: audit_dispatches
SELECT d.dispatch_id, d.host, d.cost_units, d.addon_id, d.demand, d.phase, d.fence, j.job_id, j.state, j.fence
FROM penstock.dispatch d LEFT JOIN penstock.job j ON j.no = d.job_no WHERE d.phase <> 'ended';

-- name: audit_tally
SELECT addon_id, state, count(*) FROM penstock.job GROUP BY addon_id, state;

-- name: audit_in_flight
SELECT job_id FROM penstock.job j WHERE state IN ('DISPATCHING', 'RUNNING')
AND NOT EXISTS (SELECT 1 FROM penstock.dispatch d WHERE d.job_no = j.no AND d.phase <> 'ended');

-- name: audit_trail
WITH told AS MATERIALIZED (
    SELECT job_id, count(*) AS events, min(n) AS first, max(n) AS last FROM penstock.event WHERE job_id IS NOT NULL GROUP BY job_id)
SELECT told.job_id FROM told LEFT JOIN penstock.job j ON j.job_id = told.job_id
WHERE (told.events, told.first, told.last) IS DISTINCT FROM (j.events, 1, j.events)
UNION ALL SELECT min(job_id) FROM penstock.job HAVING count(*) <> (SELECT count(*) FROM told)
UNION ALL SELECT j.job_id FROM penstock.event e JOIN penstock.job j ON j.job_id = e.job_id
WHERE e.batch <> j.submitted_in AND NOT EXISTS (SELECT 1 FROM penstock.mention m WHERE m.job_no = j.no AND m.batch = e.batch);

-- name: audit_fold
SELECT j.job_id FROM penstock.event e JOIN penstock.job j ON j.job_id = e.job_id AND j.events = e.n WHERE e.state <> j.state;
