-- Each row of a job is found by its key, whatever the statistics say. Tables that were empty when the server gathered them
-- look empty until it gathers them again, and a join of two such tables may read all of one for each row of the other.
-- OFFSET 0 keeps the planner from turning a look by key into such a join.
CREATE OR REPLACE VIEW penstock.job_full AS
SELECT j.no, j.job_id, j.addon_id, j.class_no, j.state AS settled, q.no AS queued,
       CASE WHEN j.state IS NOT NULL THEN j.state WHEN q.no IS NOT NULL THEN 'QUEUED' WHEN d.phase = 'reserved' THEN 'DISPATCHING'
            WHEN d.phase = 'ended' THEN 'DONE' ELSE 'RUNNING' END AS state,
       j.tried + (d.dispatch_id IS NOT NULL)::integer AS fence, coalesce(q.events, d.events, j.events) AS events,
       j.created_at, j.ready_at, j.priority, j.earliest_start_at, j.not_before, j.deadline_at, j.expected_sec, j.max_runtime_sec, j.max_active_sec,
       j.active + CASE d.phase WHEN 'ended' THEN greatest(0, d.ended_at - d.started_at) ELSE 0 END AS active,
       CASE d.phase WHEN 'ended' THEN 0 ELSE j.crash END AS crash, CASE d.phase WHEN 'ended' THEN 0 ELSE j.unavailable END AS unavailable,
       CASE d.phase WHEN 'ended' THEN 0 ELSE j.error END AS error,
       CASE WHEN d.phase IS NULL OR d.phase = 'reserved' THEN j.start ELSE 0 END AS start,
       j.spent, j.spent_before, j.progress,
       CASE WHEN q.no IS NOT NULL THEN q.denied WHEN d.phase IS NULL THEN j.denied ELSE '' END AS denied,
       CASE WHEN q.no IS NOT NULL THEN q.denied_data WHEN d.phase IS NULL THEN j.denied_data END AS denied_data,
       CASE WHEN q.no IS NOT NULL THEN q.denied_at WHEN d.phase IS NULL THEN j.denied_at END AS denied_at,
       CASE WHEN q.no IS NOT NULL THEN q.passed_at WHEN d.phase IS NULL THEN j.passed_at END AS passed_at,
       CASE d.phase WHEN 'ended' THEN d.ended_at ELSE j.ended_at END AS ended_at,
       j.submitted_in, j.payload, j.tags, j.unit, j.cost_limit, j.time_sensitive, j.retry_delays, j.idempotency_key, j.body_hash,
       CASE WHEN d.phase <> 'ended' THEN d.pid END AS pid, j.preemptible,
       j.dependencies, coalesce(q.unmet, 0) AS unmet
FROM penstock.job j LEFT JOIN LATERAL (SELECT * FROM penstock.queue WHERE no = j.no OFFSET 0) AS q ON true
LEFT JOIN LATERAL (SELECT * FROM penstock.dispatch WHERE j.state IS NULL AND q.no IS NULL AND dispatch_id = j.job_id || '.' || (j.tried + 1) OFFSET 0) AS d ON true;
