-- One thing has one name, here and on a server: a table or view that both have is called the same and is of the same kind.
DROP VIEW whole;
DROP VIEW dispatch;
DROP VIEW told_in;
DROP VIEW ledger;
DROP VIEW addon;
DROP VIEW tally;
DROP TRIGGER attempt_final;
DROP INDEX attempt_loan;
DROP INDEX done_at;

ALTER TABLE demand RENAME TO admission_class;
ALTER TABLE job RENAME COLUMN demand TO class_no;
ALTER TABLE queue RENAME COLUMN demand TO class_no;
ALTER TABLE live RENAME COLUMN demand TO class_no;
ALTER TABLE live RENAME COLUMN loan TO standalone_lease;
ALTER TABLE live RENAME TO active_dispatch;
ALTER TABLE attempt RENAME COLUMN demand TO class_no;
ALTER TABLE attempt RENAME COLUMN loan TO standalone_lease;
ALTER TABLE attempt RENAME TO ended_dispatch;
ALTER TABLE done RENAME TO ended_jobs;
ALTER TABLE sums RENAME TO totals;

CREATE UNIQUE INDEX ended_dispatch_lease ON ended_dispatch (standalone_lease) WHERE standalone_lease IS NOT NULL;
CREATE INDEX ended_jobs_at ON ended_jobs (at);
CREATE TRIGGER ended_dispatch_final BEFORE UPDATE ON ended_dispatch
BEGIN SELECT RAISE(ABORT, 'a dispatch that has ended stays so, and with it a job that is done'); END;

-- The parts of `totals`, each as PostgreSQL has it in a table of its own.
CREATE VIEW ledger_totals AS SELECT scope, name, units, running FROM totals;
CREATE VIEW addon_totals AS
SELECT name AS addon_id, weight, paused, average, held AS units, at FROM totals WHERE scope = 'addon' AND weight IS NOT NULL;
CREATE VIEW tally_totals AS
SELECT name AS addon_id, of.key AS state, of.value AS jobs FROM totals CROSS JOIN json_each(totals.jobs) AS of
WHERE scope = 'addon' AND totals.jobs IS NOT NULL;

-- A job with its place: what a reader sees.
CREATE VIEW job_full AS
SELECT j.no, j.job_id, j.submitted_in, j.addon_id, j.class_no,
       CASE WHEN j.state IS NOT NULL THEN j.state WHEN q.no IS NOT NULL THEN 'QUEUED' WHEN l.no IS NULL THEN 'DONE' WHEN l.phase = 'reserved' THEN 'DISPATCHING'
            ELSE 'RUNNING' END AS state,
       j.tried + (l.no IS NOT NULL OR a.fence IS NOT NULL) AS fence, coalesce(q.events, l.events, a.events, j.events) AS events,
       j.created_at, j.ready_at, j.not_before, j.priority, j.earliest_start_at, j.deadline_at, j.expected_sec, j.max_runtime_sec, j.max_active_sec,
       j.active + max(0, coalesce(a.ended_at - a.started_at, 0)) AS active,
       iif(a.fence IS NULL, j.crash, 0) AS crash, iif(a.fence IS NULL, j.unavailable, 0) AS unavailable, iif(a.fence IS NULL, j.error, 0) AS error,
       iif(a.fence IS NULL AND (l.no IS NULL OR l.phase = 'reserved'), j.start, 0) AS start,
       j.spent, j.spent_before, j.progress, iif(q.no IS NULL, j.denied, q.denied) AS denied, iif(q.no IS NULL, j.denied_data, q.denied_data) AS denied_data,
       iif(q.no IS NULL, j.denied_at, q.denied_at) AS denied_at, iif(q.no IS NULL, j.passed_at, q.passed_at) AS passed_at,
       coalesce(a.ended_at, j.ended_at) AS ended_at, j.idempotency_key, l.pid
FROM job j LEFT JOIN queue q ON q.no = j.no LEFT JOIN active_dispatch l ON l.no = j.no LEFT JOIN ended_dispatch a ON a.job_no = j.no AND a.fence = j.tried + 1;

-- All dispatches with their jobs and classes, for people, and to check by.
CREATE VIEW dispatch_full AS
SELECT l.no AS number, l.standalone_lease, coalesce(l.standalone_lease, j.job_id || '.' || l.fence) AS dispatch_id, j.no AS job_no, j.job_id, l.class_no, m.addon_id, l.host, l.fence, m.cost_units, l.phase,
       l.admitted_at, l.started_at, l.expires_at, l.ends_at, l.stop_at, l.stop_for, l.reason, l.worker, l.spent, l.progress, NULL AS ended_at, NULL AS how,
       NULL AS result, NULL AS failure, l.started_in, NULL AS ended_in, l.pid
FROM active_dispatch l JOIN admission_class m ON m.no = l.class_no LEFT JOIN job j ON j.no = l.no
UNION ALL
SELECT a.job_no, a.standalone_lease, coalesce(a.standalone_lease, j.job_id || '.' || a.fence), j.no, j.job_id, a.class_no, m.addon_id, a.host, a.fence, m.cost_units, 'ended', a.admitted_at, a.started_at,
       a.expires_at, a.ends_at, a.stop_at, a.stop_for, a.reason, a.worker, a.spent, a.progress, a.ended_at, a.how, a.result, a.failure, a.started_in, a.ended_in, a.pid
FROM ended_dispatch a JOIN admission_class m ON m.no = a.class_no LEFT JOIN job j ON j.no = a.job_no;

-- Which batches tell of a job. Those of most are known without a mention.
CREATE VIEW event_batch AS
SELECT no AS job_no, submitted_in AS batch FROM job
UNION ALL SELECT job_no, batch FROM mention
UNION ALL SELECT no, started_in FROM active_dispatch
UNION ALL SELECT job_no, started_in FROM ended_dispatch
UNION ALL SELECT job_no, ended_in FROM ended_dispatch;
