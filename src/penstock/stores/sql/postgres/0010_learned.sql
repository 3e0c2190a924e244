-- What is learned about job types from the trail, as JSON by name; the row without a name has the number of the last event that was read.
CREATE TABLE penstock.learned (
    name TEXT   COLLATE "C" PRIMARY KEY NOT NULL,
    seq  BIGINT NOT NULL,
    data TEXT   NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
