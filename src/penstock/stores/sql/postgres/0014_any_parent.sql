-- One parent may be enough: if_unmet = 'any'. A Penstock of the schema before does not know what that means.
ALTER TABLE penstock.dependency DROP CONSTRAINT dependency_if_unmet_check;
ALTER TABLE penstock.dependency ADD CONSTRAINT dependency_if_unmet_check CHECK (if_unmet IN ('cancel', 'fail', 'wait', 'any'));
UPDATE penstock.mark SET value = 14 WHERE name = 'needs';
