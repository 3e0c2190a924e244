-- A job is in one of four places: in `queue` while it waits, in `live` while it is in flight, settled in its own row when it failed, was canceled or is
-- blocked; and one that is nowhere else is done, which its last attempt tells. A start takes a row from the first and puts one into the second, and being
-- done makes that one an attempt: neither writes the job's own row. Before, each of them wrote it anew and looked through all of its indexes.
DROP TRIGGER job_final;
ALTER TABLE job RENAME TO job_5;
ALTER TABLE dispatch RENAME TO dispatch_5;

-- What was said, and what seldom changes.
CREATE TABLE job (
    no                INTEGER PRIMARY KEY,
    job_id            TEXT    NOT NULL UNIQUE,
    submitted_in      INTEGER NOT NULL,
    addon_id          TEXT    NOT NULL,
    demand            INTEGER NOT NULL,
    -- NULL: it is in another place, or done.
    state             TEXT    CHECK (state = 'FAILED' OR state = 'CANCELED' OR state = 'BLOCKED'),
    -- The number of its last attempt that ended otherwise than by being done: its present one, or the one by which it was done, is the next.
    tried             INTEGER NOT NULL DEFAULT 0 CHECK (tried >= 0),
    -- Of a job that is settled here; that of another is in the row of its place.
    events            INTEGER NOT NULL DEFAULT 0,
    created_at        INTEGER NOT NULL,
    ready_at          INTEGER NOT NULL,
    priority          INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 100),
    earliest_start_at INTEGER,
    not_before        INTEGER,
    deadline_at       INTEGER,
    expected_sec      REAL    CHECK (expected_sec > 0),
    max_runtime_sec   INTEGER CHECK (max_runtime_sec > 0),
    max_active_sec    INTEGER CHECK (max_active_sec > 0),
    active            INTEGER NOT NULL DEFAULT 0 CHECK (active >= 0),
    crash             INTEGER NOT NULL DEFAULT 0,
    unavailable       INTEGER NOT NULL DEFAULT 0,
    error             INTEGER NOT NULL DEFAULT 0,
    start             INTEGER NOT NULL DEFAULT 0,
    spent             INTEGER NOT NULL DEFAULT 0 CHECK (spent >= 0),
    spent_before      INTEGER NOT NULL DEFAULT 0,
    progress          REAL,
    denied            TEXT    NOT NULL DEFAULT '',
    denied_data       TEXT,
    denied_at         INTEGER,
    passed_at         INTEGER,
    ended_at          INTEGER,
    idempotency_key   TEXT,
    CHECK ((state IS NULL) = (ended_at IS NULL))
) STRICT;

-- What waits, with all that a round goes by.
CREATE TABLE queue (
    no              INTEGER PRIMARY KEY,
    job_id          TEXT    NOT NULL,
    demand          INTEGER NOT NULL,
    -- 0: its time has not come; 1: in line; 2: in the urgent line.
    line            INTEGER NOT NULL CHECK (line BETWEEN 0 AND 2),
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
    passed_at       INTEGER
) STRICT;

-- What is in flight: an attempt under the number of its job, so that no job has two; or a lease without a job, under a number below zero and with a
-- name of its own. No index: each holds a unit at least, so there are never more than a hundred.
CREATE TABLE live (
    no          INTEGER PRIMARY KEY,
    loan        TEXT,
    demand      INTEGER NOT NULL,
    host        TEXT    NOT NULL,
    fence       INTEGER NOT NULL,
    phase       TEXT    NOT NULL CHECK (phase = 'leased' OR phase = 'reserved' OR phase = 'ending'),
    -- Of its job, up to now.
    events      INTEGER NOT NULL,
    started_in  INTEGER,
    admitted_at INTEGER NOT NULL,
    started_at  INTEGER,
    expires_at  INTEGER NOT NULL,
    ends_at     INTEGER,
    stop_at     INTEGER,
    stop_for    TEXT,
    reason      TEXT,
    worker      TEXT    NOT NULL DEFAULT '',
    spent       INTEGER NOT NULL DEFAULT 0 CHECK (spent >= 0),
    progress    REAL,
    CHECK ((loan IS NULL) = (no > 0)),
    CHECK (phase <> 'ending' OR reason IS NOT NULL)
) STRICT;

