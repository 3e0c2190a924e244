-- What a host must have, for a job of this demand to start on it: words with a space between them. A Penstock that does not know of
-- them would start such a job anywhere, so it must not come to this schema any more.
ALTER TABLE penstock.demand ADD COLUMN labels TEXT NOT NULL DEFAULT '';
UPDATE penstock.mark SET value = 3 WHERE name = 'needs';
