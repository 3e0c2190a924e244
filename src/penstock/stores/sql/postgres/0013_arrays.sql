-- An array of jobs is one row, however many indices it has. `body`: what was submitted; `state`: how far it is. Both JSON.
CREATE TABLE penstock.job_array (
    array_id TEXT    COLLATE "C" PRIMARY KEY NOT NULL,
    addon_id TEXT    NOT NULL,
    created_at BIGINT  NOT NULL,
    ended_at BIGINT,
    body     TEXT    NOT NULL,
    state    TEXT    NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
CREATE INDEX job_array_created ON penstock.job_array (created_at);
CREATE INDEX job_array_open ON penstock.job_array (created_at) WHERE ended_at IS NULL;
