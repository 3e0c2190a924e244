-- How busy a host is in each hour of the week (0: Monday 00:00 UTC), of 10. The newest week counts three tenths.
CREATE TABLE load_hour (
    host TEXT    NOT NULL,
    hour INTEGER NOT NULL CHECK (hour BETWEEN 0 AND 167),
    busy REAL    NOT NULL,
    at   INTEGER NOT NULL,
    PRIMARY KEY (host, hour)
) STRICT, WITHOUT ROWID;
