-- A job is in one of three places: in `queue` while it waits, in `dispatch` from its start on, and settled in its own row when it ended otherwise
-- than by being done. A start takes a row from the first and puts one into the second, and being done changes that one where it lies: neither
-- touches the job's own row, nor an index but one. Before, each of them wrote the job anew in all of its indexes.
-- A Penstock that does not know of the places would find no line, so it must not come to this schema any more; one that is running fails at its next
-- statement, and what it had leased comes back when its leases are over.

CREATE TABLE penstock.job_3 AS TABLE penstock.job;
CREATE TABLE penstock.dispatch_3 AS TABLE penstock.dispatch;
DROP TABLE penstock.job, penstock.dispatch;

-- What was said, and what seldom changes.
CREATE TABLE penstock.job (
    no                BIGINT  PRIMARY KEY,
    job_id            TEXT    COLLATE "C" NOT NULL UNIQUE,
    addon_id          TEXT    COLLATE "C" NOT NULL,
    demand            INTEGER NOT NULL,
    -- NULL: queued, in flight, or done at the end of the attempt behind those that were `tried`.
    state             TEXT    COLLATE "C",
    tried             INTEGER NOT NULL DEFAULT 0,
    -- Of a job that is settled; that of another is in the row of its place.
    events            INTEGER NOT NULL DEFAULT 0,
    created_at        BIGINT  NOT NULL,
    ready_at          BIGINT  NOT NULL,
    priority          INTEGER NOT NULL,
    earliest_start_at BIGINT,
    not_before        BIGINT,
    deadline_at       BIGINT,
    expected_sec      DOUBLE PRECISION,
    max_runtime_sec   BIGINT,
    max_active_sec    BIGINT,
    active            BIGINT  NOT NULL DEFAULT 0,
    crash             INTEGER NOT NULL DEFAULT 0,
    unavailable       INTEGER NOT NULL DEFAULT 0,
    error             INTEGER NOT NULL DEFAULT 0,
    start             INTEGER NOT NULL DEFAULT 0,
    spent             BIGINT  NOT NULL DEFAULT 0,
    spent_before      BIGINT  NOT NULL DEFAULT 0,
    progress          DOUBLE PRECISION,
    denied            TEXT    NOT NULL DEFAULT '',
    denied_data       TEXT,
    denied_at         BIGINT,
    passed_at         BIGINT,
    ended_at          BIGINT,
    submitted_in      BIGINT  NOT NULL DEFAULT 0,
    payload           TEXT    NOT NULL,
    tags              TEXT,
    unit              TEXT    NOT NULL,
    cost_limit        BIGINT,
    time_sensitive    INTEGER NOT NULL,
    retry_delays      TEXT,
    idempotency_key   TEXT    COLLATE "C",
    body_hash         TEXT,
    CHECK (CASE WHEN state IS NULL THEN ended_at IS NULL
                ELSE ended_at IS NOT NULL AND state IN ('DONE', 'FAILED', 'CANCELED', 'BLOCKED') END)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX job_settled ON penstock.job (state, no) WHERE state IS NOT NULL AND state <> 'DONE';
CREATE UNIQUE INDEX job_key ON penstock.job (addon_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- What waits, with all that a round goes by. Whoever starts a job or changes one that waits has locked its row here.
CREATE TABLE penstock.queue (
    no              BIGINT   PRIMARY KEY,
    job_id          TEXT     COLLATE "C" NOT NULL,
    demand          INTEGER  NOT NULL,
    line            SMALLINT NOT NULL,
    turn            BIGINT   NOT NULL,
    ready_at        BIGINT   NOT NULL,
    urgent_at       BIGINT,
    deadline_at     BIGINT,
    priority        INTEGER  NOT NULL,
    fence           INTEGER  NOT NULL,
    events          INTEGER  NOT NULL,
    expected_sec    DOUBLE PRECISION,
    max_runtime_sec BIGINT,
    max_active_sec  BIGINT,
    active          BIGINT   NOT NULL DEFAULT 0,
    denied          TEXT     NOT NULL DEFAULT '',
    denied_data     TEXT,
    denied_at       BIGINT,
    passed_at       BIGINT
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- The order: one sorted line per demand, with only what is due.
CREATE INDEX queue_line ON penstock.queue (demand, line, turn, no) WHERE line > 0;
CREATE INDEX queue_ready ON penstock.queue (ready_at) WHERE line = 0;
CREATE INDEX queue_urgent ON penstock.queue (urgent_at) WHERE line = 1 AND urgent_at IS NOT NULL;
CREATE INDEX queue_deadline ON penstock.queue (deadline_at) WHERE deadline_at IS NOT NULL;

-- One attempt, or a lease without a job. The id is the job's with the fence behind it, so a job's attempts lie side by side, and none begins twice.
-- No index but that one, and room on every page: then the end of an attempt is written beside its beginning, and in no index at all.
CREATE TABLE penstock.dispatch (
    dispatch_id TEXT    COLLATE "C" PRIMARY KEY,
    job_no      BIGINT,
    demand      INTEGER NOT NULL,
    host        TEXT    COLLATE "C" NOT NULL,
    fence       INTEGER NOT NULL,
    phase       TEXT    COLLATE "C" NOT NULL,
    -- Of its job, up to now.
    events      INTEGER NOT NULL,
    started_in  BIGINT  NOT NULL,
    admitted_at BIGINT  NOT NULL,
    expires_at  BIGINT  NOT NULL,
    started_at  BIGINT,
    ends_at     BIGINT,
    stop_at     BIGINT,
    stop_for    TEXT,
    reason      TEXT,
    worker      TEXT    NOT NULL DEFAULT '',
    spent       BIGINT  NOT NULL DEFAULT 0,
    progress    DOUBLE PRECISION,
    ended_at    BIGINT,
    how         TEXT,
    result      TEXT,
    failure     TEXT,
    CHECK (CASE WHEN phase = 'ended' THEN ended_at IS NOT NULL AND how IS NOT NULL
                ELSE ended_at IS NULL AND how IS NULL AND (phase IN ('leased', 'reserved') OR phase = 'ending' AND reason IS NOT NULL) END)
) WITH (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- What one round started, while any of it lives: how what is in flight is found. `live`: how many. Neither moment comes after the first of theirs, but
-- a lease that is renewed does not move them. Guarded by the host's row in the ledger.
CREATE TABLE penstock.flight (
    batch      BIGINT   PRIMARY KEY,
    host       TEXT     COLLATE "C" NOT NULL,
    jobs       BIGINT[] NOT NULL,
    loan       TEXT     COLLATE "C",
    live       INTEGER  NOT NULL CHECK (live > 0),
    expires_at BIGINT   NOT NULL,
    stop_at    BIGINT
) WITH (autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- What ended together, until it is forgotten: what is old is found by it, and in which batch a job was done.
CREATE TABLE penstock.ended (
    batch BIGINT   PRIMARY KEY,
    at    BIGINT   NOT NULL,
    jobs  BIGINT[] NOT NULL
);
CREATE INDEX ended_at ON penstock.ended (at);

INSERT INTO penstock.job
SELECT no, job_id, addon_id, demand, CASE WHEN ended_at IS NOT NULL THEN state END, fence - (state IN ('DISPATCHING', 'RUNNING'))::integer, events,
       created_at, ready_at, priority, earliest_start_at, not_before, deadline_at, expected_sec, max_runtime_sec, max_active_sec, active, crash,
       unavailable, error, start, spent, spent_before, progress, denied, denied_data, denied_at, passed_at, ended_at, submitted_in,
       payload, tags, unit, cost_limit, time_sensitive, retry_delays, idempotency_key, body_hash
FROM penstock.job_3 JOIN penstock.intent USING (no);

INSERT INTO penstock.queue
SELECT no, job_id, demand, line, turn, ready_at, urgent_at, deadline_at, priority, fence, events, expected_sec, max_runtime_sec, max_active_sec, active,
       denied, denied_data, denied_at, passed_at
FROM penstock.job_3 WHERE state = 'QUEUED';

INSERT INTO penstock.flight
SELECT nextval('penstock.batch'), host, jobs, NULL, cardinality(jobs), expires_at, stop_at
FROM (SELECT host, array_agg(job_no) AS jobs, min(expires_at) AS expires_at, min(stop_at) AS stop_at
      FROM penstock.dispatch_3 WHERE phase <> 'ended' AND job_no IS NOT NULL GROUP BY host) AS live
UNION ALL SELECT nextval('penstock.batch'), host, '{}', dispatch_id, 1, expires_at, stop_at FROM penstock.dispatch_3 WHERE phase <> 'ended' AND job_no IS NULL;

INSERT INTO penstock.dispatch
SELECT d.dispatch_id, d.job_no, d.demand, d.host, d.fence, d.phase, coalesce(j.events, 0), coalesce(f.batch, 0), d.admitted_at, d.expires_at, d.started_at,
       d.ends_at, d.stop_at, d.stop_for, d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure
FROM penstock.dispatch_3 d LEFT JOIN penstock.job_3 j ON j.no = d.job_no
LEFT JOIN penstock.flight f ON d.phase <> 'ended' AND f.host = d.host AND f.loan IS NOT DISTINCT FROM CASE WHEN d.job_no IS NULL THEN d.dispatch_id END;

INSERT INTO penstock.ended
SELECT nextval('penstock.batch'), at, jobs
FROM (SELECT max(ended_at) AS at, array_agg(no ORDER BY ended_at, no) AS jobs
      FROM (SELECT no, ended_at, row_number() OVER (ORDER BY ended_at, no) / 1000 AS part, ended_at / 3600000000 AS hour FROM penstock.job_3
            WHERE ended_at IS NOT NULL AND state <> 'BLOCKED') AS old GROUP BY hour, part ORDER BY hour, part) AS parts;

DROP TABLE penstock.job_3, penstock.dispatch_3, penstock.intent;

-- A job with its place: what a reader sees. `settled`, `queued`: for the indexes of those.
CREATE VIEW penstock.whole AS
SELECT j.no, j.job_id, j.addon_id, j.demand, j.state AS settled, q.no AS queued,
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
       j.submitted_in, j.payload, j.tags, j.unit, j.cost_limit, j.time_sensitive, j.retry_delays, j.idempotency_key, j.body_hash
FROM penstock.job j LEFT JOIN penstock.queue q ON q.no = j.no
LEFT JOIN penstock.dispatch d ON j.state IS NULL AND q.no IS NULL AND d.dispatch_id = j.job_id || '.' || (j.tried + 1);

-- What is in flight. `lease_from`, `limit_from`: what its flight says of when the first of it may be due. OFFSET 0: from flight to flight and key to key,
-- and not through all attempts there ever were, which a plan might when they were still few.
CREATE VIEW penstock.live AS
SELECT d.*, f.expires_at AS lease_from, f.stop_at AS limit_from
FROM penstock.flight f CROSS JOIN LATERAL unnest(f.jobs) AS its (no)
CROSS JOIN LATERAL (SELECT job_id, tried FROM penstock.job WHERE job.no = its.no OFFSET 0) AS j
CROSS JOIN LATERAL (SELECT * FROM penstock.dispatch WHERE dispatch_id = j.job_id || '.' || (j.tried + 1) OFFSET 0) AS d
WHERE d.phase <> 'ended' AND d.started_in = f.batch
UNION ALL
SELECT d.*, f.expires_at, f.stop_at
FROM penstock.flight f CROSS JOIN LATERAL (SELECT * FROM penstock.dispatch WHERE dispatch_id = f.loan OFFSET 0) AS d
WHERE f.loan IS NOT NULL AND d.phase <> 'ended';

-- Which batches tell of a job. Those of most are known without a mention.
CREATE VIEW penstock.told_in AS
SELECT no AS job_no, submitted_in AS batch FROM penstock.job
UNION ALL SELECT job_no, batch FROM penstock.mention
UNION ALL SELECT j.no, d.started_in FROM penstock.job j JOIN penstock.dispatch d ON d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
UNION ALL SELECT j.no, e.batch FROM penstock.job j JOIN penstock.dispatch d ON d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
JOIN penstock.ended e ON e.at = d.ended_at AND j.no = ANY(e.jobs);

CREATE TRIGGER job_final AFTER UPDATE OF state ON penstock.job FOR EACH ROW
WHEN (old.state IN ('DONE', 'CANCELED') AND new.state IS DISTINCT FROM old.state)
EXECUTE FUNCTION penstock.refuse('DONE and CANCELED are final');

-- And with it a job that is done: its state is the end of its attempt.
CREATE TRIGGER dispatch_final AFTER UPDATE OF phase ON penstock.dispatch FOR EACH ROW
WHEN (old.phase = 'ended' AND new.phase <> old.phase)
EXECUTE FUNCTION penstock.refuse('an attempt that has ended stays so');

-- What is told of a hundred jobs is some twenty kilobytes, and the server's own way to make them smaller takes longer than all else that is done with them.
DO $$ BEGIN
    EXECUTE 'ALTER TABLE penstock.trail ALTER COLUMN events SET COMPRESSION lz4';
EXCEPTION WHEN feature_not_supported OR syntax_error THEN NULL;  -- a server that was built without it, or before there was any
END $$;

UPDATE penstock.mark SET value = 4 WHERE name = 'needs';
