-- Whether a run of the job may be asked, and then forced, to give its units to a job of clearly higher priority. A Penstock of the schema before goes on
-- working: its jobs may be, as all could then.
ALTER TABLE penstock.job ADD COLUMN preemptible INTEGER NOT NULL DEFAULT 1 CHECK (preemptible IN (0, 1));

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
       CASE WHEN d.phase <> 'ended' THEN d.pid END AS pid, j.preemptible
FROM penstock.job j LEFT JOIN penstock.queue q ON q.no = j.no
LEFT JOIN penstock.dispatch d ON j.state IS NULL AND q.no IS NULL AND d.dispatch_id = j.job_id || '.' || (j.tried + 1);
