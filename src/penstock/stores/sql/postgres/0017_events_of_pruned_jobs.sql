-- Two hosts that pruned at the same time could leave events of jobs that they pruned. Those events go: see `batches_of`, which reads right since.
SET LOCAL statement_timeout = 0;
WITH gone AS MATERIALIZED (
    SELECT e.batch, e.i FROM (
        SELECT batch, i, CASE kind WHEN 'SCHEDULE_FIRED' THEN data ->> 'job_id' ELSE job_id END AS job_id FROM penstock.event OFFSET 0) AS e
    WHERE e.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM penstock.job j WHERE j.job_id = e.job_id))
UPDATE penstock.trail t SET events = (
    SELECT json_agg(CASE WHEN (t.batch, e.i) NOT IN (SELECT batch, i FROM gone) THEN e.told END ORDER BY e.i)::text
    FROM json_array_elements(t.events::json) WITH ORDINALITY AS e (told, i))
WHERE t.batch IN (SELECT batch FROM gone);
