-- How busy a host is in each hour of the week (0: Monday 00:00 UTC), of 10. The newest week counts three tenths.
CREATE TABLE penstock.load_hour (
    host TEXT    COLLATE "C" NOT NULL,
    hour INTEGER NOT NULL CHECK (hour BETWEEN 0 AND 167),
    busy DOUBLE PRECISION NOT NULL,
    at   BIGINT  NOT NULL,
    PRIMARY KEY (host, hour)
) WITH (fillfactor = 50);
