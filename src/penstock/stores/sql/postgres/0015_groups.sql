-- A batch or an array as one parent: both are in `dependency` by numbers from 2^62 on, which no job has. A batch is a child of its members there.
-- `state`: how it ended; NULL until then. An open batch does not end. `digest`: of the request that made a batch. A Penstock of the schema before
-- would not count the ends of members.
CREATE SEQUENCE penstock.group_no MINVALUE 4611686018427387905;
CREATE TABLE penstock.job_group (
    no         BIGINT  PRIMARY KEY DEFAULT nextval('penstock.group_no'),
    group_id   TEXT    COLLATE "C" NOT NULL UNIQUE,
    addon_id   TEXT    NOT NULL,
    created_at BIGINT  NOT NULL,
    is_open    INTEGER NOT NULL DEFAULT 0,
    total      INTEGER NOT NULL DEFAULT 0,
    done       INTEGER NOT NULL DEFAULT 0,
    failed     INTEGER NOT NULL DEFAULT 0,
    canceled   INTEGER NOT NULL DEFAULT 0,
    state      TEXT    COLLATE "C" CHECK (state IN ('DONE', 'FAILED', 'CANCELED')),
    ended_at   BIGINT,
    digest     TEXT    NOT NULL DEFAULT ''
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
CREATE INDEX job_group_batch ON penstock.job_group (created_at, no) WHERE group_id >= 'batch:' AND group_id < 'batch;';
CREATE INDEX job_group_ended ON penstock.job_group (ended_at) WHERE ended_at IS NOT NULL;
INSERT INTO penstock.job_group (group_id, addon_id, created_at, state, ended_at)
SELECT array_id, addon_id, created_at,
       CASE WHEN ended_at IS NULL THEN NULL
            WHEN coalesce(state::jsonb -> 'failed', '[]'::jsonb) <> '[]'::jsonb AND NOT coalesce((state::jsonb ->> 'stopped')::boolean, false) THEN 'FAILED'
            WHEN coalesce((state::jsonb ->> 'canceled')::integer, 0) > 0 OR coalesce((state::jsonb ->> 'stopped')::boolean, false) THEN 'CANCELED'
            ELSE 'DONE' END, ended_at
FROM penstock.job_array ORDER BY created_at, array_id;
UPDATE penstock.mark SET value = 15 WHERE name = 'needs';
