-- Every statement of the SQLite store, by name. The PostgreSQL file has the same names.

-- name: marks
-- The newest row stays: whatever is forgotten, a newer one tells of it.
SELECT jobs, batch + size - 1 FROM trail ORDER BY batch DESC LIMIT 1;

-- name: demand_by_key
SELECT no FROM demand WHERE key = :key;

-- name: demand_by_no
SELECT addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels FROM demand WHERE no = :no;

-- name: add_demand
INSERT INTO demand (key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING no;

-- name: add_job
INSERT INTO job (no, job_id, submitted_in, state, line, fence, events, addon_id, demand, turn, ready_at, urgent_at, priority, created_at,
                 earliest_start_at, deadline_at, expected_sec, max_runtime_sec, max_active_sec, idempotency_key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_intent
INSERT INTO intent (no, payload, tags, unit, cost_limit, time_sensitive, retry_delays, body_hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_dispatch
INSERT INTO dispatch (dispatch_id, job_no, demand, addon_id, host, fence, cost_units, phase, admitted_at, started_at,
                      expires_at, ends_at, stop_at, stop_for, worker, started_in)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: tell
INSERT INTO trail (batch, size, jobs, events) VALUES (?, ?, ?, ?);

-- name: mention
INSERT INTO mention (job_no, batch) SELECT value, ? FROM json_each(?);

-- name: job_by_key
SELECT j.job_id, j.state, i.body_hash FROM job j JOIN intent i USING (no)
WHERE j.addon_id = :addon_id AND j.idempotency_key = :key;

-- name: whose_time_has_come
-- In line, or in the urgent line. Bounded: the next round takes the rest.
SELECT * FROM (SELECT iif(urgent_at <= :now, 2, 1), no FROM job WHERE line = 0 AND ready_at <= :now ORDER BY ready_at LIMIT :most)
UNION ALL
SELECT * FROM (SELECT 2, no FROM job WHERE line = 1 AND urgent_at IS NOT NULL AND urgent_at <= :now ORDER BY urgent_at LIMIT :most);

-- name: step_into_line
UPDATE job SET line = ? WHERE no = ?;

-- name: next_line
-- From line to line through the index: as many of these as there are lines, however long they are.
SELECT * FROM (SELECT demand, line FROM job WHERE line > 0 AND demand = :demand AND line = :line + 1 LIMIT 1)
UNION ALL
SELECT * FROM (SELECT demand, line FROM job WHERE line > 0 AND demand > :demand ORDER BY demand, line LIMIT 1)
LIMIT 1;

-- name: in_line
-- What a round goes by, and then what else the job's own row says of one that starts.
SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active,
       created_at, ready_at, not_before, crash, unavailable, error, spent, spent_before, progress, earliest_start_at, deadline_at, idempotency_key
FROM job WHERE demand = :demand AND line = :line AND line > 0 ORDER BY turn, no;

-- name: ahead_in_line
SELECT count(*) FROM (
    SELECT 1 FROM job WHERE demand = :demand AND line = :line AND line > 0 AND (turn, no) < (:turn, :no) LIMIT :most);

-- name: running
SELECT cost_units, admitted_at, ends_at FROM dispatch WHERE phase <> 'ended' AND host = :host;

-- name: said_of
-- What was said of those that start, for whoever runs them. It may be large, so it is read of nobody else.
SELECT intent.no, payload, tags, unit, cost_limit, time_sensitive, retry_delays
FROM json_each(?) AS asked CROSS JOIN intent ON intent.no = asked.value;

-- name: take_job
UPDATE job SET state = ?1, line = NULL, fence = ?2, events = ?3, start = iif(?1 = 'RUNNING', 0, start), denied = '', denied_data = NULL, denied_at = NULL, passed_at = NULL
WHERE state = 'QUEUED' AND no = ?4;

-- name: deny_job
UPDATE job SET denied = ?, denied_data = ?, denied_at = ?, events = ? WHERE no = ?;

-- name: pass_job
UPDATE job SET passed_at = ? WHERE no = ?;

-- name: jobs_for_steps
SELECT job.no, job.state, job.fence, job.events, job.addon_id, job.job_id
FROM json_each(:ids) AS asked CROSS JOIN job ON job.job_id = asked.value;

-- name: dispatches_for_steps
SELECT dispatch.phase, dispatch.expires_at, dispatch.demand, dispatch.host, dispatch.started_at, dispatch.dispatch_id
FROM json_each(:ids) AS asked CROSS JOIN dispatch ON dispatch.dispatch_id = asked.value;

-- name: leases_to_complete
SELECT json_group_array(json_array(asked.key, job.no, job.events, dispatch.demand, dispatch.host, dispatch.started_at))
FROM (SELECT min(key) AS key, value FROM json_each(:ids) GROUP BY value) AS asked
CROSS JOIN dispatch ON dispatch.dispatch_id = asked.value CROSS JOIN job ON job.no = dispatch.job_no
WHERE dispatch.phase = 'leased' AND dispatch.expires_at > :now AND job.state = 'RUNNING' AND job.fence = dispatch.fence;

-- name: complete_job
UPDATE job SET state = 'DONE', events = ?, ended_at = ?, active = active + ?, crash = 0, unavailable = 0, error = 0, start = 0
WHERE state = 'RUNNING' AND no = ?;

-- name: complete_dispatch
UPDATE dispatch SET phase = 'ended', ended_at = ?, how = 'completed', result = ?, ended_in = ? WHERE phase = 'leased' AND dispatch_id = ?;

-- name: move_job
UPDATE job SET state = ?, events = ?, line = NULL, ended_at = ?, active = active + ?,
               crash = coalesce(?, crash), unavailable = coalesce(?, unavailable), error = coalesce(?, error), start = coalesce(?, start)
WHERE state = ? AND no = ?;

-- name: place_job
UPDATE job SET state = 'QUEUED', events = ?, ended_at = NULL, active = active + ?,
               crash = coalesce(?, crash), unavailable = coalesce(?, unavailable), error = coalesce(?, error), start = coalesce(?, start),
               line = ?, turn = ?, ready_at = ?, urgent_at = ?, priority = ?, demand = ?,
               earliest_start_at = ?, not_before = ?, deadline_at = ?
WHERE state = ? AND no = ?;

-- name: refresh_job
UPDATE job SET active = 0, spent_before = spent WHERE no = ?;

-- name: note_job
UPDATE job SET events = ? WHERE state = ? AND no = ?;

-- name: move_dispatch
UPDATE dispatch SET phase = ?, started_at = coalesce(started_at, ?), expires_at = coalesce(?, expires_at),
                    stop_at = coalesce(?, stop_at), stop_for = coalesce(?, stop_for), reason = coalesce(reason, ?),
                    worker = coalesce(?, worker), ended_at = ?, how = ?, result = ?, failure = ?
WHERE phase = ? AND dispatch_id = ?;

-- name: dispatch_for_beat
SELECT d.phase, d.expires_at, d.reason, d.addon_id, d.spent, d.fence, d.job_no, j.job_id, j.spent, j.spent_before, j.events, j.state, i.cost_limit
FROM dispatch d LEFT JOIN job j ON j.no = d.job_no LEFT JOIN intent i ON i.no = d.job_no
WHERE d.dispatch_id = :dispatch_id;

-- name: renew
UPDATE dispatch SET expires_at = ?, progress = coalesce(?, progress), spent = ? WHERE dispatch_id = ?;

-- name: beat_job
UPDATE job SET progress = coalesce(?, progress), spent = spent + ?, events = ? WHERE no = ?;

-- name: set_checkpoint
INSERT INTO checkpoint (job_no, at, fence, data) VALUES (?, ?, ?, ?)
ON CONFLICT (job_no) DO UPDATE SET at = excluded.at, fence = excluded.fence, data = excluded.data;

-- name: spend
INSERT INTO budget (addon_id, period, spent) VALUES (?, ?, ?)
ON CONFLICT (addon_id, period) DO UPDATE SET spent = spent + excluded.spent;

-- name: spent_in
SELECT spent FROM budget WHERE addon_id = :addon_id AND period = :period;

-- name: spent
SELECT addon_id, period, spent FROM budget WHERE period IN (:day, :month);

-- name: ledger
SELECT scope, name, units, running FROM ledger WHERE running > 0;

-- name: set_sums
INSERT OR REPLACE INTO sums (scope, name, units, running, weight, paused, average, held, at, jobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: accounts
SELECT addon_id, weight, paused, average, units, at FROM addon WHERE addon_id = :addon_id OR addon_id = :everything;

-- name: addons
SELECT addon_id, weight, paused, average, units, at FROM addon ORDER BY addon_id;

-- name: tally
SELECT addon_id, state, jobs FROM tally WHERE jobs > 0;

-- name: queued
SELECT addon_id, jobs FROM tally WHERE state = 'QUEUED' AND jobs > 0;

-- name: jobs_of
SELECT jobs FROM sums WHERE scope = 'addon' AND name = :addon_id;

-- name: expired
SELECT dispatch_id FROM dispatch WHERE phase <> 'ended' AND expires_at <= :now ORDER BY expires_at LIMIT :most;

-- name: to_stop
SELECT dispatch_id FROM dispatch WHERE phase = 'leased' AND stop_at IS NOT NULL AND stop_at <= :now ORDER BY stop_at LIMIT :most;

-- name: past_deadline
SELECT job_id FROM job WHERE line IS NOT NULL AND deadline_at IS NOT NULL AND deadline_at <= :now ORDER BY deadline_at LIMIT :most;

-- name: alarm
SELECT min(moment) FROM (
    SELECT * FROM (SELECT ready_at AS moment FROM job WHERE line = 0 ORDER BY ready_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT urgent_at FROM job WHERE line = 1 AND urgent_at IS NOT NULL ORDER BY urgent_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT deadline_at FROM job WHERE line IS NOT NULL AND deadline_at IS NOT NULL ORDER BY deadline_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT expires_at FROM dispatch WHERE phase <> 'ended' ORDER BY expires_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT stop_at FROM dispatch WHERE phase = 'leased' AND stop_at IS NOT NULL ORDER BY stop_at LIMIT 1));

-- name: shift
UPDATE dispatch SET expires_at = expires_at + :by, stop_at = stop_at + :by, ends_at = ends_at + :by WHERE phase <> 'ended';

-- name: last_to_reorder
SELECT max(no) FROM (SELECT no FROM job WHERE line IS NOT NULL AND no > :after ORDER BY no LIMIT :most);

-- name: reorder
UPDATE job SET turn = ready_at - priority * :per_point
WHERE line IS NOT NULL AND no > :after AND no <= :last AND turn <> ready_at - priority * :per_point;

-- name: old_jobs
SELECT no, job_id, addon_id, state FROM job
WHERE ended_at IS NOT NULL AND state <> 'BLOCKED' AND ended_at < :before ORDER BY ended_at, no LIMIT :most;

-- name: forget_job
DELETE FROM job WHERE no = ?;

-- name: forget_intent
DELETE FROM intent WHERE no = ?;

-- name: batches_of
SELECT batch, events FROM trail WHERE batch IN (
    SELECT job.submitted_in FROM json_each(:nos) AS asked CROSS JOIN job ON job.no = asked.value
    UNION SELECT mention.batch FROM json_each(:nos) AS asked CROSS JOIN mention ON mention.job_no = asked.value
    UNION SELECT d.started_in FROM json_each(:nos) AS asked CROSS JOIN job j ON j.no = asked.value
          CROSS JOIN dispatch d ON d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
    UNION SELECT d.ended_in FROM json_each(:nos) AS asked CROSS JOIN job j ON j.no = asked.value
          CROSS JOIN dispatch d ON d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/');

-- name: forget_batch
DELETE FROM trail WHERE batch = ?;

-- name: rewrite_batch
UPDATE trail SET events = ? WHERE batch = ?;

-- name: forget_mentions
DELETE FROM mention WHERE job_no = ?;

-- name: forget_checkpoint
DELETE FROM checkpoint WHERE job_no = ?;

-- name: forget_dispatches
DELETE FROM dispatch WHERE dispatch_id > ?1 || '.' AND dispatch_id < ?1 || '/';

-- name: checkpoint
SELECT c.data FROM checkpoint c JOIN job j ON j.no = c.job_no WHERE j.job_id = :job_id;

-- name: events
-- Whole batches, for as long as somebody reads on. The first one may have been read in part.
SELECT batch - 1, events FROM trail
WHERE batch >= coalesce((SELECT max(batch) FROM trail WHERE batch <= :after), 0) AND batch + size - 1 > :after ORDER BY batch;

-- name: events_of
-- The same, of batches that may tell of one of these kinds.
SELECT batch - 1, events FROM trail
WHERE batch >= coalesce((SELECT max(batch) FROM trail WHERE batch <= :after), 0) AND batch + size - 1 > :after
AND EXISTS (SELECT 1 FROM json_each(:kinds) AS kind WHERE instr(events, kind.value) > 0) ORDER BY batch;

-- name: newest
SELECT coalesce((SELECT batch + size - 1 FROM trail ORDER BY batch DESC LIMIT 1), 0);

-- name: events_of_job
SELECT batch - 1, events FROM trail WHERE batch IN (
    SELECT submitted_in FROM job WHERE job_id = :job_id
    UNION SELECT mention.batch FROM job CROSS JOIN mention ON mention.job_no = job.no WHERE job.job_id = :job_id
    UNION SELECT started_in FROM dispatch WHERE dispatch_id > :job_id || '.' AND dispatch_id < :job_id || '/'
    UNION SELECT ended_in FROM dispatch WHERE dispatch_id > :job_id || '.' AND dispatch_id < :job_id || '/') ORDER BY batch;

-- name: job_columns
SELECT j.no, j.job_id, j.state, j.created_at, j.ready_at, j.not_before, j.fence, j.crash, j.unavailable, j.error, j.start, j.active, j.spent,
       j.spent_before, j.progress, j.denied, j.denied_data, j.denied_at, j.passed_at, j.ended_at, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.demand,
       i.payload, i.tags, i.unit, i.cost_limit, i.time_sensitive, i.retry_delays

-- name: asked_jobs
-- CROSS: in the order asked for, and by look-ups, whatever the planner thinks of the sizes.
FROM json_each(?) AS asked CROSS JOIN job j ON j.job_id = asked.value CROSS JOIN intent i USING (no)

-- name: all_jobs
FROM job j CROSS JOIN intent i USING (no)

-- name: queued_jobs
SELECT no FROM job WHERE line IS NOT NULL

-- name: jobs_in_flight
SELECT no FROM job WHERE no IN (SELECT job_no FROM dispatch WHERE phase <> 'ended' AND job_no IS NOT NULL)

-- name: settled_jobs
SELECT no FROM job WHERE ended_at IS NOT NULL

-- name: dispatch_columns
SELECT d.dispatch_id, j.job_id, d.addon_id, d.host, d.fence, d.phase, d.admitted_at, d.expires_at, d.started_at, d.ends_at, d.stop_at, d.stop_for,
       d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure, d.demand
FROM dispatch d LEFT JOIN job j ON j.no = d.job_no

-- name: greet
-- A name that somebody else bears, and is alive, stays as it is: then nothing comes back.
INSERT INTO host (host, instance, capacity, quiet, labels, version, url, started_at, seen_at, until)
VALUES (:host, :instance, :capacity, :quiet, :labels, :version, :url, :started_at, :seen_at, :until)
ON CONFLICT (host) DO UPDATE SET instance = excluded.instance, capacity = excluded.capacity, quiet = excluded.quiet, labels = excluded.labels,
    version = excluded.version, url = excluded.url, started_at = excluded.started_at, seen_at = excluded.seen_at, until = excluded.until
WHERE host.instance = excluded.instance OR host.until <= excluded.seen_at
RETURNING draining;

-- name: leave_host
DELETE FROM host WHERE host = :host AND instance = :instance AND draining = 0;

-- name: lose_host
UPDATE host SET until = seen_at WHERE host = :host AND instance = :instance;

-- name: drain_host
UPDATE host SET draining = :draining WHERE host = :host RETURNING host;

-- name: forget_hosts
DELETE FROM host WHERE until < :before AND draining = 0;

-- name: hosts
SELECT h.host, h.instance, h.capacity, h.quiet, h.labels, h.version, h.url, h.started_at, h.seen_at, h.until, h.draining, coalesce(l.units, 0)
FROM host h LEFT JOIN ledger l ON l.scope = 'host' AND l.name = h.host ORDER BY h.host;

-- name: audit_dispatches
SELECT d.dispatch_id, d.host, d.cost_units, d.addon_id, d.demand, d.phase, d.fence, j.job_id, j.state, j.fence
FROM dispatch d LEFT JOIN job j ON j.no = d.job_no WHERE d.phase <> 'ended';

-- name: audit_tally
SELECT addon_id, state, count(*) FROM job GROUP BY addon_id, state;

-- name: audit_in_flight
SELECT job_id FROM job j WHERE line IS NULL AND ended_at IS NULL
AND NOT EXISTS (SELECT 1 FROM dispatch d WHERE d.job_no = j.no AND d.phase <> 'ended');

-- name: audit_trail
WITH told AS MATERIALIZED (
    SELECT job_id, count(*) AS events, min(n) AS first, max(n) AS last FROM event WHERE job_id IS NOT NULL GROUP BY job_id)
SELECT told.job_id FROM told LEFT JOIN job j ON j.job_id = told.job_id
WHERE (told.events, told.first, told.last) IS NOT (j.events, 1, j.events)
UNION ALL SELECT min(job_id) FROM job HAVING count(*) <> (SELECT count(*) FROM told)
UNION ALL SELECT j.job_id FROM event e CROSS JOIN job j ON j.job_id = e.job_id
WHERE e.batch <> j.submitted_in AND NOT EXISTS (SELECT 1 FROM mention m WHERE m.job_no = j.no AND m.batch = e.batch)
AND NOT EXISTS (SELECT 1 FROM dispatch d WHERE d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
                AND (d.started_in = e.batch OR d.ended_in = e.batch));

-- name: audit_fold
SELECT j.job_id FROM event e CROSS JOIN job j ON j.job_id = e.job_id WHERE j.events = e.n AND e.state <> j.state;
