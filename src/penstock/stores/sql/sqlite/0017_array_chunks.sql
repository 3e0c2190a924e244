-- Which indices of an array failed, and which of them wait for another run: a bit for each of the 60 from `chunk` * 60 on. They were ranges in the
-- row of the array, and each end wrote all of them.
CREATE TABLE array_chunk (
    array_id TEXT    NOT NULL,
    chunk    INTEGER NOT NULL,
    failed   INTEGER NOT NULL DEFAULT 0,
    again    INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (array_id, chunk)
) STRICT, WITHOUT ROWID;
INSERT INTO array_chunk (array_id, chunk, failed, again)
WITH RECURSIVE marked (array_id, is_failed, i, last) AS (
    SELECT array_id, 1, value ->> 0, value ->> 1 FROM job_array, json_each(state, '$.failed')
    UNION ALL SELECT array_id, 0, value ->> 0, value ->> 1 FROM job_array, json_each(state, '$.again')
    UNION ALL SELECT array_id, is_failed, i + 1, last FROM marked WHERE i < last)
SELECT array_id, i / 60, sum(is_failed << i % 60), sum((NOT is_failed) << i % 60) FROM marked GROUP BY array_id, i / 60;
UPDATE job_array SET state = json_set(state,
    '$.failed', (SELECT coalesce(sum((value ->> 1) - (value ->> 0) + 1), 0) FROM json_each(state, '$.failed')),
    '$.again', (SELECT coalesce(sum((value ->> 1) - (value ->> 0) + 1), 0) FROM json_each(state, '$.again')));
