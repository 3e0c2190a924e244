-- A schedule is one row. `version` changes with every write: a decision on an older one is not written. `due_at`: when it must be looked at, 0 while moments
-- wait for the end of a job, NULL while it is paused or has no more moments.
CREATE TABLE penstock.schedule (
    name     TEXT    COLLATE "C" PRIMARY KEY NOT NULL CHECK (length(name) BETWEEN 1 AND 55),
    addon_id TEXT    NOT NULL,
    version  BIGINT  NOT NULL CHECK (version > 0),
    due_at   BIGINT,
    body     TEXT    NOT NULL,
    state    TEXT    NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
CREATE INDEX schedule_due ON penstock.schedule (due_at) WHERE due_at IS NOT NULL;
