"""The description is made from the route table; the documents and the fuzzer hold it to its word."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from fuzz import fuzz

from penstock import wire
from penstock.server.routes import ROUTES, OpenRoute, describe
from penstock.wire import PREFIX, Scope
from penstock.wire.common import WireAnswer, WireRequest

DOCS = Path(__file__).parents[2] / "docs" / "http.md"
SOAK = float(os.environ.get("PENSTOCK_SOAK", "0"))


def test_every_route_is_described_with_its_body_query_and_scope():
    paths = describe(ROUTES)["paths"]

    for route in ROUTES:
        operation = paths[route.path][route.verb.lower()]
        assert str(route.scope) in operation["description"]
        assert ("requestBody" in operation) == (route.body is not None)
        names = [p["name"] for p in operation["parameters"] if p["in"] == "query"]
        assert names == list(route.query.__struct_fields__ if route.query else ())
        assert {"401", "403", "422", "503"} <= operation["responses"].keys()


def test_every_reference_leads_somewhere():
    description = describe(ROUTES)
    found = set(re.findall(r"#/components/schemas/(\w+)", str(description)))

    assert found <= description["components"]["schemas"].keys()


def test_every_operation_has_a_name_of_its_own():
    names = [op["operationId"] for path in describe(ROUTES)["paths"].values() for op in path.values()]

    assert len(names) == len(set(names)) == len(ROUTES)


def test_requests_refuse_and_answers_allow_what_they_do_not_know():
    schemas = describe(ROUTES)["components"]["schemas"]

    for name, schema in schemas.items():
        kind = getattr(wire, name, None)
        if isinstance(kind, type) and issubclass(kind, WireRequest):
            assert schema["additionalProperties"] is False, name
        elif isinstance(kind, type) and issubclass(kind, WireAnswer):
            assert "additionalProperties" not in schema, name


def test_the_document_lists_every_route_as_the_table_has_it():
    text = DOCS.read_text("utf-8")

    assert route_list() in text, f"put this into {DOCS.name}:\n{route_list()}"


def route_list():
    rows = [
        f"| {r.verb} | `{r.path.removeprefix(PREFIX)}` | {'-' if isinstance(r.scope, OpenRoute) else f'`{r.scope}`'} | {r.summary} |"
        for r in ROUTES
    ]
    return "\n".join(["| | path | scope | |", "|---|---|---|---|", *rows])


def test_the_document_names_every_scope():
    text = DOCS.read_text("utf-8")

    assert [scope for scope in Scope if f"| `{scope}` |" not in text] == []


@pytest.mark.long
@pytest.mark.soak
def test_a_fuzzer_finds_no_server_error_and_no_drift(tmp_path):
    if SOAK:
        code, received = fuzz(tmp_path, int(10 * SOAK))
    else:
        code, received = fuzz(tmp_path, 1, phases="fuzzing", paths="/(queue|lease)/")

    assert code == 0, received


def test_what_the_document_shows_puts_no_token_on_a_command_line(tmp_path):
    """Its first lines, run as they stand. Every user can read the arguments of every process."""
    page = DOCS.read_text()
    [script] = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "AUTH=" in block]
    folder = tmp_path / ".local" / "share" / "penstock"
    folder.mkdir(parents=True)
    (folder / "token").write_text("pst_id_secret\n")
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$HOME/arguments"\n')
    curl.chmod(0o700)
    subprocess.run(
        ["/bin/sh", "-ec", script],
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )

    arguments = (tmp_path / "arguments").read_text()
    assert "pst_id_secret" not in arguments
    header = Path(re.search(r"^@(.*)$", arguments, re.MULTILINE)[1])
    assert header.read_text() == "Authorization: Bearer pst_id_secret\n"
    assert header.stat().st_mode & 0o777 == 0o600
