-- The first schema. Moments and spans are microseconds, money is millionths.
--
-- No `IN` with more than two words in a CHECK or an index: SQLite builds a table in memory for it, at every row that is written,
-- and moving a job took ten times as long.

CREATE TABLE mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO mark VALUES ('job', 0), ('event', 0);

CREATE TABLE demand (
    no              INTEGER PRIMARY KEY,
    key             TEXT    NOT NULL UNIQUE,
    addon_id        TEXT    NOT NULL CHECK (length(addon_id) BETWEEN 1 AND 128),
    job_type        TEXT    NOT NULL CHECK (length(job_type) BETWEEN 1 AND 128),
    cost_units      INTEGER NOT NULL CHECK (cost_units BETWEEN 1 AND 100),
    constraints     INTEGER NOT NULL CHECK (constraints BETWEEN 0 AND 7),
    run_when        TEXT    NOT NULL CHECK (run_when = 'any' OR run_when = 'normal' OR run_when = 'quiet'),
    quiet_for_sec   INTEGER NOT NULL CHECK (quiet_for_sec >= 0),
    high            INTEGER NOT NULL CHECK (high IN (0, 1)),
    duration_class  INTEGER NOT NULL CHECK (duration_class >= 0)
) STRICT;

-- The hot part of a job: small, because every move rewrites the row.
CREATE TABLE job (
    no                INTEGER PRIMARY KEY,
    job_id            TEXT    NOT NULL UNIQUE,
    addon_id          TEXT    NOT NULL,
    state             TEXT    NOT NULL CHECK (
        state = 'QUEUED' OR state = 'RUNNING' OR state = 'DONE' OR state = 'DISPATCHING' OR state = 'FAILED' OR state = 'CANCELED'
        OR state = 'BLOCKED'
    ),
    demand            INTEGER NOT NULL,
    line              INTEGER CHECK (line BETWEEN 0 AND 2),
    turn              INTEGER NOT NULL,
    ready_at          INTEGER NOT NULL,
    urgent_at         INTEGER,
    priority          INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 100),
    fence             INTEGER NOT NULL DEFAULT 0 CHECK (fence >= 0),
    events            INTEGER NOT NULL DEFAULT 0,
    created_at        INTEGER NOT NULL,
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
    -- It stands in a line exactly while it is queued, and has an end exactly when it is settled.
    CHECK ((state = 'QUEUED') = (line IS NOT NULL)),
    CHECK ((state = 'DONE' OR state = 'FAILED' OR state = 'CANCELED' OR state = 'BLOCKED') = (ended_at IS NOT NULL))
) STRICT;

