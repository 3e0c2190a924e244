-- All that is counted lies in one table: ledger, accounts and tally were three, so every commit wrote a page of each by a statement of its own.
CREATE TABLE sums (
    scope   TEXT    NOT NULL CHECK (scope = 'host' OR scope = 'addon' OR scope = 'type' OR scope = 'constraint'),
    name    TEXT    NOT NULL,
    -- Over live dispatches. Debited when one is made, credited when it ends, never otherwise.
    units   INTEGER NOT NULL CHECK (units >= 0),
    running INTEGER NOT NULL CHECK (running >= 0),
    -- Of an addon: its account, if it has one, and how many jobs it has in which state, as JSON.
    weight  INTEGER CHECK (weight BETWEEN 1 AND 10000),
    paused  INTEGER CHECK (paused IN (0, 1)),
    average REAL,
    held    INTEGER CHECK (held >= 0),
    at      INTEGER,
    jobs    TEXT,
    PRIMARY KEY (scope, name)
) STRICT, WITHOUT ROWID;

INSERT INTO sums (scope, name, units, running) SELECT scope, name, units, running FROM ledger;
INSERT INTO sums (scope, name, units, running, weight, paused, average, held, at)
SELECT 'addon', addon_id, 0, 0, weight, paused, average, units, at FROM addon WHERE true
ON CONFLICT (scope, name) DO UPDATE SET weight = excluded.weight, paused = excluded.paused, average = excluded.average,
                                        held = excluded.held, at = excluded.at;
INSERT INTO sums (scope, name, units, running, jobs)
SELECT 'addon', addon_id, 0, 0, json_group_object(state, jobs) FROM tally WHERE jobs > 0 GROUP BY addon_id
ON CONFLICT (scope, name) DO UPDATE SET jobs = excluded.jobs;
DROP TABLE ledger;
DROP TABLE addon;
DROP TABLE tally;

CREATE VIEW ledger AS SELECT scope, name, units, running FROM sums;
CREATE VIEW addon AS SELECT name AS addon_id, weight, paused, average, held AS units, at FROM sums WHERE scope = 'addon' AND weight IS NOT NULL;
CREATE VIEW tally AS
SELECT name AS addon_id, of.key AS state, of.value AS jobs FROM sums CROSS JOIN json_each(sums.jobs) AS of WHERE scope = 'addon' AND sums.jobs IS NOT NULL;

-- In which batches its start and its end are told: for most jobs that is all there is to tell, and needs no mention.
ALTER TABLE dispatch ADD COLUMN started_in INTEGER;
ALTER TABLE dispatch ADD COLUMN ended_in INTEGER;
