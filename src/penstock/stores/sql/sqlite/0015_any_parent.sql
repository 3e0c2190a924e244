-- One parent may be enough: if_unmet = 'any'.
CREATE TABLE dependency_15 (
    parent    INTEGER NOT NULL,
    child     INTEGER NOT NULL,
    condition TEXT    NOT NULL CHECK (condition = 'ok' OR condition = 'done' OR condition = 'failed'),
    if_unmet  TEXT    NOT NULL CHECK (if_unmet = 'cancel' OR if_unmet = 'fail' OR if_unmet = 'wait' OR if_unmet = 'any'),
    status    TEXT    NOT NULL DEFAULT 'open' CHECK (status = 'open' OR status = 'met' OR status = 'void'),
    PRIMARY KEY (child, parent)
) STRICT, WITHOUT ROWID;
INSERT INTO dependency_15 SELECT parent, child, condition, if_unmet, status FROM dependency;
DROP TABLE dependency;
ALTER TABLE dependency_15 RENAME TO dependency;
CREATE INDEX dependency_open ON dependency (parent, child) WHERE status = 'open';
CREATE INDEX dependency_parent ON dependency (parent, child);
