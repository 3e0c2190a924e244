-- The process that runs an attempt, as its worker told it.
ALTER TABLE live ADD COLUMN pid INTEGER CHECK (pid > 0);
ALTER TABLE attempt ADD COLUMN pid INTEGER;

DROP VIEW whole;
CREATE VIEW whole AS
SELECT j.no, j.job_id, j.submitted_in, j.addon_id, j.demand,
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
FROM job j LEFT JOIN queue q ON q.no = j.no LEFT JOIN live l ON l.no = j.no LEFT JOIN attempt a ON a.job_no = j.no AND a.fence = j.tried + 1;

DROP VIEW dispatch;
CREATE VIEW dispatch AS
SELECT l.no AS number, l.loan, coalesce(l.loan, j.job_id || '.' || l.fence) AS dispatch_id, j.no AS job_no, j.job_id, l.demand, m.addon_id, l.host, l.fence, m.cost_units, l.phase,
       l.admitted_at, l.started_at, l.expires_at, l.ends_at, l.stop_at, l.stop_for, l.reason, l.worker, l.spent, l.progress, NULL AS ended_at, NULL AS how,
       NULL AS result, NULL AS failure, l.started_in, NULL AS ended_in, l.pid
FROM live l JOIN demand m ON m.no = l.demand LEFT JOIN job j ON j.no = l.no
UNION ALL
SELECT a.job_no, a.loan, coalesce(a.loan, j.job_id || '.' || a.fence), j.no, j.job_id, a.demand, m.addon_id, a.host, a.fence, m.cost_units, 'ended', a.admitted_at, a.started_at,
       a.expires_at, a.ends_at, a.stop_at, a.stop_for, a.reason, a.worker, a.spent, a.progress, a.ended_at, a.how, a.result, a.failure, a.started_in, a.ended_in, a.pid
FROM attempt a JOIN demand m ON m.no = a.demand LEFT JOIN job j ON j.no = a.job_no;
