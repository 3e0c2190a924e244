-- Who dispatches from here, with what, and until when that may be believed. A row outlives its host only where somebody wants it drained.
CREATE TABLE penstock.host (
    host       TEXT    COLLATE "C" PRIMARY KEY NOT NULL CHECK (length(host) BETWEEN 1 AND 200),
    instance   TEXT    NOT NULL,
    capacity   INTEGER NOT NULL CHECK (capacity >= 0),
    quiet      TEXT    NOT NULL,
    labels     TEXT    NOT NULL,
    version    TEXT    NOT NULL,
    url        TEXT    NOT NULL,
    started_at BIGINT  NOT NULL,
    seen_at    BIGINT  NOT NULL,
    until      BIGINT  NOT NULL,
    draining   INTEGER NOT NULL DEFAULT 0 CHECK (draining IN (0, 1))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
