"""The schema: made by whoever comes first, brought forward beside those who run, and refused when it is not ours to use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from tests.postgres.conftest import JOB, tick

from penstock.core.errors import SchemaNewer, StoreFailed
from penstock.core.jobs.intent import Intent
from penstock.stores.api import Complete, CompletedDispatch, Depth, Submit, committed
from penstock.stores.common.rows import migrations, statements
from penstock.stores.postgres import database as postgres_schema
from penstock.stores.postgres.pipeline import ConnectionOptions
from penstock.stores.postgres.store import PostgresStore


@pytest.fixture
def con(postgres):
    with psycopg.connect(postgres.dsn, autocommit=True) as con:
        yield con


def opened(place, **options):
    return PostgresStore(place.dsn, schema=place.schema, **options)


def marks(con, place):
    return dict(con.execute(f"SELECT name, value FROM {place.schema}.mark").fetchall())


def test_many_who_come_at_once_make_it_once(postgres, con):
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: opened(postgres), range(6)))

    for store in stores:
        store.close()
    assert len(migrations("postgres")) == marks(con, postgres)["schema"]


def test_a_schema_that_needs_a_newer_penstock_is_refused(postgres, con):
    opened(postgres).close()
    con.execute(f"UPDATE {postgres.schema}.mark SET value = 99")

    with pytest.raises(SchemaNewer, match="upgrade Penstock"):
        opened(postgres)


def test_a_schema_that_was_only_added_to_is_still_good_for_an_older_penstock(postgres, con):
    opened(postgres).close()
    con.execute(f"UPDATE {postgres.schema}.mark SET value = 99 WHERE name = 'schema'")
    con.execute(f"ALTER TABLE {postgres.schema}.job ADD COLUMN hue TEXT NOT NULL DEFAULT 'red'")
    store = opened(postgres)
    committed(store, Submit([JOB], Depth()))

    assert 1 == len(tick(store))
    store.close()


def test_old_daemons_go_on_while_a_new_one_brings_the_schema_forward(postgres, con, monkeypatch):
    old = opened(postgres)
    committed(old, Submit([JOB] * 2, Depth()))
    steps = (*migrations("postgres"), "ALTER TABLE penstock.job ADD COLUMN hue TEXT NOT NULL DEFAULT 'red'")
    monkeypatch.setattr(postgres_schema, "migrations", lambda _: steps)
    new = opened(postgres)

    assert len(steps) == marks(con, postgres)["schema"]
    assert 1 == len(tick(old, capacity=10))
    assert 1 == len(tick(new, capacity=20))
    old.close()
    new.close()


def test_a_step_that_fails_leaves_the_schema_as_it_was(postgres, con, monkeypatch):
    opened(postgres).close()
    steps = (*migrations("postgres"), "CREATE TABLE penstock.half (a INT); SELECT 1 / 0")
    monkeypatch.setattr(postgres_schema, "migrations", lambda _: steps)

    with pytest.raises(psycopg.errors.DivisionByZero):
        opened(postgres)
    assert len(migrations("postgres")) == marks(con, postgres)["schema"]
    assert (None,) == con.execute(f"SELECT to_regclass('{postgres.schema}.half')").fetchone()


def test_the_tables_of_another_program_are_left_alone(postgres, con):
    con.execute(f"CREATE SCHEMA {postgres.schema}")
    con.execute(f"CREATE TABLE {postgres.schema}.job (theirs INT)")

    with pytest.raises(StoreFailed, match="another program"):
        opened(postgres)


def test_a_schema_may_have_any_name(postgres, con):
    name = 'we"ird name'
    store = PostgresStore(postgres.dsn, schema=name)
    committed(store, Submit([JOB], Depth()))

    assert 1 == len(tick(store))
    assert [] == store.audit()
    store.close()
    con.execute('DROP SCHEMA "we""ird name" CASCADE')


def test_every_connection_is_bounded_in_time_and_looks_for_nothing_by_path(postgres):
    store = opened(
        postgres,
        options=ConnectionOptions(statement_timeout_ms=7_000, lock_timeout_ms=3_000, idle_timeout_ms=9_000),
    )

    with store.database.connection() as con:
        shown = [
            con.execute(f"SHOW {name}").fetchone()[0]
            for name in (
                "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "search_path",
            )
        ]  # fmt: skip
    store.close()
    assert ["7s", "3s", "9s", "pg_catalog"] == shown


def prepared(store):
    with store.database.connection() as con:
        return con.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement ~ 'job'").fetchone()[
            0
        ]


def test_what_is_asked_often_is_prepared_and_stays_so(postgres):
    store = opened(postgres)
    for _ in range(100):  # which of its connections a store takes is its own business
        [receipt] = committed(store, Submit([JOB], Depth()))
        store.job(receipt.job_id)
        if (known := prepared(store)) > 2:
            break

    assert known > 2
    store.close()


def test_what_is_asked_twice_in_one_trip_is_prepared_once(opened):
    store = opened()
    committed(store, Submit([JOB] * 1_000, Depth()))  # piece by piece

    with store.database.connection() as con:
        names = con.execute("SELECT statement, count(*) FROM pg_prepared_statements GROUP BY 1").fetchall()
    assert names
    assert {1} == {count for _, count in names}


def test_a_plan_that_was_made_for_empty_tables_is_not_kept(postgres, con):
    store = opened(postgres)
    con.execute(f"VACUUM ANALYZE {postgres.schema}.dispatch")
    con.execute(
        f"ALTER TABLE {postgres.schema}.dispatch SET (autovacuum_enabled = false)"
    )  # it would make new plans
    committed(store, Complete([CompletedDispatch("nobody.1")]))
    first_names = {}  # by connection: which one a store takes is its own business
    for _ in range(500):
        committed(store, Submit([Intent(addon_id="a", job_type="t", cost_units=1)] * 90, Depth()))
        committed(store, Complete([CompletedDispatch(run.dispatch_id) for run in tick(store)]))
        with store.database.connection() as used:
            backend, name = used.execute(
                "SELECT pg_backend_pid(), max(name) FROM pg_prepared_statements"
                " WHERE statement LIKE '%how = ''completed''%'"
            ).fetchone()
            if name is not None and first_names.setdefault(backend, name) != name:  # it is prepared again
                plan = used.execute(f"EXPLAIN EXECUTE {name}(1, '{{a}}', '{{b}}')".encode()).fetchall()
                break
    else:
        pytest.fail("no connection prepared the statement again")

    conditions = [line for (line,) in plan if "Index Cond" in line]
    assert ["done.dispatch_id" in line for line in conditions] == [True], plan
    store.close()


#: They grow with the jobs.
LARGE = {"job", "queue", "dispatch", "dependency", "trail", "ended_jobs"}
#: It joins batches that have no number yet to the same table, and there are few of them.
FEW_BATCHES = {"number_events"}


def read_whole(plan):
    """The large tables that this part of a plan reads from end to end, once for each time that it runs."""
    parts = [part for part in plan.get("Plans", ()) if part["Parent Relationship"] != "InitPlan"]
    whole = set().union(*map(read_whole, parts))
    by_key = plan["Node Type"] in ("Tid Scan", "Bitmap Heap Scan") or "Index Cond" in plan
    return whole if by_key else whole | ({plan.get("Relation Name")} & LARGE)


def read_again_and_again(plan):
    """The large tables that a plan reads from end to end for each row of another one."""
    again = set().union(*map(read_again_and_again, plan.get("Plans", ())))
    if plan["Node Type"] == "Nested Loop":
        outer, inner = (read_whole(part) for part in plan["Plans"][-2:])
        again |= inner if outer else set()
    return again


def test_no_statement_multiplies_two_tables_that_were_empty_when_statistics_were_gathered(postgres, con):
    store = opened(postgres)
    committed(store, Submit([JOB] * 500, Depth()))
    tables = con.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = %s", [postgres.schema]
    ).fetchall()
    for (table,) in tables:
        con.execute(f"ALTER TABLE {postgres.schema}.{table} SET (autovacuum_enabled = false)")
        con.execute(f"DELETE FROM {postgres.schema}.{table} WHERE '{table}' <> 'mark'")
        con.execute(f"ANALYZE {postgres.schema}.{table}")
    found = {}
    with store.database.connection() as planner:
        for name, statement in store.database.sql.items():
            try:
                planner.execute(b"PREPARE asked AS " + statement.text)
            except psycopg.Error:  # a part of other statements, or one that has no plan
                planner.rollback()
                continue
            [[n]] = planner.execute(
                "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'asked'"
            )
            values = f"({', '.join(['NULL'] * n)})" if n else ""
            [[[made]]] = planner.execute(f"EXPLAIN (FORMAT JSON) EXECUTE asked{values}".encode())
            planner.execute("DEALLOCATE asked")
            found[name] = read_again_and_again(made["Plan"])

    used = {name: tables for name, tables in found.items() if tables and not name.startswith("audit_")}
    assert len(found) > 120
    assert FEW_BATCHES | {"dispatch_columns"} == used.keys(), used
    store.close()


def rows_looked_at(plan):
    """How many rows the parts of a plan returned or dropped, on all their runs."""
    dropped = sum(n for name, n in plan.items() if name.startswith("Rows Removed"))
    return (plan["Actual Rows"] + dropped) * plan["Actual Loops"] + sum(
        map(rows_looked_at, plan.get("Plans", ()))
    )


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", ["lock_children", "lock_groups_of", "children"])
def test_the_end_of_some_members_of_a_batch_does_not_look_at_all_others(postgres, con, name, mode):
    store = opened(postgres)
    batch, ended = 1 << 62 | 5, list(range(1, 11))
    committed(store, Submit([JOB] * 1_000, Depth()))
    con.execute(
        f"INSERT INTO {postgres.schema}.dependency (parent, child, condition, if_unmet)"
        f" SELECT no, {batch}, 'done', 'cancel' FROM {postgres.schema}.job"
    )
    values = {"bigint[]": [f"'{{{','.join(map(str, ended))}}}'", f"'{{{','.join('0' * 10)}}}'"]}
    values |= {"text[]": ["'{}'"], "bigint": ["100"]}
    with store.database.connection() as planner:
        planner.execute(f"SET plan_cache_mode = {mode}".encode())
        planner.execute(b"PREPARE asked AS " + store.database.sql[name].text)
        [[types]] = planner.execute(
            "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'asked'"
        )
        given = ", ".join(values[each].pop(0) for each in types)
        [[[made]]] = planner.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE asked({given})".encode())

    assert rows_looked_at(made["Plan"]) < 300
    store.close()


def test_behind_a_pooler_the_bounds_come_with_each_transaction_and_nothing_is_prepared(postgres):
    store = opened(postgres, options=ConnectionOptions(statement_timeout_ms=7_000, pooler=True))
    for _ in range(8):
        [receipt] = committed(store, Submit([JOB], Depth()))
        store.job(receipt.job_id)
    shown = store.database.snapshot(lambda session: session.execute_sql("SHOW statement_timeout"))

    with store.database.connection() as con:
        assert ("7s",) != con.execute("SHOW statement_timeout").fetchone()
    assert 0 == prepared(store)
    assert [("7s",)] == shown
    store.close()


def test_names_are_qualified_wherever_they_stand():
    """Some statements run with the caller's search_path."""
    tables = (
        "job",
        "queue",
        "flight",
        "ended_jobs",
        "admission_class",
        "dispatch",
        "ledger",
        "addon",
        "tally",
        "budget",
        "checkpoint",
        "trail",
        "mention",
        "mark",
    )
    for name, sql in statements("postgres").items():
        for table in tables:
            for word in ("FROM", "JOIN", "INTO", "UPDATE"):
                assert f"{word} {table} " not in sql, name


