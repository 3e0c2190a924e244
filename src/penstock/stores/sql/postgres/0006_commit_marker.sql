-- One row per transaction whose COMMIT may have to be proved: the transaction inserts it, so it is there if and only if the transaction was committed.
-- `void`: the transaction was not committed and cannot be any more, because another one has taken its token.
-- The process that inserted a row deletes it with its next transaction.
CREATE TABLE penstock.commit_marker (
    token UUID    PRIMARY KEY,
    void  BOOLEAN NOT NULL DEFAULT false,
    at    BIGINT  NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
) WITH (autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
