-- What is learned about job types from the trail, as JSON by name; the row without a name has the number of the last event that was read.
CREATE TABLE learned (
    name TEXT    PRIMARY KEY,
    seq  INTEGER NOT NULL,
    data TEXT    NOT NULL CHECK (data = '' OR json_valid(data))
) STRICT, WITHOUT ROWID;