TWIN = """INSERT INTO {0}.dispatch (dispatch_id, job_no, class_no, host, fence, phase, events, started_in, admitted_at, expires_at)
          SELECT dispatch_id, job_no, class_no, 'other', fence, phase, events, 0, admitted_at, expires_at FROM {0}.dispatch"""


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("UPDATE {}.queue SET line = NULL", "queue"),
        ("UPDATE {}.flight SET live = 0", "flight"),
        ("UPDATE {}.job SET state = 'NOWHERE'", "job"),
        ("UPDATE {}.ledger SET units = -1", "ledger"),
        ("UPDATE {}.event SET kind = 'OTHER'", "cannot update view"),
        ("UPDATE {}.dispatch SET phase = 'ended'", "dispatch"),
        (TWIN, "dispatch_pkey"),
    ],
)
def test_the_database_itself_refuses_what_would_break_an_invariant(opened, postgres_emptied, sql, why):
    store = opened()
    committed(store, Submit([JOB] * 2, Depth()))
    tick(store, capacity=10)

    with store.database.connection() as con, pytest.raises(psycopg.Error, match=why):
        con.execute(sql.format("emptied").encode())


def test_a_final_state_cannot_be_left_even_by_hand(opened):
    store = opened()
    committed(store, Submit([JOB], Depth()))

    with store.database.connection() as con, con.transaction(force_rollback=True):
        con.execute("UPDATE emptied.job SET state = 'CANCELED', ended_at = 1")
        with pytest.raises(psycopg.errors.RaiseException, match="final"):
            con.execute("UPDATE emptied.job SET state = NULL, ended_at = NULL")


def test_an_attempt_that_has_ended_cannot_live_again_even_by_hand(opened):
    store = opened()
    committed(store, Submit([JOB], Depth()))
    tick(store)

    with store.database.connection() as con, con.transaction(force_rollback=True):
        con.execute("UPDATE emptied.dispatch SET phase = 'ended', ended_at = 1, how = 'completed'")
        with pytest.raises(psycopg.errors.RaiseException, match="ended"):
            con.execute("UPDATE emptied.dispatch SET phase = 'leased', ended_at = NULL, how = NULL")
