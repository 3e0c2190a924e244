"""
Makes the SQL of a `Query`, with conditions that an index of PostgreSQL can use.

Only fixed words are composed; every value is bound. Tables have the name of the default schema
(`Database.in_schema`).
"""

from __future__ import annotations

from typing import Any, Final

from penstock.core.jobs.states import IN_FLIGHT, SETTLED, JobState
from penstock.core.text import ascii_lower
from penstock.stores.api import MOST_SEARCHED, Query, among_newest
from penstock.stores.common.reads import like_pattern
from penstock.stores.common.rows import statements
from penstock.stores.postgres.pipeline import array

_JOBS: Final = statements("postgres")["job_columns"]


def find_sql(query: Query) -> tuple[str, dict[str, Any]]:
    where, values = _where(query)
    return f"{_JOBS} {where}", values


def count_sql(query: Query) -> tuple[str, dict[str, Any]]:
    where, values = _where(among_newest(query))
    jobs = f"SELECT j.state FROM penstock.job_full j {where}"  # noqa: S608 - fixed words
    return f"SELECT state, count(*) FROM ({jobs}) found GROUP BY state", values  # noqa: S608 - fixed words


#: The conditions of a query by its fields.
_CONDITIONS: Final = {
    "addon_id": "j.addon_id = %(addon_id)s",
    "job_type": "j.class_no IN (SELECT no FROM penstock.admission_class WHERE job_type = %(job_type)s)",
    "tag": "j.tags::jsonb ? %(tag)s::text",
    "part": "position(%(part)s IN j.job_id) > 0",
    "since": "j.created_at >= %(since)s",
    "before": "j.created_at < %(before)s",
    "text": """j.no > (SELECT max(no) FROM penstock.job) - %(most)s
        AND (j.class_no IN (SELECT no FROM penstock.admission_class WHERE lower(job_type COLLATE "C") LIKE %(text)s)
             OR lower(j.payload COLLATE "C") LIKE %(text)s
             OR EXISTS (SELECT 1 FROM jsonb_array_elements_text(j.tags::jsonb) tag WHERE lower(tag COLLATE "C") LIKE %(text)s)
             OR EXISTS (SELECT 1 FROM penstock.dispatch d WHERE d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
                        AND lower(d.failure COLLATE "C") LIKE %(text)s))""",
}


def _where(query: Query) -> tuple[str, dict[str, Any]]:
    """The condition, order and limit of a query. Only fixed words are composed; every value is bound."""
    where: list[str] = ["true"]
    values: dict[str, Any] = {"limit": query.limit}
    if query.states:
        where += ["j.state = ANY(%(states)s::text[])", *_by_index(frozenset(query.states))]
        values["states"] = array([str(state) for state in query.states])
    for name, condition in _CONDITIONS.items():
        if (value := getattr(query, name)) is not None:
            where.append(condition)
            values[name] = value
    if query.text is not None:
        values |= {"text": like_pattern(ascii_lower(query.text)), "most": MOST_SEARCHED}
    if query.after:
        where.append("j.no < %(after)s" if query.newest_first else "j.no > %(after)s")
        values["after"] = query.after
    order = "DESC" if query.newest_first else "ASC"
    return f"WHERE {' AND '.join(where)} ORDER BY j.no {order} LIMIT %(limit)s", values


def _by_index(states: frozenset[JobState]) -> list[str]:
    """The same condition again, in the form of an index that has such jobs and few others."""
    if states <= {JobState.QUEUED}:
        return ["j.no IN (SELECT no FROM penstock.queue)"]
    if states <= IN_FLIGHT:
        return ["j.no = ANY(ARRAY(SELECT job_no FROM penstock.dispatch_in_flight))"]
    if states <= SETTLED - {JobState.DONE}:
        return ["j.settled = ANY(%(states)s::text[]) AND j.settled <> 'DONE'"]
    return []
