-- Jobs that wait for other jobs. What waits for a parent stands in line -1, so that no round sees it. A Penstock of the schema before would end a parent
-- and not tell its children, so it must not come to this schema any more: replace every daemon before the first job depends on another.
ALTER TABLE penstock.queue ADD COLUMN unmet INTEGER NOT NULL DEFAULT 0;
-- What becomes of the job if they are not met, and the ids of its parents with their conditions, as JSON.
ALTER TABLE penstock.job ADD COLUMN dependencies TEXT;

-- A child waits for the end of a parent, both by number. open: not met; void: the child was canceled. A submit that adds a row has locked the parent
-- (its job, its place in the queue, its dispatch) as every end does.
CREATE TABLE penstock.dependency (
    parent    BIGINT NOT NULL,
    child     BIGINT NOT NULL,
    condition TEXT   COLLATE "C" NOT NULL CHECK (condition IN ('ok', 'done', 'failed')),
    if_unmet  TEXT   COLLATE "C" NOT NULL CHECK (if_unmet IN ('cancel', 'fail', 'wait')),
    status    TEXT   COLLATE "C" NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'met', 'void')),
    PRIMARY KEY (child, parent)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX dependency_open ON penstock.dependency (parent, child) WHERE status = 'open';
CREATE INDEX dependency_parent ON penstock.dependency (parent, child);

-- Jobs that ended with more children than one transaction may follow, in the state that they ended in; `after`: the last child that was followed.
CREATE TABLE penstock.pending_end (no BIGINT PRIMARY KEY, state TEXT COLLATE "C" NOT NULL, after BIGINT NOT NULL);

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
FROM penstock.job j LEFT JOIN penstock.queue q ON q.no = j.no
LEFT JOIN penstock.dispatch d ON j.state IS NULL AND q.no IS NULL AND d.dispatch_id = j.job_id || '.' || (j.tried + 1);

UPDATE penstock.mark SET value = 11 WHERE name = 'needs';
