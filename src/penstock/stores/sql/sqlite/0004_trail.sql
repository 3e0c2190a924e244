-- One row per commit that told something, with all that it told: a row and an index entry for every event was as dear as all the rest of a move.
CREATE TABLE trail (
    -- The number of its first event. Taken under the write lock, so the numbers are the order of the commits.
    batch  INTEGER PRIMARY KEY,
    size   INTEGER NOT NULL CHECK (size > 0),
    -- The number of the last job that had been submitted by then. With the number of the last event it is where counting goes on.
    jobs   INTEGER NOT NULL,
    -- JSON, an array per event in their order: at, kind, job_id, n, state, reason, attempt (a dispatch of its job by its fence), data. null: forgotten.
    events TEXT    NOT NULL
) STRICT;

-- Which batches tell of a job, besides the one that it was submitted in, which the job itself knows.
CREATE TABLE mention (
    job_no INTEGER NOT NULL,
    batch  INTEGER NOT NULL,
    PRIMARY KEY (job_no, batch)
) STRICT, WITHOUT ROWID;
ALTER TABLE job ADD COLUMN submitted_in INTEGER NOT NULL DEFAULT 0;

INSERT INTO trail (batch, size, jobs, events)
WITH RECURSIVE number (seq) AS (
    SELECT 1 WHERE EXISTS (SELECT 1 FROM mark WHERE name = 'event' AND value > 0)
    UNION ALL SELECT seq + 1 FROM number WHERE seq < (SELECT value FROM mark WHERE name = 'event'))
SELECT min(seq), count(*), (SELECT value FROM mark WHERE name = 'job'), json_group_array(json(told)) FROM (
    SELECT number.seq, CASE WHEN e.seq IS NOT NULL THEN json_array(
        e.at, e.kind, j.job_id, e.n, e.state, e.reason,
        iif(j.job_id IS NULL, e.dispatch_id, substr(e.dispatch_id, length(j.job_id) + 2)), json(e.data)) END AS told
    FROM number LEFT JOIN event e ON e.seq = number.seq LEFT JOIN job j ON j.no = e.job_no ORDER BY number.seq)
GROUP BY (seq - 1) / 1000 HAVING count(told) > 0 OR max(seq) = (SELECT value FROM mark WHERE name = 'event');
INSERT INTO mention (job_no, batch) SELECT DISTINCT job_no, (seq - 1) / 1000 * 1000 + 1 FROM event WHERE job_no IS NOT NULL;
DROP TRIGGER event_kept;
DROP TABLE event;
DROP TABLE mark;

-- For people, and to check by.
CREATE VIEW event AS
SELECT t.batch + e.key AS seq, t.batch, e.value ->> 0 AS at, e.value ->> 1 AS kind, e.value ->> 2 AS job_id, e.value ->> 3 AS n,
       e.value ->> 4 AS state, e.value ->> 5 AS reason, e.value ->> 6 AS attempt, nullif(e.value -> 7, 'null') AS data
FROM trail t CROSS JOIN json_each(t.events) AS e WHERE e.type = 'array';

CREATE TRIGGER trail_kept BEFORE UPDATE ON trail
BEGIN SELECT RAISE(ABORT, 'events are only ever added'); END;
