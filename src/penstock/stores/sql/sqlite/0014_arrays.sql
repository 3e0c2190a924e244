-- An array of jobs is one row, however many indices it has. `body`: what was submitted; `state`: how far it is. Both JSON.
CREATE TABLE job_array (
    array_id TEXT    PRIMARY KEY NOT NULL,
    addon_id TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    ended_at INTEGER,
    body     TEXT    NOT NULL,
    state    TEXT    NOT NULL
) STRICT;
CREATE INDEX job_array_created ON job_array (created_at);
CREATE INDEX job_array_open ON job_array (created_at) WHERE ended_at IS NULL;
