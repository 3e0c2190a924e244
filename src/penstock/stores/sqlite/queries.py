"""
Makes the SQL of a `Query`, so that SQLite uses an index whatever the list or count filters by.

Only fixed words are composed; every value is bound.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.core.jobs.states import IN_FLIGHT, JobState
from penstock.stores.api import MOST_SEARCHED, Query, among_newest
from penstock.stores.common.reads import like_pattern
from penstock.stores.sqlite.connection import SQL


def find_sql(query: Query) -> tuple[str, list[Any]]:
    if not query.states:
        end, values = _filters(query, "j", "j.no")
        return f"{SQL['all_jobs']} WHERE 1{end}", values
    # One ordered walk per state, limited to a page, so that only the jobs of the page are read whole.
    walks: list[str] = []
    values = []
    for state in query.states:
        walk, number = _walk(state)
        end, more = _filters(query, "job", number)
        walks.append(f"SELECT * FROM ({SQL[walk]}{end})")  # noqa: S608 - fixed words
        values += [str(state), *more]
    order = "DESC" if query.newest_first else "ASC"
    wanted = " UNION ALL ".join(walks)
    return f"{SQL['all_jobs']} WHERE j.no IN ({wanted}) ORDER BY j.no {order} LIMIT ?", [*values, query.limit]


def _walk(state: JobState) -> tuple[str, str]:
    """The statement that walks over the jobs of a state, and its column with the job's number."""
    if state is JobState.QUEUED:
        return "queued_jobs", "place.no"
    if state is JobState.DONE:
        return "completed_jobs", "place.job_no"
    return ("jobs_in_flight", "place.no") if state in IN_FLIGHT else ("settled_jobs", "job.no")


#: `?job` stands for the table of the jobs.
_SEARCH: Final = r"""
 AND ?job.no > (SELECT max(no) FROM job) - ?
 AND (?job.class_no IN (SELECT no FROM admission_class WHERE job_type LIKE ? ESCAPE '\')
      OR EXISTS (SELECT 1 FROM intent t WHERE t.no = ?job.no AND (
            t.payload LIKE ? ESCAPE '\' OR EXISTS (SELECT 1 FROM json_each(t.tags) WHERE value LIKE ? ESCAPE '\')))
      OR EXISTS (SELECT 1 FROM ended_dispatch e WHERE e.job_no = ?job.no AND e.failure LIKE ? ESCAPE '\'))"""


def count_sql(query: Query) -> tuple[str, list[Any]]:
    end, values = _filters(among_newest(query), "j", "j.no")
    jobs = f"SELECT j.state FROM job_full j WHERE 1{end}"  # noqa: S608 - fixed words
    return f"SELECT state, count(*) FROM ({jobs}) GROUP BY state", values  # noqa: S608 - fixed words


def _filters(query: Query, of: str, number: str) -> tuple[str, list[Any]]:
    where = ""
    values: list[Any] = []
    if query.addon_id is not None:
        where += f" AND {of}.addon_id = ?"
        values.append(query.addon_id)
    if query.job_type is not None:
        where += f" AND {of}.class_no IN (SELECT no FROM admission_class WHERE job_type = ?)"  # noqa: S608 - fixed words
        values.append(query.job_type)
    if query.tag is not None:
        tagged = "SELECT 1 FROM intent t, json_each(t.tags) tag WHERE tag.value = ?"
        where += f" AND EXISTS ({tagged} AND t.no = {of}.no)"
        values.append(query.tag)
    if query.part is not None:
        where += f" AND instr({of}.job_id, ?) > 0"
        values.append(query.part)
    if query.since is not None:
        where += f" AND {of}.created_at >= ?"
        values.append(query.since)
    if query.before is not None:
        where += f" AND {of}.created_at < ?"
        values.append(query.before)
    if query.text is not None:
        where += _SEARCH.replace("?job", of)
        values += [MOST_SEARCHED, *[like_pattern(query.text)] * 4]
    # One bound in each direction: of two the index would use only the first. Numbers below 0 are leases
    # without a job.
    where += f" AND {number} > ?"
    values.append(0 if query.newest_first else query.after)
    if query.newest_first and query.after:
        where += f" AND {number} < ?"
        values.append(query.after)
    order = "DESC" if query.newest_first else "ASC"
    return f"{where} ORDER BY {number} {order} LIMIT ?", [*values, query.limit]
