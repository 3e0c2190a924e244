-- What a host must have, for a job of this demand to start on it: words with a space between them.
ALTER TABLE demand ADD COLUMN labels TEXT NOT NULL DEFAULT '';
