-- Whether a run of the job may be asked, and then forced, to give its units to a job of clearly higher priority.
ALTER TABLE intent ADD COLUMN preemptible INTEGER NOT NULL DEFAULT 1 CHECK (preemptible IN (0, 1));