-- The order: one sorted line per demand, with only what is queued and due.
CREATE INDEX job_line ON job (demand, line, turn, no) WHERE line > 0;
CREATE INDEX job_ready ON job (ready_at) WHERE line = 0;
CREATE INDEX job_urgent ON job (urgent_at) WHERE line = 1 AND urgent_at IS NOT NULL;
CREATE INDEX job_deadline ON job (deadline_at) WHERE line IS NOT NULL AND deadline_at IS NOT NULL;
-- What is in flight is found by its dispatch: two indexes instead of one on every state, and starting a job writes to neither.
CREATE INDEX job_queued ON job (no) WHERE line IS NOT NULL;
CREATE INDEX job_settled ON job (state, no) WHERE ended_at IS NOT NULL;
CREATE INDEX job_ended ON job (ended_at) WHERE ended_at IS NOT NULL AND state <> 'BLOCKED';
CREATE UNIQUE INDEX job_key ON job (addon_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- What the submitter said and nobody changes: large things live here, so that moving a job does not move them.
CREATE TABLE intent (
    no             INTEGER PRIMARY KEY,
    payload        TEXT    NOT NULL CHECK (json_valid(payload)),
    tags           TEXT,
    unit           TEXT    NOT NULL,
    cost_limit     INTEGER CHECK (cost_limit > 0),
    time_sensitive INTEGER NOT NULL CHECK (time_sensitive IN (0, 1)),
    retry_delays   TEXT,
    body_hash      BLOB
) STRICT;

-- One attempt, or a lease without a job. The id is the job's with the fence behind it, so a job's attempts lie side by side.
CREATE TABLE dispatch (
    dispatch_id TEXT    PRIMARY KEY,
    job_no      INTEGER,
    demand      INTEGER NOT NULL,
    addon_id    TEXT    NOT NULL,
    host        TEXT    NOT NULL,
    fence       INTEGER NOT NULL,
    cost_units  INTEGER NOT NULL CHECK (cost_units BETWEEN 1 AND 100),
    phase       TEXT    NOT NULL CHECK (phase = 'leased' OR phase = 'ended' OR phase = 'reserved' OR phase = 'ending'),
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
    ended_at    INTEGER,
    how         TEXT,
    result      TEXT,
    failure     TEXT,
    CHECK ((phase = 'ended') = (ended_at IS NOT NULL)),
    CHECK ((phase = 'ended') = (how IS NOT NULL)),
    CHECK (phase <> 'ending' OR reason IS NOT NULL)
) STRICT, WITHOUT ROWID;

-- Never two live dispatches for one job.
CREATE UNIQUE INDEX dispatch_live ON dispatch (job_no) WHERE phase <> 'ended' AND job_no IS NOT NULL;
CREATE INDEX dispatch_expiry ON dispatch (expires_at) WHERE phase <> 'ended';
CREATE INDEX dispatch_stop ON dispatch (stop_at) WHERE phase = 'leased' AND stop_at IS NOT NULL;

-- Sums over live dispatches. Debited when one is made, credited when it ends, never otherwise.
CREATE TABLE ledger (
    scope   TEXT    NOT NULL CHECK (scope = 'host' OR scope = 'addon' OR scope = 'type' OR scope = 'constraint'),
    name    TEXT    NOT NULL,
    units   INTEGER NOT NULL CHECK (units >= 0),
    running INTEGER NOT NULL CHECK (running >= 0),
    PRIMARY KEY (scope, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE addon (
    addon_id TEXT    PRIMARY KEY,
    weight   INTEGER NOT NULL DEFAULT 100 CHECK (weight BETWEEN 1 AND 10000),
    paused   INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    average  REAL    NOT NULL DEFAULT 0,
    units    INTEGER NOT NULL DEFAULT 0 CHECK (units >= 0),
    at       INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE tally (
    addon_id TEXT    NOT NULL,
    state    TEXT    NOT NULL,
    jobs     INTEGER NOT NULL CHECK (jobs >= 0),
    PRIMARY KEY (addon_id, state)
) STRICT, WITHOUT ROWID;

CREATE TABLE budget (
    addon_id TEXT    NOT NULL,
    period   TEXT    NOT NULL,
    spent    INTEGER NOT NULL CHECK (spent >= 0),
    PRIMARY KEY (addon_id, period)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoint (
    job_no INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL,
    fence  INTEGER NOT NULL,
    data   TEXT    NOT NULL CHECK (json_valid(data))
) STRICT;

-- Append only. `seq` is taken under the write lock, so it is the commit order.
CREATE TABLE event (
    seq         INTEGER PRIMARY KEY,
    at          INTEGER NOT NULL,
    kind        TEXT    NOT NULL,
    job_no      INTEGER,
    n           INTEGER NOT NULL,
    state       TEXT,
    reason      TEXT    NOT NULL DEFAULT '',
    dispatch_id TEXT,
    data        TEXT
) STRICT;
CREATE UNIQUE INDEX event_job ON event (job_no, n) WHERE job_no IS NOT NULL;

-- For whoever opens the file by hand. The store itself has triggers off, and says in each statement which state it leaves.
CREATE TRIGGER job_final BEFORE UPDATE OF state ON job
WHEN old.state IN ('DONE', 'CANCELED') AND new.state <> old.state
BEGIN SELECT RAISE(ABORT, 'DONE and CANCELED are final'); END;

CREATE TRIGGER event_kept BEFORE UPDATE ON event
BEGIN SELECT RAISE(ABORT, 'events are only ever added'); END;
