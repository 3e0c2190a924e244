-- A batch or an array as one parent: both are in `dependency` by numbers from 2^62 on, which no job has. A batch is a child of its members there.
-- `state`: how it ended; NULL until then. An open batch does not end. `digest`: of the request that made a batch.
CREATE TABLE job_group (
    no         INTEGER PRIMARY KEY,
    group_id   TEXT    NOT NULL UNIQUE,
    addon_id   TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    is_open    INTEGER NOT NULL DEFAULT 0,
    total      INTEGER NOT NULL DEFAULT 0,
    done       INTEGER NOT NULL DEFAULT 0,
    failed     INTEGER NOT NULL DEFAULT 0,
    canceled   INTEGER NOT NULL DEFAULT 0,
    state      TEXT    CHECK (state = 'DONE' OR state = 'FAILED' OR state = 'CANCELED'),
    ended_at   INTEGER,
    digest     TEXT    NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX job_group_batch ON job_group (created_at, no) WHERE group_id >= 'batch:' AND group_id < 'batch;';
CREATE INDEX job_group_ended ON job_group (ended_at) WHERE ended_at IS NOT NULL;
INSERT INTO job_group (no, group_id, addon_id, created_at, state, ended_at)
SELECT 4611686018427387904 + row_number() OVER (ORDER BY created_at, array_id), array_id, addon_id, created_at,
       CASE WHEN ended_at IS NULL THEN NULL WHEN coalesce(state ->> '$.failed', '[]') <> '[]' AND NOT coalesce(state ->> '$.stopped', 0) THEN 'FAILED'
            WHEN coalesce(state ->> '$.canceled', 0) > 0 OR coalesce(state ->> '$.stopped', 0) THEN 'CANCELED' ELSE 'DONE' END, ended_at
FROM job_array;