-- What was in flight and has ended. Written once; one that was completed is how a job is done.
CREATE TABLE attempt (
    job_no      INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    loan        TEXT,
    demand      INTEGER NOT NULL,
    host        TEXT    NOT NULL,
    events      INTEGER NOT NULL,
    started_in  INTEGER,
    ended_in    INTEGER,
    admitted_at INTEGER NOT NULL,
    started_at  INTEGER,
    expires_at  INTEGER NOT NULL,
    ends_at     INTEGER,
    stop_at     INTEGER,
    stop_for    TEXT,
    reason      TEXT,
    worker      TEXT    NOT NULL,
    spent       INTEGER NOT NULL,
    progress    REAL,
    ended_at    INTEGER NOT NULL,
    how         TEXT    NOT NULL,
    result      TEXT,
    failure     TEXT,
    PRIMARY KEY (job_no, fence)
) STRICT, WITHOUT ROWID;

-- Which jobs were done together, as JSON, until they are forgotten: what is old is found by it.
CREATE TABLE done (no INTEGER PRIMARY KEY, at INTEGER NOT NULL, jobs TEXT NOT NULL) STRICT;

INSERT INTO job
SELECT no, job_id, submitted_in, addon_id, demand, iif(state = 'FAILED' OR state = 'CANCELED' OR state = 'BLOCKED', state, NULL),
       max(0, fence - (state = 'DISPATCHING' OR state = 'RUNNING' OR state = 'DONE')), events, created_at, ready_at, priority, earliest_start_at,
       not_before, deadline_at, expected_sec, max_runtime_sec, max_active_sec,
       -- A view adds what the attempt took by which it was done.
       iif(state = 'DONE', max(0, active - coalesce((SELECT max(0, ended_at - started_at) FROM dispatch_5 d WHERE d.dispatch_id = job_id || '.' || job_5.fence), 0)), active),
       crash, unavailable, error, start, spent, spent_before, progress, iif(line IS NULL, denied, ''), iif(line IS NULL, denied_data, NULL),
       iif(line IS NULL, denied_at, NULL), iif(line IS NULL, passed_at, NULL), iif(state = 'DONE', NULL, ended_at), idempotency_key
FROM job_5;

INSERT INTO queue
SELECT no, job_id, demand, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec, max_runtime_sec, max_active_sec, active,
       denied, denied_data, denied_at, passed_at
FROM job_5 WHERE line IS NOT NULL;

INSERT INTO live
SELECT coalesce(d.job_no, -row_number() OVER (ORDER BY d.job_no IS NOT NULL, d.dispatch_id)), iif(d.job_no IS NULL, d.dispatch_id, NULL), d.demand, d.host,
       d.fence, d.phase, coalesce(j.events, 0), d.started_in, d.admitted_at, d.started_at, d.expires_at, d.ends_at, d.stop_at, d.stop_for, d.reason, d.worker,
       d.spent, d.progress
FROM dispatch_5 d LEFT JOIN job_5 j ON j.no = d.job_no WHERE d.phase <> 'ended';

INSERT INTO attempt
SELECT coalesce(d.job_no, (SELECT min(0, coalesce(min(no), 0)) FROM live) - row_number() OVER (ORDER BY d.job_no IS NOT NULL, d.dispatch_id)), d.fence,
       iif(d.job_no IS NULL, d.dispatch_id, NULL), d.demand, d.host, coalesce(j.events, 0), d.started_in, d.ended_in, d.admitted_at, d.started_at,
       d.expires_at, d.ends_at, d.stop_at, d.stop_for, d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure
FROM dispatch_5 d LEFT JOIN job_5 j ON j.no = d.job_no WHERE d.phase = 'ended';

