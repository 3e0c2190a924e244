-- The kinds of jobs that the present workers of a host ask for: a host without a worker for a job leaves it to one that has. A Penstock of the schema
-- before goes on working: it reserves such jobs, as all hosts did then.
ALTER TABLE penstock.host ADD COLUMN workers TEXT NOT NULL DEFAULT '[]';
