-- Which indices of an array failed, and which of them wait for another run: a bit for each of the 60 from `chunk` * 60 on. They were ranges in the
-- row of the array, and each end wrote all of them. A Penstock of the schema before would look for them there.
SET LOCAL statement_timeout = 0;
CREATE TABLE penstock.array_chunk (
    array_id TEXT    COLLATE "C" NOT NULL,
    chunk    INTEGER NOT NULL,
    failed   BIGINT  NOT NULL DEFAULT 0,
    again    BIGINT  NOT NULL DEFAULT 0,
    PRIMARY KEY (array_id, chunk)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
INSERT INTO penstock.array_chunk (array_id, chunk, failed, again)
SELECT array_id, i / 60, sum(CASE key WHEN 'failed' THEN 1::bigint << (i % 60)::integer ELSE 0 END), sum(CASE key WHEN 'again' THEN 1::bigint << (i % 60)::integer ELSE 0 END)
FROM penstock.job_array CROSS JOIN (VALUES ('failed'), ('again')) AS kind (key)
CROSS JOIN LATERAL jsonb_array_elements(coalesce(state::jsonb -> key, '[]'::jsonb)) AS ranges (range)
CROSS JOIN LATERAL generate_series((range ->> 0)::bigint, (range ->> 1)::bigint) AS indices (i)
GROUP BY array_id, i / 60;
UPDATE penstock.job_array SET state = (state::jsonb || (
    SELECT jsonb_object_agg(key, (
        SELECT coalesce(sum((range ->> 1)::bigint - (range ->> 0)::bigint + 1), 0)
        FROM jsonb_array_elements(coalesce(state::jsonb -> key, '[]'::jsonb)) AS ranges (range)))
    FROM (VALUES ('failed'), ('again')) AS kind (key)))::text;
UPDATE penstock.mark SET value = 18 WHERE name = 'needs';
