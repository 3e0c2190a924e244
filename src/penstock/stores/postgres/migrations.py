"""
The schema: numbered steps, forward only, each in a transaction, one process at a time.

Daemons are replaced one by one, so a new one brings the schema forward while old ones run. A step therefore only adds; what it
must break is broken by a later step, which says by the mark `needs` from which schema on a Penstock can live with it. An older one
than that is refused, a merely older one is not.
"""

from __future__ import annotations

from typing import Final

from penstock.core.errors import SchemaNewer, StoreFailed
from penstock.stores.common.rows import migrations
from penstock.stores.postgres.database import Database
from penstock.stores.postgres.pipeline import PipelineConnection

#: Any number will do that is the same for all.
LOCK: Final = 0x50454E31


def migrate(link: Database) -> None:
    steps = migrations("postgres")
    with link.failures(), link.connection() as con:
        if _version(con, link, len(steps)) >= len(steps):
            return
        with con.transaction():
            con.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            if con.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [link.schema]).fetchone() is None:
                con.execute(f"CREATE SCHEMA {link.quoted}".encode())
            for number in range(_version(con, link, len(steps)) + 1, len(steps) + 1):
                con.execute(link.in_schema(steps[number - 1]))
                con.execute(
                    link.in_schema("UPDATE penstock.mark SET value = %s WHERE name = 'schema'"), [number]
                )


def _version(con: PipelineConnection, link: Database, known: int) -> int:
    """0: there is nothing yet."""
    # Asked of the catalogue itself: `to_regclass` may answer from before the lock that we have waited for.
    tables = con.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = %s",
        [link.schema],
    ).fetchall()
    if not tables:
        return 0
    if ("mark",) not in tables:
        raise StoreFailed(f"the schema {link.schema} has tables of another program; choose another schema")
    marks: dict[str, int] = dict(
        con.execute(link.in_schema("SELECT name, value FROM penstock.mark")).fetchall()
    )
    if marks["needs"] > known:
        raise SchemaNewer(
            f"the schema {link.schema} is {marks['schema']} and needs a Penstock that knows {marks['needs']}, "
            f"this one knows {known}: upgrade Penstock",
            schema=marks["schema"],
            known=known,
        )
    return int(marks["schema"])
