"""A list of jobs, as SQL that goes by an index whatever is asked for. Only fixed words are put together here; every value is bound."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.core.states import IN_FLIGHT, JobState
from penstock.stores.protocol import Query
from penstock.stores.sqlite_file import statements

__all__ = ["found", "marks"]


def found(query: Query) -> tuple[str, list[Any]]:
    """What comes behind `job_columns`, and its values."""
    sql = statements()
    if not query.states:
        end, values = _filters(query, "j", "j.no")
        return f"{sql['all_jobs']} WHERE 1{end}", values
    # One ordered walk per state, each no longer than the page: the few that were found are then read whole.
    walks: list[str] = []
    values = []
    for state in query.states:
        walk, number = _walk(state)
        end, its_values = _filters(query, "job", number)
        walks.append(f"SELECT * FROM ({sql[walk]}{end})")  # noqa: S608 - fixed words
        values += [str(state), *its_values]
    order = "DESC" if query.newest_first else "ASC"
    wanted = " UNION ALL ".join(walks)
    return f"{sql['all_jobs']} WHERE j.no IN ({wanted}) ORDER BY j.no {order} LIMIT ?", [*values, query.limit]


def _walk(state: JobState) -> tuple[str, str]:
    """And what it is ordered by: the number of the job, as the table has it that is walked."""
    if state is JobState.QUEUED:
        return "queued_jobs", "place.no"
    if state is JobState.DONE:
        return "done_ones", "place.job_no"
    return ("jobs_in_flight", "place.no") if state in IN_FLIGHT else ("settled_jobs", "job.no")


def _filters(query: Query, of: str, number: str) -> tuple[str, list[Any]]:
    where = ""
    values: list[Any] = []
    if query.addon_id is not None:
        where += f" AND {of}.addon_id = ?"
        values.append(query.addon_id)
    if query.job_type is not None:
        where += f" AND {of}.demand IN (SELECT no FROM demand WHERE job_type = ?)"  # noqa: S608 - fixed words
        values.append(query.job_type)
    if query.tag is not None:
        tagged = "SELECT 1 FROM intent t, json_each(t.tags) tag WHERE tag.value = ?"
        where += f" AND EXISTS ({tagged} AND t.no = {of}.no)"
        values.append(query.tag)
    if query.part is not None:
        where += f" AND instr({of}.job_id, ?) > 0"
        values.append(query.part)
    # One bound each way: of two the index would go by the first. Below zero are leases without a job.
    where += f" AND {number} > ?"
    values.append(0 if query.newest_first else query.after)
    if query.newest_first and query.after:
        where += f" AND {number} < ?"
        values.append(query.after)
    order = "DESC" if query.newest_first else "ASC"
    return f"{where} ORDER BY {number} {order} LIMIT ?", [*values, query.limit]


def marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))
