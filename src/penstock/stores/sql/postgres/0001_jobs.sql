-- The first schema. Moments and spans are microseconds, money is millionths. `penstock` stands for the schema that was chosen.
-- Text is compared byte by byte everywhere: the order of keys must be the same in the database and in every process.

CREATE TABLE penstock.mark (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
-- schema: the last step that was taken; needs: the oldest Penstock that can live with it, so that daemons are replaced one by
-- one; event: the last number given to an event, and the lock of whoever gives them.
INSERT INTO penstock.mark VALUES ('schema', 1), ('needs', 1), ('event', 0);

CREATE TABLE penstock.demand (
    no              INTEGER  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key             TEXT     COLLATE "C" NOT NULL UNIQUE,
    addon_id        TEXT     COLLATE "C" NOT NULL CHECK (length(addon_id) BETWEEN 1 AND 128),
    job_type        TEXT     COLLATE "C" NOT NULL CHECK (length(job_type) BETWEEN 1 AND 128),
    cost_units      INTEGER  NOT NULL CHECK (cost_units BETWEEN 1 AND 100),
    constraints     INTEGER  NOT NULL CHECK (constraints BETWEEN 0 AND 7),
    run_when        TEXT     NOT NULL CHECK (run_when IN ('any', 'normal', 'quiet')),
    quiet_for_sec   BIGINT   NOT NULL CHECK (quiet_for_sec >= 0),
    high            INTEGER  NOT NULL CHECK (high IN (0, 1)),
    duration_class  INTEGER  NOT NULL CHECK (duration_class >= 0)
);

CREATE SEQUENCE penstock.job_no;

-- The hot part of a job: small, because every move writes the row anew.
CREATE TABLE penstock.job (
    no                BIGINT  PRIMARY KEY,
    job_id            TEXT    COLLATE "C" NOT NULL UNIQUE,
    addon_id          TEXT    COLLATE "C" NOT NULL,
    state             TEXT    COLLATE "C" NOT NULL,
    demand            INTEGER NOT NULL,
    line              SMALLINT,
    turn              BIGINT  NOT NULL,
    ready_at          BIGINT  NOT NULL,
    urgent_at         BIGINT,
    priority          INTEGER NOT NULL,
    fence             INTEGER NOT NULL DEFAULT 0,
    events            INTEGER NOT NULL DEFAULT 0,
    created_at        BIGINT  NOT NULL,
    earliest_start_at BIGINT,
    not_before        BIGINT,
    deadline_at       BIGINT,
    expected_sec      DOUBLE PRECISION,
    max_runtime_sec   BIGINT ,
    max_active_sec    BIGINT ,
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
    idempotency_key   TEXT    COLLATE "C",
    submitted_in      BIGINT  NOT NULL DEFAULT 0,
    -- It stands in a line exactly while it is queued, and has an end exactly when it is settled. One condition and no more: the server reads each
    -- from its text again for every statement that writes here, which costs as much as a row. What a submitter may say is checked at the door.
    CHECK (CASE WHEN state = 'QUEUED' THEN line IS NOT NULL AND ended_at IS NULL
                WHEN state IN ('RUNNING', 'DISPATCHING') THEN line IS NULL AND ended_at IS NULL
                ELSE line IS NULL AND ended_at IS NOT NULL AND state IN ('DONE', 'FAILED', 'CANCELED', 'BLOCKED') END)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- The order: one sorted line per demand, with only what is queued and due.
CREATE INDEX job_line ON penstock.job (demand, line, turn, no) WHERE line > 0;
CREATE INDEX job_ready ON penstock.job (ready_at) WHERE line = 0;
CREATE INDEX job_urgent ON penstock.job (urgent_at) WHERE line = 1 AND urgent_at IS NOT NULL;
CREATE INDEX job_deadline ON penstock.job (deadline_at) WHERE line IS NOT NULL AND deadline_at IS NOT NULL;
-- What is in flight is found by its dispatch, and what is DONE, which is nearly all, by its number: neither pays for an entry here.
CREATE INDEX job_queued ON penstock.job (no) WHERE line IS NOT NULL;
CREATE INDEX job_settled ON penstock.job (state, no) WHERE ended_at IS NOT NULL AND state <> 'DONE';
CREATE INDEX job_ended ON penstock.job (ended_at) WHERE ended_at IS NOT NULL AND state <> 'BLOCKED';
CREATE UNIQUE INDEX job_key ON penstock.job (addon_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- What the submitter said and nobody changes: large things live here, so that moving a job does not move them.
CREATE TABLE penstock.intent (
    no             BIGINT  PRIMARY KEY,
    payload        TEXT    NOT NULL,
    tags           TEXT,
    unit           TEXT    NOT NULL,
    cost_limit     BIGINT ,
    time_sensitive INTEGER NOT NULL,
    retry_delays   TEXT,
    body_hash      TEXT
);

-- One attempt, or a lease without a job. The id is the job's with the fence behind it, so a job's attempts lie side by side.
CREATE TABLE penstock.dispatch (
    dispatch_id TEXT    COLLATE "C" PRIMARY KEY,
    job_no      BIGINT,
    demand      INTEGER NOT NULL,
    addon_id    TEXT    COLLATE "C" NOT NULL,
    host        TEXT    COLLATE "C" NOT NULL,
    fence       INTEGER NOT NULL,
    cost_units  INTEGER NOT NULL,
    phase       TEXT    COLLATE "C" NOT NULL,
    admitted_at BIGINT  NOT NULL,
    started_at  BIGINT,
    expires_at  BIGINT  NOT NULL,
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
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- Never two live dispatches for one job.
CREATE UNIQUE INDEX dispatch_live ON penstock.dispatch (job_no) WHERE phase <> 'ended' AND job_no IS NOT NULL;
CREATE INDEX dispatch_expiry ON penstock.dispatch (expires_at) WHERE phase <> 'ended';
CREATE INDEX dispatch_stop ON penstock.dispatch (stop_at) WHERE phase = 'leased' AND stop_at IS NOT NULL;

-- Sums over live dispatches. A row is there before anything can count in it (it comes with its demand or its host), because what
-- is not there cannot be locked. Whoever changes a row, or the account of its addon, has locked it, in the order host, scope, name.
CREATE TABLE penstock.ledger (
    scope   TEXT    COLLATE "C" NOT NULL,
    name    TEXT    COLLATE "C" NOT NULL,
    units   BIGINT  NOT NULL DEFAULT 0,
    running BIGINT  NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, name),
    CHECK (units >= 0 AND running >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE penstock.addon (
    addon_id TEXT    COLLATE "C" PRIMARY KEY,
    weight   INTEGER NOT NULL DEFAULT 100,
    paused   INTEGER NOT NULL DEFAULT 0,
    average  DOUBLE PRECISION NOT NULL DEFAULT 0,
    units    BIGINT  NOT NULL DEFAULT 0,
    at       BIGINT  NOT NULL DEFAULT 0,
    CHECK (units >= 0 AND weight BETWEEN 1 AND 10000)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);

-- How many jobs of an addon are in a state: the sum of its rows. Each transaction adds its difference and touches no row of
-- another's, so a transaction that its owner leaves open holds nobody up. Whoever numbers events adds the rows up.
CREATE TABLE penstock.tally (
    addon_id TEXT    COLLATE "C" NOT NULL,
    state    TEXT    COLLATE "C" NOT NULL,
    jobs     BIGINT  NOT NULL
) WITH (autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE penstock.budget (
    addon_id TEXT    COLLATE "C" NOT NULL,
    period   TEXT    COLLATE "C" NOT NULL,
    spent    BIGINT  NOT NULL CHECK (spent >= 0),
    PRIMARY KEY (addon_id, period)
);

CREATE TABLE penstock.checkpoint (
    job_no BIGINT  PRIMARY KEY,
    at     BIGINT  NOT NULL,
    fence  INTEGER NOT NULL,
    data   TEXT    NOT NULL
);

-- One row per transaction that told something, with all that it told: a row and two index entries for every event would be as dear as all the
-- rest of a move. Transactions overlap, so the order in which they took `batch` is not the order in which they became visible; a reader's cursor
-- needs the latter. `until`, the number of its last event, is therefore given after the commit.
CREATE SEQUENCE penstock.batch;
CREATE TABLE penstock.trail (
    batch  BIGINT  PRIMARY KEY,
    size   INTEGER NOT NULL,
    until  BIGINT,
    -- JSON, an array per event in their order: at, kind, job_id, n, state, reason, attempt (a dispatch of its job by its fence), data. null: forgotten.
    events TEXT    NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX trail_until ON penstock.trail (until) WHERE until IS NOT NULL;
CREATE INDEX trail_new ON penstock.trail (batch) WHERE until IS NULL;

-- Which batches tell of a job, besides the one that it was submitted in, which the job itself knows.
CREATE TABLE penstock.mention (
    job_no BIGINT NOT NULL,
    batch  BIGINT NOT NULL,
    PRIMARY KEY (job_no, batch)
);

-- For people, and to check by. The number of an event is `until - size + i` of its batch.
CREATE VIEW penstock.event AS
SELECT t.batch, e.i, (e.told ->> 0)::bigint AS at, e.told ->> 1 AS kind, e.told ->> 2 AS job_id, (e.told ->> 3)::integer AS n,
       e.told ->> 4 AS state, e.told ->> 5 AS reason, e.told ->> 6 AS attempt, e.told -> 7 AS data
FROM penstock.trail t CROSS JOIN LATERAL json_array_elements(t.events::json) WITH ORDINALITY AS e (told, i)
WHERE json_typeof(e.told) = 'array';

-- Who dispatches from this database: any number may.
CREATE TABLE penstock.dispatcher (
    holder     TEXT    COLLATE "C" PRIMARY KEY,
    started_at BIGINT  NOT NULL,
    seen_at    BIGINT  NOT NULL
);

CREATE FUNCTION penstock.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION '%', tg_argv[0]; END $$;

-- AFTER, because one that comes before locks every row that it looks at, which is as dear as writing it.
CREATE TRIGGER job_final AFTER UPDATE OF state ON penstock.job FOR EACH ROW
WHEN (old.state IN ('DONE', 'CANCELED') AND new.state <> old.state)
EXECUTE FUNCTION penstock.refuse('DONE and CANCELED are final');
