-- One thing has one name, here and in a file: a table or view that both have is called the same and is of the same kind. A Penstock of the schema before
-- finds none of its tables, so it must not come to this schema any more; one that is running fails at its next statement, and what it had leased comes
-- back when its leases are over.
ALTER TABLE penstock.demand RENAME TO admission_class;
ALTER TABLE penstock.job RENAME COLUMN demand TO class_no;
ALTER TABLE penstock.queue RENAME COLUMN demand TO class_no;
ALTER TABLE penstock.dispatch RENAME COLUMN demand TO class_no;
ALTER TABLE penstock.flight RENAME COLUMN loan TO standalone_lease;
ALTER TABLE penstock.ended RENAME TO ended_jobs;
ALTER INDEX penstock.ended_at RENAME TO ended_jobs_at;

ALTER VIEW penstock.whole RENAME TO job_full;
ALTER TABLE penstock.job_full RENAME COLUMN demand TO class_no;
ALTER VIEW penstock.live RENAME TO dispatch_in_flight;
ALTER TABLE penstock.dispatch_in_flight RENAME COLUMN demand TO class_no;
ALTER VIEW penstock.told_in RENAME TO event_batch;

-- A dispatch with its job and its class.
CREATE VIEW penstock.dispatch_full AS
SELECT d.dispatch_id, d.job_no, j.job_id, d.class_no, c.addon_id, d.host, d.fence, c.cost_units, d.phase, d.admitted_at, d.started_at, d.expires_at,
       d.ends_at, d.stop_at, d.stop_for, d.reason, d.worker, d.spent, d.progress, d.ended_at, d.how, d.result, d.failure, d.started_in, d.pid
FROM penstock.dispatch d JOIN penstock.admission_class c ON c.no = d.class_no LEFT JOIN penstock.job j ON j.no = d.job_no;

-- Ends the statement that starts what a round picked when another round was there first. JB001 is a code of our own.
CREATE FUNCTION penstock.refuse_round() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a job that the round saw has changed since' USING ERRCODE = 'JB001';
END $$;

UPDATE penstock.mark SET value = 7 WHERE name = 'needs';
