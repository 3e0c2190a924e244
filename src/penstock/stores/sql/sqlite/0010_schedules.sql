-- A schedule is one row. `version` changes with every write: a decision on an older one is not written. `due_at`: when it must be looked at, 0 while moments
-- wait for the end of a job, NULL while it is paused or has no more moments.
CREATE TABLE schedule (
    name     TEXT    PRIMARY KEY NOT NULL CHECK (length(name) BETWEEN 1 AND 55),
    addon_id TEXT    NOT NULL,
    version  INTEGER NOT NULL CHECK (version > 0),
    due_at   INTEGER,
    body     TEXT    NOT NULL,
    state    TEXT    NOT NULL
) STRICT;
CREATE INDEX schedule_due ON schedule (due_at) WHERE due_at IS NOT NULL;
