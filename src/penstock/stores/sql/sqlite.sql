-- The statements of the SQLite store, by name. A statement, table or view that the PostgreSQL store has too has the same name there.

-- name: newest_numbers
-- The newest row is never pruned, because pruning writes an event in a newer row.
SELECT jobs, batch + size - 1 FROM trail ORDER BY batch DESC LIMIT 1;

-- name: class_by_key
SELECT no FROM admission_class WHERE key = :key;

-- name: classes_by_no
SELECT no, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels
FROM admission_class WHERE no IN (SELECT value FROM json_each(:nos));

-- name: add_class
INSERT INTO admission_class (key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class, labels)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING no;

-- name: insert_job
INSERT INTO job (no, job_id, submitted_in, addon_id, class_no, ready_at, priority, created_at, earliest_start_at, deadline_at, expected_sec, max_runtime_sec,
                 max_active_sec, idempotency_key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_new_queued
INSERT INTO queue (no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, expected_sec, max_runtime_sec, max_active_sec, fence, events)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 1);

-- name: insert_intent
INSERT INTO intent (no, payload, tags, unit, cost_limit, time_sensitive, retry_delays, preemptible, dependencies, body_hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_dispatches
INSERT INTO active_dispatch (no, standalone_lease, class_no, host, fence, phase, events, started_in, admitted_at, started_at, expires_at, ends_at, stop_at, stop_for, worker)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: next_standalone_lease
-- A number below those of all leases without a job that are stored.
SELECT min(0, coalesce((SELECT min(no) FROM active_dispatch), 0), coalesce((SELECT min(job_no) FROM ended_dispatch), 0)) - 1;

-- name: insert_events
INSERT INTO trail (batch, size, jobs, events) VALUES (?, ?, ?, ?);

-- name: insert_mentions
INSERT INTO mention (job_no, batch) SELECT value, ? FROM json_each(?);

-- name: jobs_by_key
SELECT j.job_id, j.state, i.body_hash FROM job_full j JOIN intent i USING (no)
WHERE j.addon_id = ? AND j.idempotency_key = ?;

-- name: due_jobs
-- Jobs that enter their ready queue (line 1), or the urgent one (line 2). Bounded: the next round takes the rest.
SELECT * FROM (SELECT iif(urgent_at <= :now, 2, 1), no FROM queue WHERE line = 0 AND ready_at <= :now ORDER BY ready_at LIMIT :most)
UNION ALL
SELECT * FROM (SELECT 2, no FROM queue WHERE line = 1 AND urgent_at IS NOT NULL AND urgent_at <= :now ORDER BY urgent_at LIMIT :most);

-- name: step_into_line
UPDATE queue SET line = ? WHERE no = ?;

-- name: next_line
-- The next line through the index: one statement per line, however long the lines are.
SELECT * FROM (SELECT class_no, line FROM queue WHERE line > 0 AND class_no = :class_no AND line = :line + 1 LIMIT 1)
UNION ALL
SELECT * FROM (SELECT class_no, line FROM queue WHERE line > 0 AND class_no > :class_no ORDER BY class_no, line LIMIT 1)
LIMIT 1;

-- name: in_line
-- The columns that a round compares, and those that the store needs when a job starts.
SELECT no, job_id, priority, turn, fence, expected_sec, passed_at, denied, events, max_runtime_sec, max_active_sec, active
FROM queue WHERE class_no = :class_no AND line = :line AND line > 0 ORDER BY turn, no;

-- name: jobs_before
SELECT q.no, (SELECT count(*) FROM (
    SELECT 1 FROM queue b WHERE b.class_no = q.class_no AND b.line = q.line AND b.line > 0 AND (b.turn, b.no) < (q.turn, q.no) LIMIT :most))
FROM queue q WHERE q.line > 0 AND q.no IN (SELECT value FROM json_each(:nos));

-- name: running
SELECT cost_units, admitted_at, ends_at FROM active_dispatch JOIN admission_class ON admission_class.no = active_dispatch.class_no WHERE host = :host;

-- name: start_timeouts
SELECT start FROM job WHERE no = :no;

-- name: starting_jobs
-- The columns of `job_columns`, for queued jobs that run from now on.
SELECT j.no, j.job_id, 'RUNNING', j.created_at, j.ready_at, j.not_before, j.tried + 1, j.crash, j.unavailable, j.error, 0, j.active, j.spent,
       j.spent_before, j.progress, '', NULL, NULL, NULL, NULL, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.class_no,
       i.payload, i.tags, i.unit, i.cost_limit, i.time_sensitive, i.retry_delays, i.preemptible, i.dependencies, NULL, 0
FROM json_each(?) AS asked CROSS JOIN job j ON j.no = asked.value CROSS JOIN intent i ON i.no = asked.value;

-- name: insert_leases
-- Leases without an expected end and a limit, made from the rows of the queue: to bind a value takes longer than to copy one.
INSERT INTO active_dispatch (no, class_no, host, fence, phase, events, started_in, admitted_at, started_at, expires_at, worker)
SELECT no, ?1, ?2, fence + 1, 'leased', events + 2, ?3, ?4, ?4, ?5, ?6 FROM json_each(?7) AS asked CROSS JOIN queue ON queue.no = asked.value;

-- name: leave_queue
DELETE FROM queue WHERE no IN (SELECT value FROM json_each(?));

-- name: deny_jobs
UPDATE queue SET denied = ?, denied_data = ?, denied_at = ?, events = ? WHERE no = ?;

-- name: pass_jobs
UPDATE queue SET passed_at = ? WHERE no = ?;

-- name: leases_to_complete
SELECT json_group_array(json_array(asked.key, l.no, l.events, json_array(l.class_no, l.host)))
FROM (SELECT min(key) AS key, value FROM json_each(:ids) GROUP BY value) AS asked
CROSS JOIN job j ON j.job_id = asked.value ->> 1 CROSS JOIN active_dispatch l ON l.no = j.no AND l.fence = asked.value ->> 2
WHERE l.phase = 'leased' AND l.expires_at > :now;

-- name: complete
-- The list has the numbers of jobs, each with its result.
INSERT INTO ended_dispatch (job_no, fence, class_no, host, events, started_in, ended_in, admitted_at, started_at, expires_at, ends_at, stop_at, stop_for, worker,
                     spent, progress, pid, ended_at, how, result)
SELECT no, fence, class_no, host, events + 1, started_in, ?1, admitted_at, started_at, expires_at, ends_at, stop_at, stop_for, worker, spent, progress, pid, ?2,
       'completed', asked.value ->> 1
FROM json_each(?3) AS asked CROSS JOIN active_dispatch ON active_dispatch.no = asked.value ->> 0 WHERE phase = 'leased';

-- name: delete_dispatch
DELETE FROM active_dispatch WHERE phase = ? AND no IN (SELECT value FROM json_each(?));

-- name: insert_ended_jobs
INSERT INTO ended_jobs (at, jobs) VALUES (?, ?);

-- name: insert_ended_dispatch
INSERT INTO ended_dispatch (job_no, fence, standalone_lease, class_no, host, events, started_in, admitted_at, started_at, expires_at, ends_at, stop_at, stop_for, reason, worker,
                     spent, progress, pid, ended_at, how, result, failure)
SELECT no, fence, standalone_lease, class_no, host, ?, started_in, admitted_at, started_at, coalesce(?, expires_at), ends_at, coalesce(?, stop_at), coalesce(?, stop_for),
       coalesce(?, reason), coalesce(?, worker), spent, progress, pid, ?, ?, ?, ?
FROM active_dispatch WHERE phase = ? AND no = ?;

-- name: move_jobs
-- For a job that is queued or settled from now on. The last denial of a queued job is in `queue`.
UPDATE job SET state = ?, tried = ?, events = ?, ended_at = ?, active = ?, crash = ?, unavailable = ?, error = ?, start = ?, spent_before = ?,
               denied = ?, denied_data = ?, denied_at = ?, passed_at = ?, ready_at = ?, priority = ?, earliest_start_at = ?, not_before = ?,
               deadline_at = ?, class_no = coalesce(?, class_no)
WHERE state IS ? AND no = ?;

-- name: place_jobs
-- Runs after `move_jobs`, and reads the columns that it wrote.
INSERT INTO queue (no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec, max_runtime_sec, max_active_sec,
                   active, denied, denied_data, denied_at, passed_at)
SELECT no, job_id, class_no, ?, ?, ready_at, ?, deadline_at, priority, tried, events, expected_sec, max_runtime_sec, max_active_sec, active, ?, ?, ?, ?
FROM job WHERE no = ?
ON CONFLICT (no) DO UPDATE SET class_no = excluded.class_no, line = iif(queue.unmet > 0, -1, excluded.line), turn = excluded.turn, ready_at = excluded.ready_at,
       urgent_at = excluded.urgent_at, deadline_at = excluded.deadline_at, priority = excluded.priority, events = excluded.events;

-- name: note_ended_dispatch
UPDATE ended_dispatch SET events = ? WHERE fence = ? AND job_no = ?;

-- name: note_queued
UPDATE queue SET events = ? WHERE no = ?;

-- name: note_dispatch
UPDATE active_dispatch SET events = ? WHERE no = ?;

-- name: move_dispatches
UPDATE active_dispatch SET phase = ?, started_at = coalesce(started_at, ?), expires_at = coalesce(?, expires_at), stop_at = coalesce(?, stop_at),
                stop_for = coalesce(?, stop_for), reason = coalesce(?, reason), worker = coalesce(?, worker)
WHERE phase = ? AND no = ?;

-- name: dispatches_for_beats
SELECT asked.value ->> 0, l.phase, l.expires_at, l.reason, m.addon_id, l.spent, l.progress, l.fence, j.no, j.job_id, j.spent, j.spent_before, l.events, l.no,
       j.progress, i.cost_limit, i.unit, l.pid
FROM json_each(:ids) AS asked CROSS JOIN active_dispatch l ON l.fence = asked.value ->> 2 AND l.no = coalesce(
    (SELECT no FROM job WHERE job_id = asked.value ->> 1), (SELECT no FROM active_dispatch WHERE standalone_lease = asked.value ->> 0))
CROSS JOIN admission_class m ON m.no = l.class_no LEFT JOIN job j ON j.no = l.no LEFT JOIN intent i ON i.no = l.no;

-- name: renew
UPDATE active_dispatch SET expires_at = ?, progress = ?, spent = ?, events = ?, pid = ? WHERE no = ?;

-- name: beat_jobs
UPDATE job SET progress = ?, spent = ? WHERE no = ?;

-- name: set_checkpoints
INSERT INTO checkpoint (job_no, at, fence, data) VALUES (?, ?, ?, ?)
ON CONFLICT (job_no) DO UPDATE SET at = excluded.at, fence = excluded.fence, data = excluded.data;

-- name: spend
INSERT INTO budget (addon_id, period, spent) VALUES (?, ?, ?)
ON CONFLICT (addon_id, period) DO UPDATE SET spent = spent + excluded.spent RETURNING addon_id, period, spent;

-- name: spent
SELECT addon_id, period, spent FROM budget WHERE period IN (:day, :month);

-- name: ledger
SELECT scope, name, units, running FROM ledger_totals WHERE running > 0;

-- name: totals
SELECT scope, name, units, running, weight, paused, average, held, at, jobs FROM totals;

-- name: set_totals
INSERT OR REPLACE INTO totals (scope, name, units, running, weight, paused, average, held, at, jobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: addons
SELECT addon_id, weight, paused, average, units, at FROM addon_totals ORDER BY addon_id;

-- name: tally
SELECT addon_id, state, jobs FROM tally_totals WHERE jobs > 0;

-- name: expired
SELECT coalesce(l.standalone_lease, j.job_id || '.' || l.fence) FROM active_dispatch l LEFT JOIN job j ON j.no = l.no
WHERE l.expires_at <= :now ORDER BY l.expires_at LIMIT :most;

-- name: to_stop
SELECT coalesce(l.standalone_lease, j.job_id || '.' || l.fence) FROM active_dispatch l LEFT JOIN job j ON j.no = l.no
WHERE l.phase = 'leased' AND l.stop_at <= :now ORDER BY l.stop_at LIMIT :most;

-- name: past_deadline
SELECT job_id FROM queue WHERE deadline_at IS NOT NULL AND deadline_at <= :now ORDER BY deadline_at LIMIT :most;

-- name: alarm
SELECT min(moment) FROM (
    SELECT * FROM (SELECT 0 AS moment FROM pending_end WHERE no > 0 LIMIT 1) UNION ALL
    SELECT * FROM (SELECT ready_at AS moment FROM queue WHERE line = 0 ORDER BY ready_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT urgent_at FROM queue WHERE line = 1 AND urgent_at IS NOT NULL ORDER BY urgent_at LIMIT 1)
    UNION ALL SELECT * FROM (SELECT deadline_at FROM queue WHERE deadline_at IS NOT NULL ORDER BY deadline_at LIMIT 1)
    UNION ALL SELECT min(expires_at) FROM active_dispatch
    UNION ALL SELECT min(stop_at) FROM active_dispatch WHERE phase = 'leased');

-- name: shift
UPDATE active_dispatch SET admitted_at = admitted_at + :by, started_at = started_at + :by, expires_at = expires_at + :by, stop_at = stop_at + :by,
                ends_at = ends_at + :by;

-- name: shift_queue
-- As `ordering.shift_place`.
UPDATE queue SET ready_at = new.ready_at, turn = queue.turn + new.ready_at - queue.ready_at,
                 line = CASE WHEN queue.unmet > 0 THEN -1 WHEN new.ready_at > :now THEN 0 WHEN queue.urgent_at <= :now THEN 2 ELSE 1 END,
                 denied_at = queue.denied_at + :by, passed_at = queue.passed_at + :by
FROM (SELECT q.no, CASE WHEN q.line = 0 AND q.ready_at = j.earliest_start_at THEN max(j.earliest_start_at, coalesce(j.not_before, 0) + :by)
                        ELSE max(q.ready_at + :by, coalesce(j.earliest_start_at, 0)) END AS ready_at
      FROM queue q JOIN job j ON j.no = q.no) AS new
WHERE new.no = queue.no;

-- name: shift_queued_jobs
UPDATE job SET ready_at = queue.ready_at, not_before = not_before + :by FROM queue WHERE queue.no = job.no;

-- name: shift_dispatched_jobs
UPDATE job SET ready_at = ready_at + :by, not_before = not_before + :by WHERE no IN (SELECT no FROM active_dispatch);

-- name: last_to_reorder
SELECT max(no) FROM (SELECT no FROM queue WHERE no > :after ORDER BY no LIMIT :most);

-- name: reorder
UPDATE queue SET turn = ready_at - priority * :per_point
WHERE no > :after AND no <= :last AND turn <> ready_at - priority * :per_point;

-- name: old_jobs
SELECT ended_at, no, job_id, addon_id, state FROM job
WHERE ended_at IS NOT NULL AND state <> 'BLOCKED' AND ended_at < :before AND NOT EXISTS (@awaited) ORDER BY ended_at, no LIMIT :most;

-- name: old_ended_jobs
SELECT no, at, jobs FROM ended_jobs WHERE at < :before ORDER BY at, no LIMIT :most;

-- name: done_jobs
SELECT job.no, job.job_id, job.addon_id FROM json_each(:nos) AS asked CROSS JOIN job ON job.no = asked.value WHERE NOT EXISTS (@awaited);

-- name: shorten_ended_jobs
UPDATE ended_jobs SET jobs = ? WHERE no = ?;

-- name: forget_ended_jobs
DELETE FROM ended_jobs WHERE no = ?;

-- name: awaited
-- A child waits for this job, or may wait for it again; or the job is a member of a batch that has not ended.
SELECT 1 FROM dependency d LEFT JOIN job_group g ON g.no = d.child WHERE d.parent = job.no AND (d.status = 'open' OR g.no IS NOT NULL AND g.state IS NULL)

-- name: forget_dependencies
DELETE FROM dependency WHERE parent = ?1 OR child = ?1;

-- name: forget_job
DELETE FROM job WHERE no = ?;

-- name: forget_intent
DELETE FROM intent WHERE no = ?;

-- name: batches_of
SELECT batch, events FROM trail WHERE batch IN (
    SELECT event_batch.batch FROM json_each(:nos) AS asked CROSS JOIN event_batch ON event_batch.job_no = asked.value);

-- name: forget_batches
DELETE FROM trail WHERE batch = ?;

-- name: rewrite_batches
UPDATE trail SET events = ? WHERE batch = ?;

-- name: forget_mentions
DELETE FROM mention WHERE job_no = ?;

-- name: forget_checkpoint
DELETE FROM checkpoint WHERE job_no = ?;

-- name: forget_dispatches
DELETE FROM ended_dispatch WHERE job_no = ?;

-- name: checkpoint
SELECT c.data FROM checkpoint c JOIN job j ON j.no = c.job_no WHERE j.job_id = :job_id;

-- name: events
-- Whole batches of events. The reader may have read a part of the first one.
SELECT batch - 1, events FROM trail
WHERE batch >= coalesce((SELECT max(batch) FROM trail WHERE batch <= :after), 0) AND batch + size - 1 > :after ORDER BY batch;

-- name: events_of
-- As `events`, but only batches that may have an event of one of these kinds.
SELECT batch - 1, events FROM trail
WHERE batch >= coalesce((SELECT max(batch) FROM trail WHERE batch <= :after), 0) AND batch + size - 1 > :after
AND EXISTS (SELECT 1 FROM json_each(:kinds) AS kind WHERE instr(events, kind.value) > 0) ORDER BY batch;

-- name: newest
SELECT coalesce((SELECT batch + size - 1 FROM trail ORDER BY batch DESC LIMIT 1), 0);

-- name: events_of_job
SELECT batch - 1, events FROM trail WHERE batch IN (
    SELECT batch FROM event_batch WHERE job_no = (SELECT no FROM job WHERE job_id = :job_id)) ORDER BY batch;

-- name: job_columns
SELECT j.no, j.job_id, j.state, j.created_at, j.ready_at, j.not_before, j.fence, j.crash, j.unavailable, j.error, j.start, j.active, j.spent,
       j.spent_before, j.progress, j.denied, j.denied_data, j.denied_at, j.passed_at, j.ended_at, j.priority, j.earliest_start_at, j.deadline_at,
       j.expected_sec, j.max_runtime_sec, j.max_active_sec, j.idempotency_key, j.class_no,
       i.payload, i.tags, i.unit, i.cost_limit, i.time_sensitive, i.retry_delays, i.preemptible, i.dependencies, j.pid, j.unmet, j.events

-- name: jobs_by_id
-- CROSS JOIN makes the planner look up each job in the order of the ids, whatever it assumes about sizes.
@job_columns FROM json_each(:ids) AS asked CROSS JOIN job_full j ON j.job_id = asked.value CROSS JOIN intent i USING (no)

-- name: all_jobs
@job_columns FROM job_full j CROSS JOIN intent i USING (no)

-- name: queued_jobs
SELECT job.no FROM queue AS place CROSS JOIN job ON job.no = place.no WHERE ? = 'QUEUED'

-- name: jobs_in_flight
SELECT job.no FROM active_dispatch AS place CROSS JOIN job ON job.no = place.no WHERE iif(phase = 'reserved', 'DISPATCHING', 'RUNNING') = ?

-- name: settled_jobs
SELECT job.no FROM job WHERE job.state = ?

-- name: completed_jobs
-- Found by their attempts, which are in the order of jobs; most of these completed.
SELECT job.no FROM ended_dispatch AS place CROSS JOIN job ON job.no = place.job_no WHERE place.how = 'completed' AND ? = 'DONE'

-- name: dispatch_columns
SELECT d.dispatch_id, d.job_id, d.addon_id, d.host, d.fence, d.phase, d.admitted_at, d.expires_at, d.started_at, d.ends_at, d.stop_at, d.stop_for,
       d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure, d.pid, d.class_no, d.number
FROM dispatch_full d

-- name: dispatches_by_id
-- One dispatch. The fence of a lease without a job is 0, which no attempt at a job has.
@dispatch_columns WHERE d.fence = :fence AND d.number = coalesce((SELECT no FROM job WHERE job_id = :job_id),
    (SELECT no FROM active_dispatch WHERE standalone_lease = :dispatch_id), (SELECT job_no FROM ended_dispatch WHERE standalone_lease = :dispatch_id));

-- name: job_results
SELECT j.job_id, j.state, a.result FROM json_each(:ids) AS asked CROSS JOIN job_full j ON j.job_id = asked.value
LEFT JOIN ended_dispatch a ON a.job_no = j.no AND a.fence = j.fence AND j.state = 'DONE';

-- name: attempts
@dispatch_columns WHERE d.number = (SELECT no FROM job WHERE job_id = :job_id) ORDER BY d.fence;

-- name: live
@dispatch_columns WHERE d.phase <> 'ended' AND d.phase IN (SELECT value FROM json_each(:phases)) AND (:addon_id IS NULL OR d.addon_id = :addon_id)
ORDER BY d.admitted_at, d.dispatch_id LIMIT :most;

-- name: learned
SELECT name, seq, data FROM learned ORDER BY name;

-- name: learned_cursor
SELECT seq FROM learned WHERE name = '';

-- name: move_learned_cursor
-- Returns no row if another host has read further in the meantime.
INSERT INTO learned (name, seq, data) VALUES ('', :upto, '')
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq WHERE learned.seq = :after RETURNING seq;

-- name: set_learned
INSERT INTO learned (name, seq, data) SELECT row.value ->> 0, :upto, row.value ->> 1 FROM json_each(:rows) AS row WHERE true
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq, data = excluded.data;

-- name: forget_learned
DELETE FROM learned WHERE name IN (SELECT value FROM json_each(:names));

-- name: observed_jobs
-- The columns that learning reads, without payload and result.
SELECT j.job_id, j.class_no, j.priority, i.tags, j.expected_sec, j.created_at, j.fence, coalesce(l.started_at, a.started_at), a.ended_at, a.how,
       coalesce(l.spent, a.spent, 0), j.ended_at IS NOT NULL
FROM json_each(:ids) AS asked CROSS JOIN job_full j ON j.job_id = asked.value CROSS JOIN intent i USING (no)
LEFT JOIN active_dispatch l ON l.no = j.no AND l.fence = j.fence LEFT JOIN ended_dispatch a ON a.job_no = j.no AND a.fence = j.fence;

-- name: register_host
-- The row of another living scheduler is not changed: then no row is returned.
INSERT INTO host (host, instance, capacity, quiet, labels, version, url, started_at, seen_at, until, workers)
VALUES (:host, :instance, :capacity, :quiet, :labels, :version, :url, :started_at, :seen_at, :until, :workers)
ON CONFLICT (host) DO UPDATE SET instance = excluded.instance, capacity = excluded.capacity, quiet = excluded.quiet, labels = excluded.labels,
    version = excluded.version, url = excluded.url, started_at = excluded.started_at, seen_at = excluded.seen_at, until = excluded.until,
    workers = excluded.workers
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
SELECT h.host, h.instance, h.capacity, h.quiet, h.labels, h.version, h.url, h.started_at, h.seen_at, h.until, h.draining, coalesce(l.units, 0), h.workers
FROM host h LEFT JOIN ledger_totals l ON l.scope = 'host' AND l.name = h.host ORDER BY h.host;

-- name: schedule_columns
SELECT s.body, s.state, s.version FROM schedule s

-- name: schedules
@schedule_columns ORDER BY s.name;

-- name: due_schedules
@schedule_columns WHERE s.due_at <= :due_by ORDER BY s.name;

-- name: schedule_by_name
@schedule_columns WHERE s.name = :name;

-- name: lock_schedule
-- Needs no lock: the transaction is the only writer.
SELECT version FROM schedule WHERE name = :name;

-- name: schedule_alarm
SELECT min(due_at) FROM schedule WHERE due_at IS NOT NULL;

-- name: record_load
INSERT INTO load_hour (host, hour, busy, at) VALUES (:host, :hour, :busy, :at)
ON CONFLICT (host, hour) DO UPDATE SET busy = load_hour.busy + :newest * (excluded.busy - load_hour.busy), at = excluded.at;

-- name: waiting_by_labels
SELECT labels, count(*), sum(cost_units) FROM queue JOIN admission_class ON admission_class.no = queue.class_no
WHERE line > 0 GROUP BY labels;

-- name: load_hours
SELECT hour, avg(busy) FROM load_hour GROUP BY hour;

-- name: add_schedule
INSERT INTO schedule (name, addon_id, version, due_at, body, state)
VALUES (:name, :addon_id, :version, :due_at, :body, :state);

-- name: set_schedule
UPDATE schedule SET addon_id = :addon_id, version = :version, due_at = :due_at, body = :body, state = :state
WHERE name = :name;

-- name: remove_schedule
DELETE FROM schedule WHERE name = :name;

-- name: dependencies_exist
-- If there is no dependency, no end has children.
SELECT EXISTS (SELECT 1 FROM dependency WHERE status = 'open');

-- name: insert_dependencies
-- The list has the ids of parents and children, which may be groups.
INSERT INTO dependency (parent, child, condition, if_unmet)
SELECT coalesce((SELECT no FROM job WHERE job_id = asked.value ->> 0), (SELECT no FROM job_group WHERE group_id = asked.value ->> 0)),
       coalesce((SELECT no FROM job WHERE job_id = asked.value ->> 1), (SELECT no FROM job_group WHERE group_id = asked.value ->> 1)),
       asked.value ->> 2, asked.value ->> 3
FROM json_each(?) AS asked;

-- name: known_jobs
SELECT no, job_id FROM json_each(:ids) AS asked CROSS JOIN job ON job.job_id = asked.value;

-- name: known_groups
SELECT g.group_id FROM json_each(:ids) AS asked CROSS JOIN job_group g ON g.group_id = asked.value;

-- name: waiting_for_groups
-- Which of these parents wait for which of these batches, directly or through others.
WITH RECURSIVE waiting (group_id, no) AS (
    SELECT g.group_id, g.no FROM json_each(:batches) AS asked CROSS JOIN job_group g ON g.group_id = asked.value
    UNION
    SELECT w.group_id, d.child FROM waiting w CROSS JOIN dependency d ON d.parent = w.no AND d.status = 'open')
SELECT w.group_id, coalesce(j.job_id, g.group_id) AS parent FROM waiting w LEFT JOIN job j ON j.no = w.no LEFT JOIN job_group g ON g.no = w.no
WHERE parent <> w.group_id AND parent IN (SELECT value FROM json_each(:parents));

-- name: children
-- The queued children of a parent that ended, and the batches of which it is a member. A failed child is judged again when it is retried.
SELECT d.parent, '', '', d.child, coalesce(q.job_id, g.group_id), d.condition, d.if_unmet, coalesce(q.unmet, 0), coalesce(q.events, 0)
FROM dependency d LEFT JOIN queue q ON q.no = d.child LEFT JOIN job_group g ON g.no = d.child
WHERE d.parent = :parent AND d.status = 'open' AND d.child > :after AND coalesce(q.no, g.no) IS NOT NULL ORDER BY d.child LIMIT :most;

-- name: memberships
SELECT d.parent, '', '', d.child, g.group_id, d.condition, d.if_unmet, 0, 0
FROM json_each(:members) AS asked CROSS JOIN dependency d ON d.parent = asked.value CROSS JOIN job_group g ON g.no = d.child
WHERE d.status = 'met' ORDER BY d.parent, d.child;

-- name: parents
-- The parents of children that begin to wait.
SELECT d.parent, coalesce(p.job_id, g.group_id), coalesce(p.state, @group_state), d.child, c.job_id, d.condition, d.if_unmet, 0, 0
FROM json_each(:children) AS asked CROSS JOIN dependency d ON d.child = asked.value AND d.status = 'open'
CROSS JOIN job c ON c.no = d.child LEFT JOIN job_full p ON p.no = d.parent LEFT JOIN job_group g ON g.no = d.parent ORDER BY d.child, d.parent;

-- name: group_state
-- The state of a group as the parent of `d`. For `failed` with `any` the first failure is enough.
coalesce(g.state, iif(g.failed > 0 AND d.condition = 'failed' AND d.if_unmet = 'any', 'FAILED', 'RUNNING'))

-- name: settle_dependencies
UPDATE dependency SET status = ? FROM json_each(?) AS asked WHERE dependency.child = asked.value ->> 1 AND dependency.parent = asked.value ->> 0;

-- name: void_dependencies
UPDATE dependency SET status = 'void' WHERE status = 'open' AND child IN (SELECT value FROM json_each(?));

-- name: wait_for_parents
UPDATE queue SET unmet = asked.value ->> 1, line = -1 FROM json_each(?) AS asked WHERE queue.no = asked.value ->> 0;

-- name: release_children
-- As `ordering.released_place`.
UPDATE queue SET unmet = 0, events = events + 1, ready_at = max(ready_at, :now), turn = max(ready_at, :now) - priority * :per_point,
                 line = CASE WHEN ready_at > :now THEN 0 WHEN urgent_at <= :now THEN 2 ELSE 1 END
WHERE no IN (SELECT value FROM json_each(:nos));

-- name: release_jobs
UPDATE job SET ready_at = queue.ready_at FROM queue WHERE queue.no = job.no AND job.no IN (SELECT value FROM json_each(:nos));

-- name: postpone_ends
INSERT INTO pending_end (no, state, after) SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?) WHERE true
ON CONFLICT (no) DO UPDATE SET state = excluded.state, after = excluded.after;

-- name: take_pending_ends
DELETE FROM pending_end WHERE no IN (SELECT no FROM pending_end ORDER BY no LIMIT :most)
RETURNING no, coalesce((SELECT job_id FROM job WHERE job.no = pending_end.no), (SELECT group_id FROM job_group g WHERE g.no = pending_end.no)), state, after;

-- name: pending_ends
SELECT count(*) FROM pending_end;

-- name: dependencies
-- The dependencies of a job or a group, then those on it.
SELECT coalesce((SELECT job_id FROM job WHERE no = d.parent), (SELECT group_id FROM job_group WHERE no = d.parent)),
       coalesce((SELECT job_id FROM job WHERE no = d.child), (SELECT group_id FROM job_group WHERE no = d.child)), d.condition, d.status FROM (
    SELECT * FROM (SELECT 0 AS side, parent, child, condition, status FROM dependency WHERE child = (@number_of) ORDER BY parent LIMIT :most)
    UNION ALL
    SELECT * FROM (SELECT 1, parent, child, condition, status FROM dependency WHERE parent = (@number_of) ORDER BY child LIMIT :most)) AS d
ORDER BY d.side, d.parent, d.child;

-- name: number_of
SELECT coalesce((SELECT no FROM job WHERE job_id = :job_id), (SELECT no FROM job_group WHERE group_id = :job_id))

-- name: audit_dependencies
-- Children whose number of open dependencies is wrong, or that are in a ready queue while they wait; and parents that ended and whose children were not
-- resolved.
SELECT q.job_id FROM queue q WHERE q.unmet <> (SELECT count(*) FROM dependency d WHERE d.child = q.no AND d.status = 'open')
UNION ALL SELECT job_id FROM queue WHERE (unmet > 0) <> (line < 0)
UNION ALL SELECT p.job_id FROM dependency d CROSS JOIN queue q ON q.no = d.child CROSS JOIN job_full p ON p.no = d.parent
WHERE d.status = 'open' AND d.parent NOT IN (SELECT no FROM pending_end)
AND (p.state = 'DONE' OR p.state = 'CANCELED' OR p.state = 'FAILED' AND NOT (d.condition = 'ok' AND d.if_unmet = 'wait'))
UNION ALL SELECT q.job_id FROM dependency d CROSS JOIN queue q ON q.no = d.child CROSS JOIN job_group g ON g.no = d.parent
WHERE d.status = 'open' AND d.parent NOT IN (SELECT no FROM pending_end) AND g.state IS NOT NULL
AND NOT (g.state = 'FAILED' AND d.condition = 'ok' AND d.if_unmet = 'wait')
UNION ALL SELECT 'number ' || parent FROM dependency
WHERE parent NOT IN (SELECT no FROM job UNION ALL SELECT no FROM job_group) OR child NOT IN (SELECT no FROM job UNION ALL SELECT no FROM job_group);

-- name: audit_groups
SELECT group_id FROM job_group g WHERE group_id >= 'batch:' AND group_id < 'batch;'
AND (total - done - failed - canceled <> (SELECT count(*) FROM dependency d WHERE d.child = g.no AND d.status = 'open')
     OR (state IS NULL) <> (is_open OR total > done + failed + canceled) OR (state IS NULL) <> (ended_at IS NULL));

-- name: audit_dispatches
SELECT d.dispatch_id, d.host, d.cost_units, d.addon_id, d.class_no, d.phase, d.fence, j.job_id, j.state, j.fence
FROM dispatch_full d LEFT JOIN job_full j ON j.no = d.job_no WHERE d.phase <> 'ended';

-- name: audit_tally
SELECT addon_id, state, count(*) FROM job_full GROUP BY addon_id, state;

-- name: audit_in_flight
-- Jobs in two tables or in none, and DONE jobs that pruning would not find.
SELECT j.job_id FROM job j LEFT JOIN queue q ON q.no = j.no LEFT JOIN active_dispatch l ON l.no = j.no LEFT JOIN ended_dispatch a ON a.job_no = j.no AND a.fence > j.tried
WHERE (j.state IS NOT NULL) + (q.no IS NOT NULL) + (l.no IS NOT NULL) + coalesce(a.fence = j.tried + 1 AND a.how = 'completed', 0) <> 1
   OR l.fence <> j.tried + 1 OR q.fence <> j.tried
UNION ALL SELECT 'number ' || no FROM queue WHERE no NOT IN (SELECT no FROM job)
UNION ALL SELECT 'number ' || no FROM active_dispatch WHERE no > 0 AND no NOT IN (SELECT no FROM job)
UNION ALL SELECT 'number ' || no FROM (
    SELECT no FROM job_full WHERE state = 'DONE' EXCEPT SELECT value FROM ended_jobs CROSS JOIN json_each(ended_jobs.jobs));

-- name: audit_trail
WITH told AS MATERIALIZED (
    SELECT job_id, count(*) AS events, min(n) AS first, max(n) AS last FROM event WHERE job_id IS NOT NULL GROUP BY job_id)
SELECT told.job_id FROM told LEFT JOIN job_full j ON j.job_id = told.job_id
WHERE (told.events, told.first, told.last) IS NOT (j.events, 1, j.events)
UNION ALL SELECT min(job_id) FROM job HAVING count(*) <> (SELECT count(*) FROM told)
UNION ALL SELECT j.job_id FROM event e CROSS JOIN job j ON j.job_id = e.job_id
WHERE NOT EXISTS (SELECT 1 FROM event_batch t WHERE t.job_no = j.no AND t.batch = e.batch);

-- name: audit_fold
SELECT j.job_id FROM event e CROSS JOIN job_full j ON j.job_id = e.job_id WHERE j.events = e.n AND e.state <> j.state;

-- name: array_columns
SELECT a.body, a.state FROM job_array a

-- name: array_by_id
@array_columns WHERE a.array_id = :array_id;

-- name: lock_arrays
@array_columns WHERE a.array_id = :array_id;

-- name: newest_arrays
@array_columns ORDER BY a.created_at DESC, a.array_id DESC LIMIT :most;

-- name: open_arrays
@array_columns WHERE a.ended_at IS NULL ORDER BY a.created_at DESC, a.array_id DESC LIMIT :most;

-- name: add_array
INSERT INTO job_array (array_id, addon_id, created_at, ended_at, body, state)
VALUES (:array_id, :addon_id, :created_at, :ended_at, :body, :state);

-- name: set_array
UPDATE job_array SET ended_at = :ended_at, state = :state WHERE array_id = :array_id;

-- name: failed_indices
SELECT chunk, failed FROM array_chunk WHERE array_id = :array_id AND failed <> 0 ORDER BY chunk;

-- name: indices_again
SELECT chunk, again FROM array_chunk WHERE array_id = :array_id AND chunk >= :chunk AND again <> 0 ORDER BY chunk LIMIT :most;

-- name: fail_indices
INSERT INTO array_chunk (array_id, chunk, failed) VALUES (:array_id, :chunk, :bits)
ON CONFLICT (array_id, chunk) DO UPDATE SET failed = failed | excluded.failed;

-- name: repeat_indices
-- These indices have jobs again.
UPDATE array_chunk SET again = again & ~:bits WHERE array_id = :array_id AND chunk = :chunk;

-- name: retry_indices
UPDATE array_chunk SET again = again | failed, failed = 0 WHERE array_id = :array_id AND failed <> 0;

-- name: forget_array_chunks
DELETE FROM array_chunk WHERE array_id IN (SELECT array_id FROM job_array WHERE ended_at < :before AND NOT EXISTS (
    SELECT 1 FROM job_group g CROSS JOIN dependency d ON d.parent = g.no AND d.status = 'open' WHERE g.group_id = job_array.array_id));

-- name: forget_arrays
DELETE FROM job_array WHERE ended_at < :before AND NOT EXISTS (
    SELECT 1 FROM job_group g CROSS JOIN dependency d ON d.parent = g.no AND d.status = 'open' WHERE g.group_id = job_array.array_id);

-- name: group_columns
SELECT g.no, g.group_id, g.addon_id, g.created_at, g.is_open, g.total, g.done, g.failed, g.canceled, g.state, g.ended_at, g.digest FROM job_group g

-- name: group_by_id
@group_columns WHERE g.group_id = :group_id;

-- name: lock_groups
-- Needs no lock: the transaction is the only writer.
@group_columns WHERE g.group_id IN (SELECT value FROM json_each(:ids)) ORDER BY g.no;

-- name: groups_by_no
@group_columns WHERE g.no IN (SELECT value FROM json_each(:nos)) ORDER BY g.no;

-- name: newest_batches
@group_columns WHERE g.group_id >= 'batch:' AND g.group_id < 'batch;' AND (:addon_id IS NULL OR g.addon_id = :addon_id)
ORDER BY g.created_at DESC, g.no DESC LIMIT :most;

-- name: add_group
INSERT INTO job_group (no, group_id, addon_id, created_at, is_open, total, done, failed, canceled, state, ended_at, digest)
VALUES (coalesce((SELECT max(no) FROM job_group), 4611686018427387904) + 1, :group_id, :addon_id, :created_at, :is_open, :total, :done, :failed,
        :canceled, :state, :ended_at, :digest);

-- name: set_group
UPDATE job_group SET is_open = :is_open, total = :total, done = :done, failed = :failed, canceled = :canceled, state = :state, ended_at = :ended_at
WHERE group_id = :group_id;

-- name: old_groups
SELECT g.no FROM job_group g WHERE g.ended_at < :before AND NOT EXISTS (SELECT 1 FROM dependency d WHERE d.parent = g.no AND d.status = 'open')

-- name: forget_memberships
DELETE FROM dependency WHERE child IN (@old_groups) OR parent IN (@old_groups);

-- name: forget_groups
DELETE FROM job_group WHERE no IN (@old_groups);

-- name: states_of
SELECT j.job_id, j.state FROM json_each(:ids) AS asked CROSS JOIN job_full j ON j.job_id = asked.value;