INSERT INTO done (at, jobs)
SELECT max(ended_at), json_group_array(no) FROM (
    SELECT no, ended_at, (row_number() OVER (ORDER BY ended_at, no) - 1) / 1000 AS part, ended_at / 3600000000 AS hour FROM job_5 WHERE state = 'DONE'
    ORDER BY ended_at, no)
GROUP BY hour, part ORDER BY hour, part;

DROP TABLE job_5;
DROP TABLE dispatch_5;

CREATE INDEX job_settled ON job (state, no) WHERE state IS NOT NULL;
CREATE INDEX job_ended ON job (ended_at) WHERE ended_at IS NOT NULL AND state <> 'BLOCKED';
CREATE UNIQUE INDEX job_key ON job (addon_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The order: one sorted line per demand, with only what is due.
CREATE INDEX queue_line ON queue (demand, line, turn, no) WHERE line > 0;
CREATE INDEX queue_ready ON queue (ready_at) WHERE line = 0;
CREATE INDEX queue_urgent ON queue (urgent_at) WHERE line = 1 AND urgent_at IS NOT NULL;
CREATE INDEX queue_deadline ON queue (deadline_at) WHERE deadline_at IS NOT NULL;
CREATE INDEX done_at ON done (at);
CREATE UNIQUE INDEX attempt_loan ON attempt (loan) WHERE loan IS NOT NULL;

-- A job with its place: what a reader sees.
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
       coalesce(a.ended_at, j.ended_at) AS ended_at, j.idempotency_key
FROM job j LEFT JOIN queue q ON q.no = j.no LEFT JOIN live l ON l.no = j.no LEFT JOIN attempt a ON a.job_no = j.no AND a.fence = j.tried + 1;

-- All attempts and leases, for people, and to check by.
CREATE VIEW dispatch AS
SELECT l.no AS number, l.loan, coalesce(l.loan, j.job_id || '.' || l.fence) AS dispatch_id, j.no AS job_no, j.job_id, l.demand, m.addon_id, l.host, l.fence, m.cost_units, l.phase,
       l.admitted_at, l.started_at, l.expires_at, l.ends_at, l.stop_at, l.stop_for, l.reason, l.worker, l.spent, l.progress, NULL AS ended_at, NULL AS how,
       NULL AS result, NULL AS failure, l.started_in, NULL AS ended_in
FROM live l JOIN demand m ON m.no = l.demand LEFT JOIN job j ON j.no = l.no
UNION ALL
SELECT a.job_no, a.loan, coalesce(a.loan, j.job_id || '.' || a.fence), j.no, j.job_id, a.demand, m.addon_id, a.host, a.fence, m.cost_units, 'ended', a.admitted_at, a.started_at,
       a.expires_at, a.ends_at, a.stop_at, a.stop_for, a.reason, a.worker, a.spent, a.progress, a.ended_at, a.how, a.result, a.failure, a.started_in, a.ended_in
FROM attempt a JOIN demand m ON m.no = a.demand LEFT JOIN job j ON j.no = a.job_no;

-- Which batches tell of a job. Those of most are known without a mention.
CREATE VIEW told_in AS
SELECT no AS job_no, submitted_in AS batch FROM job
UNION ALL SELECT job_no, batch FROM mention
UNION ALL SELECT no, started_in FROM live
UNION ALL SELECT job_no, started_in FROM attempt
UNION ALL SELECT job_no, ended_in FROM attempt;

-- For whoever opens the file by hand. The store itself has triggers off, and says in each statement which state it leaves.
CREATE TRIGGER job_final BEFORE UPDATE OF state ON job
WHEN old.state = 'CANCELED' AND new.state IS NOT old.state
BEGIN SELECT RAISE(ABORT, 'CANCELED is final'); END;

CREATE TRIGGER attempt_final BEFORE UPDATE ON attempt
BEGIN SELECT RAISE(ABORT, 'an attempt that has ended stays so, and with it a job that is done'); END;
