-- Jobs that wait for other jobs. What waits for a parent stands in line -1, so that no round and no clock sees it.
DROP VIEW job_full;

CREATE TABLE queue_12 (
    no              INTEGER PRIMARY KEY,
    job_id          TEXT    NOT NULL,
    class_no        INTEGER NOT NULL,
    -- -1: it waits for its parents; 0: its time has not come; 1: in line; 2: in the urgent line.
    line            INTEGER NOT NULL CHECK (line BETWEEN -1 AND 2),
    turn            INTEGER NOT NULL,
    ready_at        INTEGER NOT NULL,
    urgent_at       INTEGER,
    deadline_at     INTEGER,
    priority        INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 100),
    fence           INTEGER NOT NULL,
    events          INTEGER NOT NULL,
    expected_sec    REAL,
    max_runtime_sec INTEGER,
    max_active_sec  INTEGER,
    active          INTEGER NOT NULL DEFAULT 0,
    denied          TEXT    NOT NULL DEFAULT '',
    denied_data     TEXT,
    denied_at       INTEGER,
    passed_at       INTEGER,
    -- How many parents it waits for.
    unmet           INTEGER NOT NULL DEFAULT 0 CHECK (unmet >= 0)
) STRICT;
INSERT INTO queue_12 SELECT no, job_id, class_no, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec, max_runtime_sec,
                           max_active_sec, active, denied, denied_data, denied_at, passed_at, 0 FROM queue;
DROP TABLE queue;
ALTER TABLE queue_12 RENAME TO queue;
CREATE INDEX queue_line ON queue (class_no, line, turn, no) WHERE line > 0;
CREATE INDEX queue_ready ON queue (ready_at) WHERE line = 0;
CREATE INDEX queue_urgent ON queue (urgent_at) WHERE line = 1 AND urgent_at IS NOT NULL;
CREATE INDEX queue_deadline ON queue (deadline_at) WHERE deadline_at IS NOT NULL;

-- What becomes of the job if they are not met, and the ids of its parents with their conditions, as JSON.
ALTER TABLE intent ADD COLUMN dependencies TEXT;

-- A child waits for the end of a parent, both by number. open: not met; void: the child was canceled.
CREATE TABLE dependency (
    parent    INTEGER NOT NULL,
    child     INTEGER NOT NULL,
    condition TEXT    NOT NULL CHECK (condition = 'ok' OR condition = 'done' OR condition = 'failed'),
    if_unmet  TEXT    NOT NULL CHECK (if_unmet = 'cancel' OR if_unmet = 'fail' OR if_unmet = 'wait'),
    status    TEXT    NOT NULL DEFAULT 'open' CHECK (status = 'open' OR status = 'met' OR status = 'void'),
    PRIMARY KEY (child, parent)
) STRICT, WITHOUT ROWID;
CREATE INDEX dependency_open ON dependency (parent, child) WHERE status = 'open';
CREATE INDEX dependency_parent ON dependency (parent, child);

-- Jobs that ended with more children than one transaction may follow, in the state that they ended in; `after`: the last child that was followed.
CREATE TABLE pending_end (no INTEGER PRIMARY KEY, state TEXT NOT NULL, after INTEGER NOT NULL) STRICT;

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
       coalesce(a.ended_at, j.ended_at) AS ended_at, j.idempotency_key, l.pid, coalesce(q.unmet, 0) AS unmet
FROM job j LEFT JOIN queue q ON q.no = j.no LEFT JOIN active_dispatch l ON l.no = j.no LEFT JOIN ended_dispatch a ON a.job_no = j.no AND a.fence = j.tried + 1;
